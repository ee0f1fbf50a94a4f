"""FP8 products proven on the device that computes them: each matrix alone, then the whole forward.

What every other gate of the drafter proves (sight, windows, positions, decoding) it proves on the same step with plain
products, as tightly as ever: bf16 shows a leak that FP8 would round away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.drafter.anchors import sample_blocks
from draftline.drafter.matrix import Matrix
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.records import FeatureBatch

# e4m3 keeps 3 mantissa bits: an error uniform over 2^-3 of a value's power of two, 2^-3 / sqrt(12) = 3.6% of that power
# and 2.4% of the values, whose root mean square is sqrt(7/3) powers. Two rounded operands: 3.3% of a sum of products.
PRODUCT_NOISE = 2**-3 / 12**0.5 / (7 / 3) ** 0.5 * 2**0.5
MARGIN = 1.5  # values are not spread evenly over a power of two, and Hopper's own sums lose bits too
PRODUCTS_PER_LAYER = 4  # one after the other: qkv, o, gate and up, down
ROWS = 256


def prove_products(step: DrafterStep, plain: DrafterStep, batch: FeatureBatch) -> str:
    """Every product within e4m3's rounding of the masters' own, rows apart from each other, and the final states of a
    real batch no further from the plain products' than independent roundings along the drafter's depth explain."""
    assert step.fused is not None
    step.fused.refresh()
    errors = [error for layer in step.fused.layers for matrix in layer.matrices for error in product_errors(matrix)]
    worst = float(torch.tensor(errors).max())  # nan stays nan
    limit = MARGIN * PRODUCT_NOISE
    if not worst <= limit:
        raise InputError(
            f"expected FP8 products within {limit:.1%} of float32's, found {worst:.1%}",
            "likely scales or a transpose that do not belong to their rows: report it; train.products=plain trains",
        )
    states = states_error(step, plain, batch)
    limit = MARGIN * PRODUCT_NOISE * (PRODUCTS_PER_LAYER * step.drafter.spec.num_hidden_layers) ** 0.5
    if not states <= limit:
        raise InputError(
            f"expected the drafter's states with FP8 products within {limit:.0%} of those with plain ones, found "
            f"{states:.0%}",
            "likely features with outliers that e4m3 cannot hold beside the rest: use train.products=plain",
        )
    return f"each within {worst:.1%} of float32's, the final states within {states:.1%} of plain ones"


@torch.no_grad()
def product_errors(matrix: Matrix) -> tuple[float, float]:
    """Relative errors of forward and input gradient, on normal rows of which one is a million times the
    others: with a scale for the whole tensor the others would keep no bits."""
    weight = torch.cat([master.data for master in matrix.masters]).float()  # bf16 copies where they are sharded
    generator = torch.Generator(matrix.device).manual_seed(0)
    x, dy = (
        torch.randn(ROWS, width, generator=generator, device=matrix.device).to(matrix.dtype)
        for width in (matrix.width, len(weight))
    )
    x[0], dy[0] = 1e6 * x[0], 1e6 * dy[0]
    return (
        relative(matrix.forward(x)[1:], (x.float() @ weight.t())[1:]),
        relative(matrix.backward(dy)[1:], (dy.float() @ weight)[1:]),
    )


@torch.no_grad()
def states_error(step: DrafterStep, plain: DrafterStep, batch: FeatureBatch) -> float:
    blocks = sample_blocks(batch.packed, step.anchors, step.seed).to(batch.taps.device)
    ids, position = (torch.from_numpy(a).to(batch.taps.device) for a in (batch.packed.ids, batch.packed.position))
    found, expected = (which.hidden(batch.taps, ids, position, blocks)[blocks.keep] for which in (step, plain))
    return relative(found, expected)


def relative(found: Tensor, expected: Tensor) -> float:
    """Of the difference's length to the expected one's, over all elements; not finite where one is not."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())
