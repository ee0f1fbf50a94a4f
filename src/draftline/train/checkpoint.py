"""Checkpoints: directories that appear whole, hold everything a run needs to go on, and refuse what does not fit."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.errors import InputError, RunError
from draftline.export.jsonfile import sync
from draftline.export.layout import drafter_shapes, read_tensors
from draftline.records import DrafterSpec
from draftline.train.folder import PREFIX, complete_checkpoints

STATE_KEYS = ("step", "spec", "provenance", "tokens", "identity", "recipe")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `state` holds the cursor, the recipe, the spec and the run's identity hashes."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def spec(self) -> DrafterSpec:
        values = dict(self.state["spec"])
        return DrafterSpec(**values | {k: tuple(values[k]) for k in ("target_layer_ids", "layer_types")})

    def drafter_tensors(self) -> dict[str, Tensor]:
        """Exactly the tensors of the spec. Raises InputError where the file holds others, or is not whole."""
        return read_tensors(self.folder / "drafter.safetensors", drafter_shapes(self.spec))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        path = self.folder / "optimizer.safetensors"
        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path}: not a whole safetensors file ({error})", "copy it again") from error


def write_checkpoint(
    root: Path, drafter: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> Path:
    """Write `root/step-NNNNNN` (write, fsync, rename), then remove all but the newest `keep`.

    Raises RunError naming the path where the disk refuses; earlier checkpoints are not touched then.
    """
    final = root / f"{PREFIX}{state['step']:07d}"
    partial = root / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in drafter.items()}, partial / "drafter.safetensors")
        save_file({k: v.contiguous() for k, v in optimizer.items()}, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        for path in (*partial.iterdir(), partial):
            sync(path)
        os.replace(partial, final)
        sync(root)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error class
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"checkpoint {final} could not be written: {error}",
            "free space or name another train.out; earlier checkpoints are whole: go on with --resume",
        ) from error
    for old in complete_checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def newest_checkpoint(root: Path) -> Checkpoint | None:
    found = complete_checkpoints(root)
    return open_checkpoint(found[-1]) if found else None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises InputError where the folder is not a complete checkpoint."""
    for name in ("state.json", "drafter.safetensors", "optimizer.safetensors"):
        if not (folder / name).is_file():
            raise InputError(f"checkpoint {folder}: {name} is missing", "give a folder RUN/checkpoints/step-0000500")
    try:
        state = json.loads((folder / "state.json").read_text())
    except ValueError as error:  # both UnicodeDecodeError and JSONDecodeError
        raise InputError(f"checkpoint {folder}: state.json is not valid JSON ({error})") from error
    missing = [key for key in STATE_KEYS if not isinstance(state, dict) or key not in state]
    if missing:
        raise InputError(
            f"checkpoint {folder}: state.json lacks {', '.join(missing)}", "resume or export another checkpoint"
        )
    return Checkpoint(folder, state)


def refuse_other_identity(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """A run goes on only with the target, taps, template, data and recipe it began with. Names every difference."""
    before = checkpoint.state["identity"]
    changed = [
        f"{key}: checkpoint {before.get(key)!r}, now {value!r}"
        for key, value in identity.items()
        if before.get(key) != value
    ]
    if changed:
        raise InputError(
            f"cannot resume from {checkpoint.folder}:\n  " + "\n  ".join(changed),
            "restore what differs, or start a new run in another train.out",
        )
