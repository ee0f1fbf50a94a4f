"""A checkpoint holds the bits of its step, whatever training does while it is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import open_target, save_target, spec_for
from draftline.config import OptimSection
from draftline.drafter.model import Drafter, untrained
from draftline.errors import RunError
from draftline.train import snapshot
from draftline.train.optimizer import Optimizer
from draftline.train.reduction import Alone
from draftline.train.snapshot import CheckpointWriter, Snapshot, take_snapshot


def stepped(tmp_path: Path) -> tuple[Drafter, Optimizer]:
    drafter = untrained(spec_for(open_target(save_target(tmp_path / "target"))), seed=0)
    return drafter, Optimizer(drafter, OptimSection(), 10)


def step(drafter: Drafter, optimizer: Optimizer) -> None:
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.finish(torch.tensor(2.0))


def test_later_steps_do_not_change_what_was_taken(tmp_path: Path) -> None:
    drafter, optimizer = stepped(tmp_path)
    step(drafter, optimizer)
    taken = take_snapshot(drafter, optimizer, Alone(drafter), keep=True)
    before = {name: value.clone() for name, value in (taken.drafter | taken.optimizer).items()}
    step(drafter, optimizer)
    assert len(taken.optimizer) == 3 * len(taken.drafter)
    assert [name for name, value in (taken.drafter | taken.optimizer).items() if not value.equal(before[name])] == []
    weights = drafter.state_dict()
    assert [name for name, value in taken.drafter.items() if value.equal(weights[name])] == []


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, whole = threading.Event(), snapshot.write_checkpoint

    def slow(*words: Any, **named: Any) -> Path:
        assert gate.wait(10)
        return whole(*words, **named)

    monkeypatch.setattr(snapshot, "write_checkpoint", slow)
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.start(Snapshot({"w": torch.ones(2)}, {"0.step": torch.ones(())}), {"step": 3})
    assert writer.finished(wait=False) is None
    gate.set()
    written = writer.finished(wait=True)
    assert written is not None and (written.step, Path(written.path).name) == (3, "step-0000003")
    assert writer.finished(wait=True) is None


def test_a_fault_of_the_writing_thread_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = CheckpointWriter(tmp_path / "file", keep=2)
    writer.start(Snapshot({"w": torch.ones(2)}, {}), {"step": 3})
    with pytest.raises(RunError, match="step-0000003 could not be written"):
        writer.finished(wait=True)
