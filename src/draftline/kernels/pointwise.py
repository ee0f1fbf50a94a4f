"""RMSNorm, per-head norm with RoPE, and SwiGLU, forward and backward, each one pass over memory.

All arithmetic is float32; results are in the inputs' dtype. Weight gradients are summed in a fixed order: the same
inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftline.kernels.launch import launch

PROGRAMS = 528  # four for each of an H200's 132 multiprocessors: each sums its share of a weight gradient


@triton.jit(do_not_specialize=["rows"])  # as many as a forward has tokens
def norm_kernel(X, W, Y, rows, width, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (d < width)[None, :]
    at = row[:, None] * width + d[None, :]
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + d, mask=d < width, other=0.0).to(tl.float32) + offset
    y = w[None, :] * (x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None])
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """(offset + w) x / sqrt(mean(x^2) + eps) over the last dimension. x [..., d] dense, weight [d]."""
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    together = max(1, 2048 // block)
    launch(
        norm_kernel, (triton.cdiv(rows, together),),
        x, weight, y, rows, width, eps, offset, ROWS=together, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return y


@triton.jit
def norm_backward_kernel(
    X, W, DY, RESIDUAL, DX, Y, DW, rows, width, eps, HAS_RESIDUAL: tl.constexpr, HAS_Y: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < width
    w = tl.load(W + d, mask=inside, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = (d * 0 + row).to(tl.int64) * width + d
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(DY + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        unit = x * inverse
        dw += dy * unit
        dx = inverse * (dy * w - unit * (tl.sum(dy * w * unit, 0) / width))
        if HAS_RESIDUAL:
            dx += tl.load(RESIDUAL + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if HAS_Y:
            tl.store(Y + at, (w * unit).to(Y.dtype.element_ty), mask=inside)
    tl.store(DW + program * width + d, dw, mask=inside)


def rms_norm_backward(
    x: Tensor, weight: Tensor, eps: float, dy: Tensor, residual: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, plus `residual` where given; dweight float32). Writes the norm's own output into `y` where given."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs, block = min(PROGRAMS, rows), triton.next_power_of_2(width)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    launch(
        norm_backward_kernel, (programs,),
        x, weight, dy, dx if residual is None else residual, dx, dx if y is None else y, partial, rows, width, eps,
        HAS_RESIDUAL=residual is not None, HAS_Y=y is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return dx, partial.sum(0)


@triton.jit
def partner_of(d, half):
    """(dimension that rotary embedding mixes with `d`, factor of its sine)."""
    return tl.where(d < half, d + half, d - half), tl.where(d < half, -1.0, 1.0)


@triton.jit
def rotary(COS, SIN, position, d, valid, half):
    """cos and sin [rows, D] of every dimension; 1 and 0 on those that are not rotated."""
    turned = valid[:, None] & (d < 2 * half)[None, :]
    at = position[:, None] * half + (d % half)[None, :]
    return tl.load(COS + at, mask=turned, other=1.0), tl.load(SIN + at, mask=turned, other=0.0)


@triton.jit
def head_norm_kernel(
    X, W, COS, SIN, Y, rows, x_stride, y_stride, eps, half, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    position, head = row // HEADS, row % HEADS
    d = tl.arange(0, BLOCK_D)
    other, sign = partner_of(d, half)
    inside = valid[:, None] & (d < D)[None, :]
    turned = valid[:, None] & (d < 2 * half)[None, :]
    start = X + position[:, None] * x_stride + head[:, None] * D
    x = tl.load(start + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mate = tl.load(start + other[None, :], mask=turned, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    cos, sin = rotary(COS, SIN, position, d, valid, half)
    w = tl.load(W + d, mask=d < D, other=0.0)[None, :]
    w_mate = tl.load(W + other, mask=d < 2 * half, other=0.0)[None, :]
    # rounded between norm and rotation, as the plain model does
    normed = (w * (x * inverse)).to(Y.dtype.element_ty).to(tl.float32)
    normed_mate = (w_mate * (mate * inverse)).to(Y.dtype.element_ty).to(tl.float32)
    y = normed * cos + sign[None, :] * normed_mate * sin
    tl.store(Y + position[:, None] * y_stride + head[:, None] * D + d[None, :], y.to(Y.dtype.element_ty), mask=inside)


def head_norm_rope(x: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RMSNorm over each head, then RoPE. x [M, heads, D] (a slice of a wider tensor is fine) -> dense [M, heads, D].

    rope: cos and sin float32 [M, rotary/2], halves convention, over the first `rotary` dimensions.
    """
    positions, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, rows = head_tile(size)
    launch(
        head_norm_kernel, (triton.cdiv(positions * heads, rows),),
        x, weight, *rope, y, positions * heads, x.stride(0), y.stride(0), eps, rope[0].shape[-1], HEADS=heads, D=size,
        BLOCK_D=block, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def head_norm_backward_kernel(
    X, W, COS, SIN, DY, DX, DW, rows, x_stride, dy_stride, dx_stride, eps, half, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    other, sign = partner_of(d, half)
    w = tl.load(W + d, mask=d < D, other=0.0)[None, :]
    dw = tl.zeros([BLOCK_D], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tl.arange(0, ROWS) + tile * ROWS).to(tl.int64)
        valid = row < rows
        position, head = row // HEADS, row % HEADS
        inside = valid[:, None] & (d < D)[None, :]
        turned = valid[:, None] & (d < 2 * half)[None, :]
        column = head[:, None] * D
        x = tl.load(X + position[:, None] * x_stride + column + d[None, :], mask=inside, other=0.0).to(tl.float32)
        start = DY + position[:, None] * dy_stride + column
        dy = tl.load(start + d[None, :], mask=inside, other=0.0).to(tl.float32)
        mate = tl.load(start + other[None, :], mask=turned, other=0.0).to(tl.float32)
        cos, sin = rotary(COS, SIN, position, d, valid, half)
        dn = dy * cos - sign[None, :] * mate * sin
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        unit = x * inverse
        dw += tl.sum(dn * unit, 0)
        dx = inverse * (dn * w - unit * (tl.sum(dn * w * unit, 1) / D)[:, None])
        tl.store(DX + position[:, None] * dx_stride + column + d[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + tl.program_id(0) * D + d, dw, mask=d < D)


def head_norm_rope_backward(
    x: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor], dy: Tensor, dx: Tensor
) -> Tensor:
    """Writes dx [M, heads, D] (a slice is fine); returns dweight float32 [D]."""
    positions, heads, size = x.shape
    block, rows = head_tile(size)
    programs = min(PROGRAMS, triton.cdiv(positions * heads, rows))
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    launch(
        head_norm_backward_kernel, (programs,),
        x, weight, *rope, dy, dx, partial, positions * heads, x.stride(0), dy.stride(0), dx.stride(0), eps,
        rope[0].shape[-1], HEADS=heads, D=size, BLOCK_D=block, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return partial.sum(0)


@triton.jit
def swiglu_kernel(GU, H, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_at = at // width * (2 * width) + at % width
    gate = tl.load(GU + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GU + gate_at + width, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(H.dtype.element_ty).to(tl.float32)
    tl.store(H + at, (silu * up).to(H.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) up. gate_up [M, 2 f], the gates first -> [M, f]."""
    rows, double = gate_up.shape
    h = torch.empty((rows, double // 2), dtype=gate_up.dtype, device=gate_up.device)
    launch(swiglu_kernel, (triton.cdiv(h.numel(), 2048),), gate_up, h, h.numel(), double // 2, BLOCK=2048, num_warps=8)
    return h


@triton.jit
def swiglu_backward_kernel(GU, DH, DGU, H, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate_at = at // width * (2 * width) + at % width
    gate = tl.load(GU + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GU + gate_at + width, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(DH + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dh * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    tl.store(DGU + gate_at, dgate.to(DGU.dtype.element_ty), mask=inside)
    tl.store(DGU + gate_at + width, (dh * silu).to(DGU.dtype.element_ty), mask=inside)
    tl.store(H + at, (silu.to(H.dtype.element_ty).to(tl.float32) * up).to(H.dtype.element_ty), mask=inside)


def swiglu_backward(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """(d gate_up, h). Both overwrite what they replace: gate_up becomes its gradient, dh becomes h."""
    count = dh.numel()
    launch(
        swiglu_backward_kernel, (triton.cdiv(count, 2048),),
        gate_up, dh, gate_up, dh, count, dh.shape[1], BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return gate_up, dh


def head_tile(size: int) -> tuple[int, int]:
    """(padded head size, heads a program takes at once)."""
    block = max(16, triton.next_power_of_2(size))
    return block, max(1, 4096 // block)


def warps(block: int) -> int:
    return min(16, max(4, block // 512))
