"""Whatever ends a rank ends the attempt and is named; the world starts again and trains the same bits."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Fault, busy, end_of, killed, raises, run_world, start_world

import draftline.train.checkpoint as checkpoint
from command import draftline_here
from draftline.channel.routes import FeatureInbox, FeatureOutbox
from draftline.drafter.step import DrafterStep
from draftline.monitor.events import Step, read_events
from draftline.target.capture import FeatureCapture
from draftline.train.loop import Loop
from draftline.train.optimizer import Optimizer
from runs import assert_same_bits, checkpoint_names, write_recipe

FIRST = Path("checkpoints/step-0000004")
LAST = Path("checkpoints/step-0000008")
TWO_SLOTS = "placement.channel_gib=5.0e-5"  # so that capture is not yet done with everything when it is disturbed
SPLIT = ["placement.kind=split", "placement.targets=1", "placement.drafters=1", TWO_SLOTS]
TWO = ["placement.drafters=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("death")
    assert draftline_here("train", write_recipe(home), f"train.out={home / 'one'}").code == 0
    return home


@pytest.fixture(scope="module")
def two(home: Path) -> Path:
    ended = run_world(home / "recipe.yaml", f"train.out={home / 'two'}", *TWO)
    assert ended.code == 0, ended.out
    return home / "two"


FAULTS = [
    (SPLIT, Fault(1, FeatureCapture, "__call__", 15, killed), "rank 1 (target 0, cpu): ended by SIGKILL"),
    (SPLIT, Fault(1, FeatureOutbox, "put", 15, killed), "rank 1 (target 0, cpu): ended by SIGKILL"),
    (SPLIT, Fault(0, FeatureInbox, "get", 12, killed), "rank 0 (drafter 0, cpu): ended by SIGKILL"),
    (SPLIT, Fault(0, DrafterStep, "forward_backward", 12, raises), "rank 0 (drafter 0, cpu): ValueError: a fault of"),
]


@pytest.mark.parametrize(("placement", "fault", "said"), FAULTS)
def test_a_rank_that_dies_is_named_and_the_weights_are_the_same_bits(
    home: Path, tmp_path: Path, placement: list[str], fault: Fault, said: str
) -> None:
    run = tmp_path / "run"
    fault = replace(fault, once=run / FIRST)
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *placement, hook=fault)
    assert ended.code == 0, ended.out
    assert said in ended.out
    assert "restart 1 of 3, from step-0000004" in ended.out
    assert_same_bits(run / LAST, home / "one" / LAST)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(1, Optimizer, "finish", 6, killed), "rank 1 (target 1 + drafter 1, cpu): ended by SIGKILL"),
        (Fault(1, DrafterStep, "forward_backward", 6, busy), "stalled: no progress in 'forward and backward"),
    ],
)
def test_a_drafter_that_dies_or_stalls_among_two(
    home: Path, two: Path, tmp_path: Path, fault: Fault, said: str
) -> None:
    words = [f"train.out={tmp_path / 'run'}", *TWO, "placement.stall_s=6"]
    ended = run_world(home / "recipe.yaml", *words, hook=fault)
    assert ended.code == 0, ended.out
    assert said in ended.out and "rank 1 (target 1 + drafter 1, cpu)" in ended.out
    assert (", line " in ended.out and " in busy" in ended.out) == (fault.happens is busy)  # its stack, where it could
    assert_same_bits(tmp_path / "run" / LAST, two / LAST)


def test_a_rank_killed_while_it_writes_a_checkpoint(home: Path, two: Path, tmp_path: Path) -> None:
    """The second one, half written: what counts is the first."""
    fault = Fault(0, checkpoint, "sync", 7, killed)  # 4 files' worth and the folder belong to the first
    ended = run_world(home / "recipe.yaml", f"train.out={tmp_path / 'run'}", *TWO, hook=fault)
    assert ended.code == 0, ended.out
    assert "restart 1 of 3, from step-0000004" in ended.out
    assert checkpoint_names(tmp_path / "run") == ["step-0000004", "step-0000008"]
    assert_same_bits(tmp_path / "run" / LAST, two / LAST)


def test_restarts_are_bounded(home: Path, tmp_path: Path) -> None:
    def always() -> None:
        DrafterStep.forward_backward = lambda *_: raises()  # type: ignore[method-assign, assignment]

    words = [f"train.out={tmp_path / 'run'}", *TWO, "placement.max_restarts=1"]
    ended = run_world(home / "recipe.yaml", *words, hook=always)
    assert ended.code == 1
    assert ended.out.count("ValueError: a fault of this test's making") >= 2
    assert "ended after 1 restarts" in ended.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_first_and_all_ranks_leave_at_one_step(
    home: Path, two: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    whole_step = Loop.train_step

    def slow() -> None:
        def train_step(loop: Loop) -> Any:
            if loop.step == 5:
                (tmp_path / f"at-{os.environ['RANK']}").touch()
                time.sleep(1.0)
            return whole_step(loop)

        Loop.train_step = train_step  # type: ignore[method-assign]

    process, log = start_world(home / "recipe.yaml", f"train.out={run}", *TWO, hook=slow)
    limit = time.monotonic() + 60
    while not (tmp_path / "at-0").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid, number)
    ended = end_of(process, log)
    assert ended.code == code, ended.out
    assert ended.out.count("interrupted by") == 1 and "saved: go on with --resume" in ended.out
    assert checkpoint_names(run)[-1] in ("step-0000006", "step-0000007")
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *TWO, resume=True)
    assert ended.code == 0, ended.out
    assert_same_bits(run / LAST, two / LAST)


def test_resumed_with_another_number_of_drafters(home: Path, two: Path, tmp_path: Path) -> None:
    """At the same place in the data: the steps, their tokens and their losses are those of a run that never changed."""
    run = tmp_path / "run"
    shutil.copytree(home / "one" / FIRST, run / FIRST)
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *TWO, resume=True)
    assert ended.code == 0, ended.out
    seen = [e.event.report for e in read_events(run / "events.jsonl").events if isinstance(e.event, Step)]
    whole = [e.event.report for e in read_events(home / "one/events.jsonl").events if isinstance(e.event, Step)]
    assert [(r.step, r.tokens, r.blocks) for r in seen] == [(r.step, r.tokens, r.blocks) for r in whole[4:]]
    assert [r.loss for r in seen] == pytest.approx([r.loss for r in whole[4:]], rel=1e-4)


def test_bad_input_is_told_once_and_not_tried_again(home: Path, tmp_path: Path) -> None:
    words = [f"train.out={tmp_path / 'run'}", *TWO, "drafter.taps=[0, 99]"]
    ended = run_world(home / "recipe.yaml", *words)
    assert ended.code == 2
    assert "drafter.taps [0, 99]: the target has layers 0..3" in ended.out
    assert "restart" not in ended.out


def test_out_of_memory_says_what_was_predicted_and_what_to_lower(home: Path, tmp_path: Path) -> None:
    def too_much() -> None:
        torch.empty(1 << 48)

    fault = Fault(1, DrafterStep, "forward_backward", 3, too_much)
    ended = run_world(home / "recipe.yaml", f"train.out={tmp_path / 'run'}", *TWO, hook=fault)
    assert ended.code == 1
    assert (
        "rank 1 (target 1 + drafter 1, cpu): out of memory in training at 2 rows of 32 tokens, 6 anchors" in ended.out
    )
    assert "predicted GiB 0.0" in ended.out
    assert "lower train.rows_per_micro_batch, train.anchors or data.sequence_length" in ended.out
    assert "restart" not in ended.out


def test_a_full_disk_ends_the_run_and_harms_no_earlier_checkpoint(home: Path, two: Path, tmp_path: Path) -> None:
    """Rank 0's files may not grow past 20,000 bytes once the first checkpoint is whole: the second does not fit."""
    run = tmp_path / "run"

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    fault = Fault(0, Loop, "train_step", 7, fill, once=run / FIRST)
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *TWO, hook=fault)
    assert ended.code == 1
    assert f"checkpoint {run / LAST} could not be written" in ended.out and "restart" not in ended.out
    assert checkpoint_names(run) == ["step-0000004"]
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *TWO, resume=True)
    assert ended.code == 0, ended.out
    assert_same_bits(run / LAST, two / LAST)
