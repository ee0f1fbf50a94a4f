"""The run folder: recipe, events, checkpoints, export and summary, and the rule that no run overwrites another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftline.config import Recipe
from draftline.errors import InputError, RunError

PREFIX = "step-"  # of a checkpoint's folder


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """Output of the ranks that draftline started, by attempt."""
        return self.root / "ranks"

    @property
    def launch(self) -> Path:
        """Holds the name of the launch that runs here."""
        return self.ranks / "launch"

    def events_of(self, rank: int) -> Path:
        return self.events if rank == 0 else self.root / f"events-rank{rank}.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def write_recipe(self, recipe: Recipe) -> None:
        """The resolved recipe, which trains the same run again."""
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        self.write(self.root / "recipe.yaml", text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write(self.root / "summary.json", json.dumps(summary, indent=2) + "\n")

    def write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}", "free space and go on with --resume") from error


def open_run_folder(path: str, resume: bool) -> RunFolder:
    """Raises InputError for a folder that holds files (without resume), nothing to go on from (with it), or no right to
    write."""
    folder = RunFolder(Path(path))
    # a run that was refused before its first step leaves empty folders and its ranks' output only
    has_content = folder.root.is_dir() and any(
        path.is_file() for path in folder.root.rglob("*") if not path.is_relative_to(folder.ranks)
    )
    if folder.root.exists() and not folder.root.is_dir():
        raise InputError(f"train.out {path} is a file", "name a folder")
    if has_content and not resume:
        raise InputError(
            f"train.out {path} already holds files", "go on with --resume, or name another folder: train.out=runs/NAME"
        )
    if resume and not folder.checkpoints.is_dir():
        raise InputError(f"train.out {path} holds no checkpoints to resume from", "start the run without --resume")
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"train.out {path}: {error.strerror}", "name a folder on a writable disk") from error
    return folder


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first. A half-written one has another name and is never among them."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.is_dir())
