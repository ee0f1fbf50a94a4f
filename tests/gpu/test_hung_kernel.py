"""A kernel that does not end on one of two GPUs: its rank is named, and not the one that waits in the all-reduce."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from two_gpus import run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SPINS = """
import os
if os.environ.get("RANK") == "1":
    import time
    import torch
    from draftline.train.loop import Loop
    whole = Loop.train_step

    def train_step(self):
        if self.step == 6:
            with open("{since}", "w") as file:
                file.write(str(time.time()))
            torch.cuda._sleep(400_000_000_000)  # minutes
        return whole(self)

    Loop.train_step = train_step
"""


def test_the_rank_whose_kernel_hangs_is_named_in_30_s(tmp_path: Path) -> None:
    since = tmp_path / "since"
    words = ["placement.drafters=2", "placement.max_restarts=0", "train.checkpoint_every=100"]
    done = run(tmp_path, "hung", "float32", *words, hook=SPINS.format(since=since))
    assert time.time() - float(since.read_text()) < 30
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "rank 1 (target 1 + drafter 1, cuda:1): stalled: no progress in" in said and "rank 0 (" not in said
