"""A rank that stands still, wherever it does, is named by another one while all the others wait for it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from worlds import Fault, busy, frozen, killed, run_world

import draftline.train.ranks as ranks
from draftline.channel.routes import FeatureInbox, FeatureOutbox
from draftline.drafter.step import DrafterStep
from draftline.target.capture import FeatureCapture
from draftline.train.loop import Loop
from draftline.train.optimizer import Optimizer
from runs import write_recipe

STALL_S = 4.0
COLOCATED = ["placement.drafters=2"]
SPLIT = ["placement.kind=split", "placement.targets=1", "placement.drafters=2", "placement.channel_gib=5.0e-5"]
DRAFTER, CAPTURER = "rank 1 (target 1 + drafter 1, cpu)", "rank 2 (target 0, cpu)"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("stall")
    write_recipe(home)
    return home


STALLS = {
    "capture": (COLOCATED, Fault(1, FeatureCapture, "__call__", 6, busy), DRAFTER, "features of micro-batch"),
    "forward": (COLOCATED, Fault(1, DrafterStep, "teacher", 6, busy), DRAFTER, "forward and backward of micro-batch"),
    "never enters the sum": (COLOCATED, Fault(1, ranks.Ranks, "sum_over_drafters", 9, busy), DRAFTER, "optimizer step"),
    "between phases": (COLOCATED, Fault(1, Loop, "note_checkpoint", 3, busy), DRAFTER, "training, between two phases"),
    "frozen while it waits": (
        COLOCATED,
        Fault(1, ranks.dist, "all_reduce", 9, frozen),
        DRAFTER,
        "waiting for the other",
    ),
    "capture of a split": (SPLIT, Fault(2, FeatureCapture, "__call__", 12, busy), CAPTURER, "capture of micro-batch"),
    "put": (SPLIT, Fault(2, FeatureOutbox, "put", 12, busy), CAPTURER, "capturing, between two phases"),
    "get": (SPLIT, Fault(1, FeatureInbox, "get", 5, busy), "rank 1 (drafter 1, cpu)", "features of micro-batch"),
}


@pytest.mark.parametrize("name", STALLS)
def test_the_rank_that_stands_still_is_named(home: Path, tmp_path: Path, name: str) -> None:
    placement, fault, who, doing = STALLS[name]
    fault = replace(fault, happens=Stamped(tmp_path / "when", fault.happens))
    words = [f"train.out={tmp_path / 'run'}", *placement, f"placement.stall_s={STALL_S}", "placement.max_restarts=0"]
    ended = run_world(home / "recipe.yaml", *words, hook=fault)
    after_s = time.monotonic() - float((tmp_path / "when").read_text())
    assert ended.code == 1, ended.out
    assert f"{who}: stalled: no progress in '{doing}" in ended.out, ended.out
    assert STALL_S < after_s < STALL_S + 8, ended.out


@dataclass(frozen=True)
class Stamped:
    """Leaves behind when it happened."""

    path: Path
    happens: Any

    def __call__(self) -> None:
        self.path.write_text(str(time.monotonic()))
        self.happens()


def deaf() -> None:
    """As a rank in a collective on its GPU: no handler of Python's runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(3600)


def test_ranks_that_hang_behind_a_dead_one_hold_nothing_up(home: Path, tmp_path: Path) -> None:
    def hook() -> None:
        Fault(0, DrafterStep, "forward_backward", 6, deaf)()
        Fault(1, Optimizer, "finish", 3, Stamped(tmp_path / "when", killed))()

    words = [f"train.out={tmp_path / 'run'}", *COLOCATED, "placement.max_restarts=0"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 1 and f"{DRAFTER}: ended by SIGKILL" in ended.out, ended.out
    assert time.monotonic() - float((tmp_path / "when").read_text()) < 10
