"""The run folder: resolved recipe, events, checkpoints, export and summary, and the rule that no run overwrites another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftline.config import Recipe
from draftline.errors import InputError, RunError


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def write_recipe(self, recipe: Recipe) -> None:
        """The resolved recipe, which trains the same run again."""
        text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        (self.root / "recipe.yaml").write_text(text, encoding="utf-8")

    def write_summary(self, summary: dict[str, Any]) -> None:
        (self.root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def open_run_folder(path: str, resume: bool) -> RunFolder:
    """Raises InputError for a folder that holds something (without resume) or nothing to go on from (with it)."""
    folder = RunFolder(Path(path))
    has_content = folder.root.is_dir() and any(folder.root.iterdir())
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
        raise RunError(f"train.out {path} cannot be written: {error.strerror}", "name a folder on a writable disk") from error
    return folder
