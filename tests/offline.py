"""A live run and the features of its recipe on disk, for tests of offline training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command import Done, draftline_here

LAST = "checkpoints/step-0000008"
SHARD_GIB = 2e-5  # 21,475 bytes: about 55 tokens of three 32-wide float32 states, so several shards


def prepare(recipe: Path, folder: Path, *words: str) -> Done:
    return draftline_here("prepare", recipe, "--features", folder, "--shard-gib", str(SHARD_GIB), *words)


def train(home: Path, out: Path, features: Path, *words: str) -> Done:
    return draftline_here("train", home / "recipe.yaml", f"train.out={out}", f"target.features={features}", *words)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*"))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    """One bit of the last document's features."""
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    place = json.loads(path.read_bytes()[8:header])["features"]["data_offsets"]
    whole = bytearray(path.read_bytes())
    whole[header + place[1] - 1] ^= 1
    path.write_bytes(whole)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def replaced(path: Path) -> None:
    """Another shard in its place."""
    shutil.copy(shards(path.parent)[0], path)
