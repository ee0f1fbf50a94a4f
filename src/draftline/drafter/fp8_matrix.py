"""Products in FP8: both operands rounded to e4m3 with a scale for each row, and weight gradients as ever.

After torchao's recipe `rowwise_with_gw_hp`: activations, weights and gradients in e4m3, the weight gradient a product
of unrounded tensors. That recipe rounds the weights again for the backward, with one scale for the tensor; here the
backward multiplies by the forward's own rounded weights, transposed. A row's scale s cannot leave a sum over rows, so
the gradient takes it in before it is rounded: dy W = (dy s) (W / s).

torch._scaled_mm has no addend: residuals and sums are a pass of their own, 6 bytes an element.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftline.drafter.matrix import Matrix
from draftline.drafter.model import Linear
from draftline.kernels.launch import compiling
from draftline.kernels.quantise import FP8, Fp8Rows, fp8_rows, quantise, transpose

# Partial sums stay in the tensor cores' own accumulators, as in torchao's row-wise recipes: other kernels are slow.
FAST_SUMS = True


class Fp8Matrix(Matrix):
    """Keeps W [rows, width] and its transpose in FP8: two bytes a weight, as many as one copy in bf16."""

    def __init__(self, linears: Iterable[Linear], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self.copy = fp8_rows(sum(self.rows), self.width, self.device)
        self.transposed = torch.empty((self.width, sum(self.rows)), dtype=FP8, device=self.device)
        self.ones = torch.ones(self.width, dtype=torch.float32, device=self.device)

    def refresh(self) -> None:
        super().refresh()
        if compiling():  # the kernels that take over were compiled and not run
            self.versions = [-1] * len(self.masters)

    def take_over(self) -> None:
        for master, part in zip(self.masters, self.copy.split(self.rows), strict=True):
            quantise(master.data, into=part)
        transpose(self.copy.values, self.transposed)

    @torch.no_grad()
    def is_current(self) -> bool:
        values = self.copy.values.view(torch.uint8)
        if not torch.equal(values.t(), self.transposed.view(torch.uint8)):
            return False
        parts = zip(self.copy.split(self.rows), self.masters, strict=True)
        return all(same(part, quantise(master.data)) for part, master in parts)

    def forward(self, x: Tensor, residual: Tensor | None = None, skip: int = 0) -> Tensor:
        first = sum(self.rows[:skip])
        product = self.product(quantise(x), self.copy.values[first:], self.copy.scale[first:])
        return product if residual is None else product.add_(residual)

    def backward(self, dy: Tensor, into: Tensor | None = None, skip: int = 0) -> Tensor:
        first = sum(self.rows[:skip])
        product = self.product(quantise(dy, self.copy.scale[first:]), self.transposed[:, first:], self.ones)
        return product if into is None else into.add_(product)

    def product(self, x: Fp8Rows, weight: Tensor, scale: Tensor) -> Tensor:
        """x w^T [M, N] in `dtype`. weight FP8 [N, K], its rows dense; scale float32 [N]."""
        return torch._scaled_mm(
            x.values, weight.t(), scale_a=x.scale[:, None], scale_b=scale[None], out_dtype=self.dtype,
            use_fast_accum=FAST_SUMS,
        )  # fmt: skip


def same(a: Fp8Rows, b: Fp8Rows) -> bool:
    """Bit for bit."""
    return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scale, b.scale)
