"""Features written from a GPU and read back there: the steps of live capture, on one device and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from two_gpus import draftline, steps_of

from runs import STEPS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_a_run_from_files_takes_the_steps_of_a_live_one(tmp_path: Path) -> None:
    live = steps_of(tmp_path, "live", "bfloat16", "placement.drafters=1")
    done = draftline("prepare", tmp_path / "recipe.yaml", "--features", tmp_path / "features")
    assert done.returncode == 0, done.stdout + done.stderr
    for ranks in (1, 2):
        words = [f"placement.drafters={ranks}", f"target.features={tmp_path / 'features'}"]
        read = steps_of(tmp_path, f"read-{ranks}", "bfloat16", *words)
        assert len(live) == len(read) == STEPS
        assert [r.loss for r in read] == pytest.approx([r.loss for r in live], rel=1e-2 if ranks == 2 else 1e-3)
