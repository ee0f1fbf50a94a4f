"""`draftline train` up to the first rank: this process launches ranks, is one of them, or is the whole world.

A launcher holds no tensor and loads neither transformers nor the stages: its ranks do, and start sooner for it.
"""

from __future__ import annotations

import json
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from draftline.config import Recipe
from draftline.environment import variables
from draftline.environment.overrides import enter_overrides
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.sinks import require
from draftline.train.folder import open_run_folder
from draftline.train.launch import launch, local_world, needs_launcher
from draftline.train.plan import World


def train(recipe: Recipe, resume: bool = False) -> dict[str, Any]:
    """Run a recipe; returns what summary.json holds. `resume` goes on from the newest complete checkpoint.

    Starts the ranks that the recipe and this host ask for, or is one of them where a launcher has started it.
    """
    enter_overrides(recipe.overrides)
    require(recipe.monitor.sinks)
    if not variables.launched():
        world = local_world(recipe)
        if needs_launcher(recipe, world):
            return train_launched(recipe, resume, world)
    from draftline.train.run import train_alone, train_rank  # not before: the module docstring says why

    return record(train_rank)(recipe, resume) or {} if variables.launched() else train_alone(recipe, resume)


def train_launched(recipe: Recipe, resume: bool, world: World) -> dict[str, Any]:
    """In processes of their own."""
    folder = open_run_folder(recipe.train.out, resume)
    launch(recipe, folder, world, Notices(stdout_console()))
    summary: dict[str, Any] = json.loads((folder.root / "summary.json").read_text(encoding="utf-8"))
    return summary
