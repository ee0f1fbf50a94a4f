"""`draftline train` on a CPU in float32, with the drafter's layers multiplied as `train.products: fp8` multiplies them.

    python benchmarks/race/fp8_emulated.py plain|fp8 RECIPE [section.key=value ...]

No CPU has FP8 products. Here their operands are rounded by rows to e4m3 and multiplied in float32, forward and input
gradients; weight gradients, `fc`, head and loss are as ever. It tells what that rounding does to training, and nothing
about speed. Differs from the GPU's: q, k and v (and gate and up) are rounded one by one in the backward, not as one
row, and sums are float32's. The gates before the first step run without the rounding, as they do on a GPU.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftline.config import load_recipe
from draftline.drafter.model import DrafterLayer, Linear
from draftline.train.loop import Loop
from draftline.train.start import train

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows of x [M, K] in e4m3's values, their scales [M, 1]): the smallest power of two that makes a row fit."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / LARGEST)))
    return (x / scale).to(FP8).to(x.dtype) * scale, scale


class RoundedProduct(torch.autograd.Function):
    """x W^T, and dy W = (dy s) (W / s) with s the scales of W's rows; dW from unrounded tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(rounded(x)[0], rounded(weight)[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        values, scale = rounded(weight)
        rows = dy.flatten(0, -2)
        return rounded(dy * scale[:, 0])[0] @ (values / scale), rows.t() @ x.flatten(0, -2)


def round_products(loop: Loop) -> None:
    """From now on; the drafter's own modules."""
    for layer in loop.job.drafter.modules():
        if isinstance(layer, DrafterLayer):
            for linear in layer.modules():
                if isinstance(linear, Linear):
                    linear.forward = partial(rounded_product, linear)  # type: ignore[method-assign]


def rounded_product(linear: Linear, x: Tensor) -> Tensor:
    return RoundedProduct.apply(x, linear.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", choices=["plain", "fp8"])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    said = parser.parse_args()
    if said.products == "fp8":
        run = Loop.run

        def rounding(self: Loop) -> None:
            round_products(self)
            run(self)

        Loop.run = rounding  # type: ignore[method-assign]
    train(load_recipe(said.recipe, said.overrides))


if __name__ == "__main__":
    main()
