"""Rows in FP8 (e4m3: 3 mantissa bits, at most 448), each with a scale of its own, and the transpose of such a matrix.

Scales are powers of two, as torchao's row-wise recipes take them: scaling then only moves exponents, a value is rounded
once, and whatever fits three mantissa bits stays what it is. A scale for each row, not one for the tensor: a row with
values a thousand times the usual costs no other row its bits, and no block's states depend on another block's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftline.kernels.launch import launch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # 1.75 * 2^8
WHOLE_ROW = 16384  # values of a row that one program holds in registers; longer ones are read twice
PIECE = 4096  # of a longer row at a time
TILE = 64  # rows and columns transposed by one program


@dataclass(frozen=True)
class Fp8Rows:
    """x [M, K] = values * scale[:, None], to e4m3's rounding."""

    values: Tensor  # float8_e4m3fn [M, K], dense
    scale: Tensor  # float32 [M], powers of two

    def split(self, rows: list[int]) -> list[Fp8Rows]:
        return [Fp8Rows(*part) for part in zip(self.values.split(rows), self.scale.split(rows), strict=True)]


@triton.jit
def scale_of(largest):
    """(smallest power of two s with largest / s <= 448, 1 / s), by exponents alone: 448 is 1.75 * 2^8, so a mantissa
    above 1.75 carries into the next exponent. A row of zeros takes the scale of one whose largest value is 2^-100."""
    bits = tl.maximum(largest, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    bits = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """To e4m3's nearest value, ties to even, in float32. The cast that follows is then exact; Triton's interpreter
    would else make 64 of 127.8. Adding and taking away 1.5 * 2^20 powers of two p <= |x| leaves multiples of p / 8;
    p is at least 2^-6, below which e4m3's spacing stays 2^-9."""
    power = (tl.maximum(tl.abs(x), 0.015625).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = power * 1572864.0
    return (x + magic) - magic


@triton.jit
def loaded(X, FACTOR, row, column, rows, width, stride, HAS_FACTOR: tl.constexpr):
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(X + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(FACTOR + column, mask=column < width, other=0.0)[None, :]
    return x, inside


@triton.jit
def quantise_kernel(
    X, FACTOR, Y, SCALE, rows, width, stride, HAS_FACTOR: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    if WHOLE:
        x, inside = loaded(X, FACTOR, row, d, rows, width, stride, HAS_FACTOR)
        scale, inverse = scale_of(tl.max(tl.abs(x), 1))
        y = rounded(x * inverse[:, None]).to(Y.dtype.element_ty)
        tl.store(Y + row[:, None] * width + d[None, :], y, mask=inside)
    else:
        largest = tl.zeros([ROWS, BLOCK], tl.float32)  # of each lane: reduced in the loop, Triton 3.6 lost pieces
        for start in range(0, width, BLOCK):
            x, _ = loaded(X, FACTOR, row, start + d, rows, width, stride, HAS_FACTOR)
            largest = tl.maximum(largest, tl.abs(x))
        scale, inverse = scale_of(tl.max(largest, 1))
        for start in range(0, width, BLOCK):
            x, inside = loaded(X, FACTOR, row, start + d, rows, width, stride, HAS_FACTOR)
            y = rounded(x * inverse[:, None]).to(Y.dtype.element_ty)
            tl.store(Y + row[:, None] * width + (start + d)[None, :], y, mask=inside)
    tl.store(SCALE + row, scale, mask=row < rows)


def fp8_rows(rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Room for rows, not yet written."""
    return Fp8Rows(
        torch.empty((rows, width), dtype=FP8, device=device), torch.empty(rows, dtype=torch.float32, device=device)
    )


def quantise(x: Tensor, factor: Tensor | None = None, into: Fp8Rows | None = None) -> Fp8Rows:
    """Rows of x, each column multiplied by its `factor` [K] first where given. x [M, K], its rows dense."""
    rows, width = x.shape
    assert x.stride(1) == 1
    out = fp8_rows(rows, width, x.device) if into is None else into
    whole = width <= WHOLE_ROW
    block = triton.next_power_of_2(width) if whole else PIECE
    together = max(1, 2048 // block)
    launch(
        quantise_kernel, (triton.cdiv(rows, together),),
        x, x if factor is None else factor, out.values, out.scale, rows, width, x.stride(0),
        HAS_FACTOR=factor is not None, WHOLE=whole, ROWS=together, BLOCK=block, num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def transpose_kernel(X, Y, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(X + row[:, None] * columns + column[None, :], mask=inside, other=0)
    turned = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(Y + column[:, None] * rows + row[None, :], tl.trans(x), mask=turned)


def transpose(values: Tensor, into: Tensor) -> None:
    """into [N, M] = values [M, N] transposed, both FP8 and dense; as bytes, for a copy knows no numbers."""
    rows, columns = values.shape
    launch(
        transpose_kernel, (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)),
        values.view(torch.uint8), into.view(torch.uint8), rows, columns, TILE=TILE, num_warps=4,
    )  # fmt: skip
