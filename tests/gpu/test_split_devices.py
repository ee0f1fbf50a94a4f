"""A target on one GPU and its drafter on another: the steps of both on one, whichever way the features take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from two_gpus import steps_of

from runs import STEPS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SPLIT = ["placement.kind=split", "placement.targets=1", "placement.drafters=1"]


@pytest.mark.parametrize("channel", ["shared_memory", "distributed"])
def test_a_split_takes_the_steps_of_one_device(channel: str, tmp_path: Path) -> None:
    alone = steps_of(tmp_path, "alone", "bfloat16", "placement.drafters=1")
    apart = steps_of(tmp_path, "apart", "bfloat16", *SPLIT, f"placement.channel={channel}")
    assert len(alone) == len(apart) == STEPS
    assert [r.loss for r in apart] == pytest.approx([r.loss for r in alone], rel=1e-3)
    assert [r.tokens for r in apart] == [r.tokens for r in alone]
