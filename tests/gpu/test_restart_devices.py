"""A rank of two GPUs dies, and auto looks for a placement: both with NCCL and two real devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from two_gpus import logged_steps, run, steps_of

from runs import STEPS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DIES = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    import pathlib
    import time
    from draftline.train.loop import Loop
    whole = Loop.train_step

    def train_step(self):
        if self.step == 6:
            while not pathlib.Path("{checkpoint}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        return whole(self)

    Loop.train_step = train_step
"""


def test_a_killed_rank_is_named_and_the_steps_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm = steps_of(tmp_path, "calm", "bfloat16", "placement.drafters=2")
    checkpoint = tmp_path / "killed/checkpoints/step-0000004"
    done = run(tmp_path, "killed", "bfloat16", "placement.drafters=2", hook=DIES.format(checkpoint=checkpoint))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 (target 1 + drafter 1, cuda:1): ended by SIGKILL" in done.stdout + done.stderr
    newest = {report.step: report for report in logged_steps(tmp_path / "killed")}
    assert [newest[report.step].loss for report in calm] == pytest.approx([r.loss for r in calm], rel=1e-3)
    assert len(calm) == len(newest) == STEPS


def test_auto_measures_two_devices_and_trains_on_them(tmp_path: Path) -> None:
    done = run(tmp_path, "auto", "bfloat16", "placement.kind=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "colocated on 2" in done.stdout and "split, 1 capturing and 1 training" in done.stdout
    assert len(logged_steps(tmp_path / "auto")) == STEPS
