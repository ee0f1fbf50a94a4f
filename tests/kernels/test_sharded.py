"""The written-out step on a sharded drafter: two ranks take the steps of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_fused import random_batch, random_step, spec_of

from draftline.config import OptimSection, Products
from draftline.drafter.losses import LossKind
from draftline.drafter.matrix import PlainMatrix
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep, fused_drafter
from draftline.evaluate.products import MARGIN, PRODUCT_NOISE, product_errors
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


@pytest.mark.parametrize("products", ["plain", "fp8"])
def test_two_ranks_take_the_steps_of_one(products: Products, tmp_path: Path) -> None:
    kind = LossKind("ce", "exponential", 5.0, 0.5)
    plain = random_step(spec_of(), kind, "cpu", torch.float32, fused=False)
    weight = [float(plain.measure(batch).weight_sum) for batch in batches()]

    def spread(ranks: Ranks) -> tuple[list[float], dict[str, torch.Tensor]]:
        step = random_step(spec_of(), kind, "cpu", torch.float32, fused=False)
        reduction = Shards(step.drafter, ranks, torch.float32)
        step.fused = fused_drafter(step.drafter, torch.float32, products)
        plain_ones = [matrix for matrix in step.fused.matrices if isinstance(matrix, PlainMatrix)]
        assert plain_ones and all(matrix.is_joined for matrix in plain_ones)  # no second copy
        losses = train(step, reduction, [batches()[ranks.role.rank]], weight)
        return losses, weights_of(step.drafter)

    one = random_step(spec_of(), kind, "cpu", torch.float32, fused=False)
    one.fused = fused_drafter(one.drafter, torch.float32, products)
    expected = train(one, Alone(one.drafter), batches(), weight)
    (first, weights), (second, _) = in_ranks(2, tmp_path, spread)
    assert [loss for pair in zip(first, second, strict=True) for loss in pair] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.9 * expected[1]
    for name, value in weights_of(one.drafter).items():
        assert (weights[name] - value).abs().median() < 1e-6, name


def test_fp8_products_of_bf16_copies_pass_their_gate(tmp_path: Path) -> None:
    """A sharded drafter's parameters are such copies; its float32 masters lie elsewhere."""
    kind = LossKind("ce", "exponential", 5.0, 0.5)

    def spread(ranks: Ranks) -> list[float]:
        step = random_step(spec_of(), kind, "cpu", torch.bfloat16, fused=False)
        Shards(step.drafter, ranks, torch.bfloat16)
        fused = fused_drafter(step.drafter, torch.bfloat16, "fp8")
        fused.refresh()
        return [error for layer in fused.layers for matrix in layer.matrices for error in product_errors(matrix)]

    for errors in in_ranks(2, tmp_path, spread):
        assert len(errors) > 4 and PRODUCT_NOISE / 2 < max(errors) < MARGIN * PRODUCT_NOISE


def weights_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}
