"""The written-out step on a sharded drafter: two ranks take the steps of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_fused import random_batch, random_step, spec_of

from draftline.config import OptimSection
from draftline.drafter.losses import LossKind
from draftline.drafter.matrix import PlainMatrix
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep, fused_drafter
from draftline.records import FeatureBatch
from draftline.train.optimizer import Optimizer
from draftline.train.ranks import Ranks
from draftline.train.reduction import Alone, Reduction, Shards
from sharding import in_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are on a CPU, in Triton's interpreter")
STEPS = 3


def batches() -> list[FeatureBatch]:
    rng = np.random.default_rng(4)
    return [random_batch(rng, 1, 40, spec_of()) for _ in range(2)]


def train(step: DrafterStep, reduction: Reduction, own: list[FeatureBatch], weight: list[float]) -> list[float]:
    """Losses of the own micro-batches by step; `weight`: the whole step's."""
    optimizer = Optimizer(reduction.masters, OptimSection(lr=0.01, warmup_share=0.0), 20, reduction.total_norm)
    losses = []
    for _ in range(STEPS):
        reduction.begin()
        sums = [step.forward_backward(batch) for batch in own]
        reduction.reduce()
        optimizer.finish(torch.tensor(sum(weight)))
        reduction.renew()
        losses += [float(micro.loss_sum) for micro in sums]
    assert step.fused is not None and step.fused.stale() == 0
    return losses


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    kind = LossKind("ce", "exponential", 5.0, 0.5)
    plain = random_step(spec_of(), kind, "cpu", torch.float32, fused=False)
    weight = [float(plain.measure(batch).weight_sum) for batch in batches()]

    def spread(ranks: Ranks) -> tuple[list[float], dict[str, torch.Tensor]]:
        step = random_step(spec_of(), kind, "cpu", torch.float32, fused=False)
        reduction = Shards(step.drafter, ranks, torch.float32)
        step.fused = fused_drafter(step.drafter, torch.float32, "plain")
        assert all(
            isinstance(matrix, PlainMatrix) and matrix.is_joined for matrix in step.fused.matrices
        )  # no second copy
        losses = train(step, reduction, [batches()[ranks.role.rank]], weight)
        return losses, weights_of(step.drafter)

    one = random_step(spec_of(), kind, "cpu", torch.float32, fused=True)
    expected = train(one, Alone(one.drafter), batches(), weight)
    (first, weights), (second, _) = in_ranks(2, tmp_path, spread)
    assert [loss for pair in zip(first, second, strict=True) for loss in pair] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.9 * expected[1]
    for name, value in weights_of(one.drafter).items():
        assert (weights[name] - value).abs().median() < 1e-6, name


def weights_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}
