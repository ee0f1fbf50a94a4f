"""`draftline prepare`: the budget first, shards whole, an interrupted call goes on, torn shards written again."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from command import draftline_here
from draftline.channel.shards import hash_ids, plan, read_index
from draftline.target.capture import FeatureCapture
from offline import SHARD_GIB, emptied, flipped, prepare, replaced, shards, train, truncated


def test_the_budget_is_printed_before_anything_is_captured(home: Path, tmp_path: Path) -> None:
    done = prepare(home / "recipe.yaml", tmp_path / "features")
    index = read_index(tmp_path / "features")
    tokens, documents, count = index.identity.tokens, index.identity.documents, len(index.shards)
    assert documents == 24 and count > 2
    needed = tokens * (3 * 32 * 4 + 4) + documents * 16 + count * 4096
    assert f"({needed:,} bytes)" in done.out and "384 bytes a token" in done.out
    assert done.out.index("GiB needed") < done.out.index("prepare ")
    assert sum(path.stat().st_size for path in shards(tmp_path / "features")) <= needed
    assert [shard.documents for shard in index.shards] == [
        len(load_file(p)["lengths"]) for p in shards(home / "features")
    ]


HARMS = (truncated, flipped, emptied, replaced, Path.unlink)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_harmed_shard_is_named_and_written_again(
    home: Path, copy: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = shards(copy)[1]
    before = path.read_bytes()
    harm(path)
    done = train(home, tmp_path / "run", copy)
    assert done.code == 2 and f"{path} is torn or damaged" in done.err, done.err
    again = prepare(home / "recipe.yaml", copy)
    assert again.code == 0 and f"{path} is torn or damaged" in again.out and "it is written again" in again.out
    assert path.read_bytes() == before


def test_an_interrupted_prepare_goes_on(home: Path, copy: Path, tmp_path: Path) -> None:
    """Killed between a shard's name and the index, after the second shard."""
    killed = f"""
import os, signal, sys
from draftline.cli import main
from draftline.channel import shards
publish = shards.publish
def kill_after(partial, path):
    publish(partial, path)
    if path.name == "shard-00002.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
shards.publish = kill_after
sys.argv = ["draftline", "prepare", {str(home / "recipe.yaml")!r}, "--features", {str(tmp_path / "f")!r},
            "--shard-gib", "{SHARD_GIB}"]
main()
"""
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    index = read_index(tmp_path / "f")
    assert [shard.file for shard in index.shards] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    kept = [(path, path.stat().st_ino) for path in shards(tmp_path / "f")[:2]]
    refused = train(home, tmp_path / "run", tmp_path / "f")
    assert refused.code == 2 and "shards are not written yet" in refused.err
    again = prepare(home / "recipe.yaml", tmp_path / "f")
    assert again.code == 0 and ", 2 whole" in again.out, again.err
    assert [(path, path.stat().st_ino) for path in shards(tmp_path / "f")[:2]] == kept
    for mine, theirs in zip(shards(tmp_path / "f"), shards(home / "features"), strict=True):
        assert mine.read_bytes() == theirs.read_bytes()
    assert (tmp_path / "f/index.json").read_text() == (home / "features/index.json").read_text()


def test_ctrl_c_keeps_whole_shards(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, raised = FeatureCapture.pad, list[int]()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores SIGINT

    def pad(capture: FeatureCapture, ids: np.ndarray, group: list[tuple[int, int]]) -> tuple[np.ndarray, torch.Tensor]:
        if (tmp_path / "f/shard-00001.safetensors").exists() and not raised:
            raised.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return whole(capture, ids, group)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureCapture, "pad", pad)
        done = prepare(home / "recipe.yaml", tmp_path / "f")
    signal.signal(signal.SIGINT, before)
    assert done.code == 130 and "interrupted by SIGINT\n  whole shards are kept" in done.err, done.err
    written = len(shards(tmp_path / "f"))
    assert 2 <= written < len(shards(home / "features")) and len(read_index(tmp_path / "f").shards) == written
    again = prepare(home / "recipe.yaml", tmp_path / "f")
    assert again.code == 0 and f", {written} whole" in again.out, again.err


def test_other_contents_of_the_folder_are_refused(home: Path, copy: Path, tmp_path: Path) -> None:
    other = draftline_here("prepare", home / "recipe.yaml", "--features", copy)
    assert other.code == 2 and "were cut at 2.00002e-05 GiB, now 1" in other.err, other.err
    taps = prepare(home / "recipe.yaml", copy, "drafter.taps=[1,2]")
    assert taps.code == 2 and "taps: prepared [0, 2], now [1, 2]" in taps.err
    strange = prepare(home / "recipe.yaml", home)
    assert strange.code == 2 and "already holds other files" in strange.err
    itself = prepare(home / "recipe.yaml", tmp_path / "f", f"target.features={copy}")
    assert itself.code == 2 and "prepare runs the target itself" in itself.err


def test_a_full_disk(home: Path, tmp_path: Path) -> None:
    """No file may grow past 16 KiB: the first shard cannot be written, nothing half stays, the next call goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    try:
        done = prepare(home / "recipe.yaml", tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.code == 1 and "shard-00000.safetensors could not be written" in done.err, done.err
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["index.json"]
    assert prepare(home / "recipe.yaml", tmp_path / "f").code == 0
    assert shards(tmp_path / "f")[0].read_bytes() == shards(home / "features")[0].read_bytes()


def test_a_disk_too_small_is_refused_before_capture(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    done = prepare(home / "recipe.yaml", tmp_path / "f")
    assert done.code == 2 and "and its disk has 50,000 free" in done.err
    assert "GiB needed" in done.out and not (tmp_path / "f").exists()


def test_plan_keeps_documents_whole_and_shards_bounded() -> None:
    lengths = np.array([3, 3, 5, 20, 1, 1])
    assert plan(lengths, 10, 60) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert plan(lengths, 10, 10**9) == [range(0, 6)]


def test_hash_of_ids_tells_documents_apart() -> None:
    ids = np.array([5, 6, 7, 8], dtype=np.int32)
    one = hash_ids(np.array([2, 2]), ids)
    assert one != hash_ids(np.array([1, 3]), ids) and one != hash_ids(np.array([2, 2]), ids[::-1])
