"""A rank that stands still, wherever it does, is named by another one while all the others wait for it."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from worlds import Fault, busy, frozen, killed, run_world

import draftline.train.ranks as ranks
from draftline.channel.routes import FeatureInbox, FeatureOutbox
from draftline.drafter.step import DrafterStep
from draftline.monitor.standoff import SURE_S
from draftline.target.capture import FeatureCapture
from draftline.train.launch import Ended, find_cause
from draftline.train.loop import Loop
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


def test_ranks_that_all_wait_for_each_other_end_the_run(home: Path, tmp_path: Path) -> None:
    """A batch that its sender never announces: the drafter waits for it, and the sender for the drafter's gates."""

    def hook() -> None:
        ranks.PATIENCE = 1.5  # times stall_s
        FeatureOutbox.flush = lambda _: None  # type: ignore[method-assign]

    placement = ["placement.kind=split", "placement.targets=1", "placement.drafters=1", f"placement.stall_s={STALL_S}"]
    words = [f"train.out={tmp_path / 'run'}", *placement, "placement.max_restarts=0"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 1 and ended.seconds < 1.5 * STALL_S + SURE_S + 12, ended.out
    found = re.search("rank 0 (.*): stalled: all ranks have waited for each other for 6 s and more: (.*)", ended.out)
    assert found is not None, ended.out
    assert found[1] == "(drafter 0, cpu)"
    features = "rank 0 waiting for features of micro-batch 0 from rank 1 (target 0)"
    assert found[2] == f"{features}, rank 1 waiting for all ranks"


def deaf() -> None:
    """As a rank in a collective on its GPU: no handler of Python's runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(3600)


def test_ranks_that_hang_behind_a_dead_one_hold_nothing_up(home: Path, tmp_path: Path) -> None:
    def killed_behind_the_deaf() -> None:
        time.sleep(1.0)
        killed()

    def hook() -> None:
        Fault(0, DrafterStep, "forward_backward", 4, deaf)()
        Fault(1, DrafterStep, "forward_backward", 4, Stamped(tmp_path / "when", killed_behind_the_deaf))()

    words = [f"train.out={tmp_path / 'run'}", *COLOCATED, "placement.max_restarts=0"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 1 and f"{DRAFTER}: ended by SIGKILL" in ended.out, ended.out
    assert time.monotonic() - float((tmp_path / "when").read_text()) < 10


def test_a_cause_that_ends_after_its_consequences_is_found(tmp_path: Path) -> None:
    """Rank 0 lost its peer first; rank 1 ends by itself while rank 2 is being ended."""

    def failure(rank: int, exit_code: int, said: str) -> ProcessFailure:
        path = tmp_path / str(rank)
        path.write_text(json.dumps({"message": {"message": said, "extraInfo": {"timestamp": str(100 + rank)}}}))
        return ProcessFailure(rank, 1000 + rank, exit_code, str(path) if said else "<N/A>")

    lost, cause = failure(0, 1, "PeerLost: a rank was lost"), failure(1, 1, "")
    ended = [Ended(lost, later=False), Ended(failure(2, -signal.SIGTERM, ""), later=True), Ended(cause, later=True)]
    assert find_cause(ended) is cause
    assert find_cause([*ended[:2], Ended(failure(3, -signal.SIGKILL, ""), later=False)]).local_rank == 3
