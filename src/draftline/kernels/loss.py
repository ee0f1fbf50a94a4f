"""The loss on a chunk of logits: one pass reads them, one turns them into their own weighted gradient (SPEC 5).

Logits are raw products with the target's head; `scale` and `cap` turn them into the target's own logits where it
scales or soft-caps them: cap tanh(scale x / cap).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftline.kernels.launch import launch

BLOCK_V = 4096


@triton.jit
def shaped(raw, scale, cap, CAPPED: tl.constexpr):
    x = raw.to(tl.float32) * scale
    if CAPPED:
        t = tl.exp(-2.0 * tl.abs(x) / cap)
        x = tl.where(x < 0, -cap, cap) * (1.0 - t) / (1.0 + t)
    return x


@triton.jit
def merged(total, peak, axis: tl.constexpr):
    """Log-sum-exp of lanes that each hold a sum of exp(x - peak) and their peak."""
    top = tl.max(peak, axis)
    return top + tl.log(tl.sum(total * tl.exp(peak - top), axis)), top


@triton.jit
def first_best(peak, best, top):
    """Lowest index among the lanes whose peak is the highest."""
    return tl.min(tl.where(peak == top, best, 2147483647), 0)


@triton.jit
def statistics_kernel(
    LOGITS, TEACHER, LSE, BEST, TEACHER_LSE, TEACHER_BEST, CROSS, width, scale, cap, CAPPED: tl.constexpr,
    HAS_TEACHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every lane keeps its own sum, peak and place: lanes meet once, at the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total, best = tl.zeros([BLOCK], tl.float32), lane
    peak = tl.full([BLOCK], -1e30, tl.float32)
    t_total, t_best, t_peak, cross = total, lane, peak, total
    for begin in range(0, width, BLOCK):
        v = begin + lane
        inside = v < width
        x = shaped(tl.load(LOGITS + row * width + v, mask=inside, other=0.0), scale, cap, CAPPED)
        x = tl.where(inside, x, -1e30)
        best = tl.where(x > peak, v, best)
        higher = tl.maximum(peak, x)
        total = total * tl.exp(peak - higher) + tl.where(inside, tl.exp(x - higher), 0.0)
        peak = higher
        if HAS_TEACHER:
            t = shaped(tl.load(TEACHER + row * width + v, mask=inside, other=0.0), scale, cap, CAPPED)
            t = tl.where(inside, t, -1e30)
            t_best = tl.where(t > t_peak, v, t_best)
            higher = tl.maximum(t_peak, t)
            shrink, p = tl.exp(t_peak - higher), tl.where(inside, tl.exp(t - higher), 0.0)
            t_total = t_total * shrink + p
            cross = cross * shrink + p * (t - x)
            t_peak = higher
    lse, top = merged(total, peak, 0)
    tl.store(LSE + row, lse)
    tl.store(BEST + row, first_best(peak, best, top))
    if HAS_TEACHER:
        t_lse, t_top = merged(t_total, t_peak, 0)
        tl.store(TEACHER_LSE + row, t_lse)
        tl.store(TEACHER_BEST + row, first_best(t_peak, t_best, t_top))
        tl.store(CROSS + row, tl.sum(cross * tl.exp(t_peak - t_lse), 0))


@triton.jit
def variation_kernel(
    LOGITS, TEACHER, LSE, TEACHER_LSE, DISTANCE, SLOPE, width, scale, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lse, t_lse = tl.load(LSE + row), tl.load(TEACHER_LSE + row)
    distance, slope = 0.0, 0.0
    for begin in range(0, width, BLOCK):
        v = begin + tl.arange(0, BLOCK)
        inside = v < width
        x = shaped(tl.load(LOGITS + row * width + v, mask=inside, other=0.0), scale, cap, CAPPED)
        t = shaped(tl.load(TEACHER + row * width + v, mask=inside, other=0.0), scale, cap, CAPPED)
        q = tl.where(inside, tl.exp(x - lse), 0.0)
        p = tl.where(inside, tl.exp(t - t_lse), 0.0)
        distance += 0.5 * tl.sum(tl.abs(p - q), 0)
        slope += tl.sum(q * tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)), 0)
    tl.store(DISTANCE + row, distance)
    tl.store(SLOPE + row, slope)


@triton.jit
def gradient_kernel(
    LOGITS, TEACHER, LSE, TEACHER_LSE, LABEL, SLOPE, WEIGHT, width, scale, cap, CAPPED: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < width
    at = LOGITS + row * width + v
    weight = tl.load(WEIGHT + row)
    if weight == 0.0:
        tl.store(at, tl.zeros([BLOCK], LOGITS.dtype.element_ty), mask=inside)
    else:
        x = shaped(tl.load(at, mask=inside, other=0.0), scale, cap, CAPPED)
        q = tl.exp(x - tl.load(LSE + row))
        if KIND == "ce":
            g = tl.where(v == tl.load(LABEL + row), q - 1.0, q)
        else:
            t = shaped(tl.load(TEACHER + row * width + v, mask=inside, other=0.0), scale, cap, CAPPED)
            p = tl.exp(t - tl.load(TEACHER_LSE + row))
            if KIND == "kl":  # noqa: SIM108  (decided by the compiler, not at run time)
                g = q - p
            else:
                g = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - tl.load(SLOPE + row))
        if CAPPED:
            g = g * (1.0 - (x / cap) * (x / cap))
        tl.store(at, (g * (weight * scale)).to(LOGITS.dtype.element_ty), mask=inside)


@triton.jit
def dpace_kernel(CE, SUPERVISED, WEIGHT, slots, alpha, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < slots
    at = block * slots + k
    supervised = tl.load(SUPERVISED + at, mask=inside, other=0) != 0
    ce = tl.load(CE + at, mask=inside, other=0.0)
    smooth = tl.where(supervised, (1.0 - alpha) * tl.exp(-ce) + alpha, 1.0)
    reach = tl.where(supervised, tl.cumprod(smooth, 0), 0.0)
    weight = tl.where(supervised, tl.cumsum(reach, 0, reverse=True), 0.0)
    tl.store(WEIGHT + at, weight, mask=inside)


@dataclass(frozen=True)
class LogitShape:
    """How a head's raw products become logits: cap tanh(scale x / cap), or scale x where cap is None."""

    scale: float = 1.0
    cap: float | None = None

    def constants(self) -> dict[str, object]:
        return {"scale": self.scale, "cap": self.cap or 1.0, "CAPPED": self.cap is not None}


