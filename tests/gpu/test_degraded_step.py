"""The incident on a GPU: a drafter on an unfused path is stopped by name, the fused one passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftline.bench.shapes import NAMED
from draftline.bench.step import packed_row, random_step
from draftline.drafter.losses import LossKind
from draftline.errors import RunError
from draftline.train.roofline import judge, measure, measure_rates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_dense_attention_is_stopped_and_the_kernels_are_named() -> None:
    device, shape = torch.device("cuda"), replace(NAMED["smollm2-135m"], rows=2)
    step = random_step(shape, LossKind("ce", "exponential", 7.0, 0.5), device, torch.bfloat16)
    packed, rates = packed_row(shape), measure_rates(device, "plain")
    for _ in range(2):
        measure(step, packed, torch.bfloat16, rates)
    assert "of the predicted rate" in judge(measure(step, packed, torch.bfloat16, rates))
    step.fused = None  # the plain model under autograd: what a compiler's silent fallback amounts to
    with pytest.raises(RunError, match="the training step is degraded.*Slowest kernels: "):
        judge(measure(step, packed, torch.bfloat16, rates))
