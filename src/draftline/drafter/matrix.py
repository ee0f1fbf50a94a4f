"""The weights of one product on CUDA: fp32 masters, a copy to compute with, and gradients summed in fp32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from draftline.drafter.model import Linear


class Matrix(ABC):
    """Linear layers of one input, stacked by rows. `skip` leaves out that many of the first ones in every method."""

    def __init__(self, linears: Iterable[Linear], dtype: torch.dtype) -> None:
        self.masters = [linear.weight for linear in linears]
        self.rows = [len(master) for master in self.masters]
        self.width, self.device = self.masters[0].shape[1], self.masters[0].device
        self.dtype = dtype
        self.versions = [-1] * len(self.masters)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over masters that changed since the last time, by their version: torch counts changes of a tensor, the
        optimizer its own (a fused one changes tensors uncounted)."""
        versions = [master._version for master in self.masters]
        if versions != self.versions:
            self.take_over()
            self.versions = versions

    @abstractmethod
    def take_over(self) -> None:
        """Make the copies that products are computed with from the masters."""

    @abstractmethod
    def is_current(self) -> bool:
        """Whether those copies are what `take_over` would make of the masters now."""

    @abstractmethod
    def forward(self, x: Tensor, residual: Tensor | None = None, skip: int = 0) -> Tensor:
        """x W^T, plus `residual` where given. x [M, width] -> [M, rows]."""

    @abstractmethod
    def backward(self, dy: Tensor, into: Tensor | None = None, skip: int = 0) -> Tensor:
        """dy W, added to `into` where given. dy [M, rows] -> [M, width]."""

    def add_gradient(self, dy: Tensor, x: Tensor, skip: int = 0) -> None:
        """grad += dy^T x in fp32. dy [M, rows], x [M, width]."""
        for master, part in zip(self.masters[skip:], dy.split(self.rows[skip:], dim=1), strict=True):
            add_product(master, part, x)


class PlainMatrix(Matrix):
    """Products in one dtype, of a copy of the masters."""

    def __init__(self, linears: Iterable[Linear], dtype: torch.dtype) -> None:
        super().__init__(linears, dtype)
        self.copy = torch.empty((sum(self.rows), self.width), dtype=dtype, device=self.device)

    def take_over(self) -> None:
        torch._foreach_copy_(list(self.copy.split(self.rows)), [master.data for master in self.masters])

    def is_current(self) -> bool:
        parts = zip(self.copy.split(self.rows), self.masters, strict=True)
        return all(torch.equal(part, master.to(part.dtype)) for part, master in parts)

    def weight(self, skip: int) -> Tensor:
        return self.copy[sum(self.rows[:skip]) :]

    def forward(self, x: Tensor, residual: Tensor | None = None, skip: int = 0) -> Tensor:
        weight = self.weight(skip).t()
        return x @ weight if residual is None else torch.addmm(residual, x, weight)

    def backward(self, dy: Tensor, into: Tensor | None = None, skip: int = 0) -> Tensor:
        weight = self.weight(skip)
        return dy @ weight if into is None else into.addmm_(dy, weight)


def add_product(master: Tensor, dy: Tensor, x: Tensor) -> None:
    if x.dtype == torch.float32:
        product = dy.t() @ x
        master.grad = product if master.grad is None else master.grad.add_(product)
    elif master.grad is None:
        master.grad = torch.mm(dy.t(), x, out_dtype=torch.float32)
    else:
        torch.addmm(master.grad, dy.t(), x, out_dtype=torch.float32, out=master.grad)