@dataclass(frozen=True)
class Statistics:
    """Of every row of logits [n, V]: log-sum-exp, argmax; with a teacher also its own, and sum p (t - x)."""

    lse: Tensor
    best: Tensor
    teacher_lse: Tensor
    teacher_best: Tensor
    cross: Tensor


def aligned(count: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count, rows] of 4-byte numbers, every vector at a multiple of 16 bytes whatever `rows` is: the number of rows
    changes from step to step, and Triton compiles a kernel anew for a pointer of another alignment."""
    return torch.empty((count, -(-rows // 4) * 4), dtype=dtype, device=device)[:, :rows]


def statistics(logits: Tensor, teacher: Tensor | None, shape: LogitShape) -> Statistics:
    rows, width = logits.shape
    numbers = aligned(3, rows, torch.float32, logits.device)
    places = aligned(2, rows, torch.int32, logits.device).zero_()  # used as indices, also where kernels only compile
    launch(
        statistics_kernel, (rows,),
        logits, logits if teacher is None else teacher, numbers[0], places[0], numbers[1], places[1], numbers[2],
        width, **shape.constants(), HAS_TEACHER=teacher is not None, BLOCK=2048, num_warps=4,
    )  # fmt: skip
    return Statistics(numbers[0], places[0], numbers[1], places[1], numbers[2])


def variation(logits: Tensor, teacher: Tensor, found: Statistics, shape: LogitShape) -> tuple[Tensor, Tensor]:
    """(total variation 0.5 sum |p - q|, sum q side) of every row, side = 0.5 sign(q - p)."""
    rows, width = logits.shape
    both = aligned(2, rows, torch.float32, logits.device)
    launch(
        variation_kernel, (rows,),
        logits, teacher, found.lse, found.teacher_lse, both[0], both[1], width, **shape.constants(), BLOCK=BLOCK_V,
        num_warps=8,
    )  # fmt: skip
    return both[0], both[1]


def turn_into_gradient(
    logits: Tensor, teacher: Tensor | None, found: Statistics, label: Tensor, slope: Tensor | None, weight: Tensor,
    kind: str, shape: LogitShape,
) -> None:  # fmt: skip
    """Overwrites logits [n, V] with weight * d loss / d raw logits. kind: ce, kl or tv; label int [n] for ce."""
    rows, width = logits.shape
    launch(
        gradient_kernel, (rows, triton.cdiv(width, BLOCK_V)),
        logits, logits if teacher is None else teacher, found.lse, found.teacher_lse, label,
        weight if slope is None else slope, weight, width, **shape.constants(), KIND=kind, BLOCK=BLOCK_V, num_warps=8,
    )  # fmt: skip


def dpace(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights float32 [m, K], as drafter.anchors.dpace_weights, in one launch."""
    blocks, slots = cross_entropy.shape
    weight = torch.empty_like(cross_entropy)
    launch(
        dpace_kernel, (blocks,),
        cross_entropy, supervised, weight, slots, alpha, BLOCK=max(2, triton.next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip
    return weight
