"""The loss on a chunk of logits: one program reads a row, finds its loss and turns it into its gradient (SPEC 5).

Logits are raw products with the target's head; `scale` > 0 and `cap` turn them into the target's own logits where it
scales or soft-caps them: cap tanh(scale x / cap). Neither changes their order. Exponentials are taken in base 2, as the
device does, one for each logit and pass.

A row is read at least twice, the second time backwards, from what was read last: a row of Qwen3-8B's vocabulary takes
0.3 MB, so those of the programs that run at once, large ones and few, are still in an H200's 50 MB of cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftline.kernels.launch import launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE = {"U": 2, "BLOCK": 2048, "STAGES": 3, "num_warps": 8}  # a pass goes by tiles [U, BLOCK] of the vocabulary


@triton.jit
def base2(raw, scale, cap, CAPPED: tl.constexpr):
    """Logits times log2(e)."""
    if CAPPED:
        t = tl.exp2(tl.abs(raw * (scale / cap)) * (-2.0 * LOG2E))
        y = tl.where(raw < 0, -cap, cap) * LOG2E * (1.0 - t) / (1.0 + t)
        y = tl.where(raw == float("-inf"), raw, y)  # outside the vocabulary
    else:
        y = raw * (scale * LOG2E)
    return y


@triton.jit
def places(begin, U: tl.constexpr, BLOCK: tl.constexpr):
    return begin + tl.arange(0, U)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def read(ROW, v, width, MASKED: tl.constexpr):
    """Raw logits, float32; -inf outside the vocabulary."""
    if MASKED:  # noqa: SIM108  (decided by the compiler, not at run time)
        raw = tl.load(ROW + v, mask=v < width, other=float("-inf"))
    else:
        raw = tl.load(ROW + v)
    return raw.to(tl.float32)


@triton.jit
def probability(ROW, v, lse, width, scale, cap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    return tl.exp2(base2(read(ROW, v, width, MASKED), scale, cap, CAPPED) - lse)


@triton.jit
def survey(
    ROW, OTHER, t_lse, width, scale, cap, CAPPED: tl.constexpr, CROSSED: tl.constexpr, U: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(log2-sum-exp2, argmax, sum p (t - y)) of a row, y its logits and t the teacher's in base 2, p = exp2(t - t_lse).

    Each lane of BLOCK keeps its highest raw logit, where the tile began that brought it, and its sum of exponentials
    over that; lanes meet at the end, and those that reached the peak look into their tile again for the lowest index.
    """
    full = width // (U * BLOCK) * (U * BLOCK)
    total, across = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    peak, best = tl.full([BLOCK], -1e30, tl.float32), tl.zeros([BLOCK], tl.int32)
    for tail in tl.static_range(2):
        for begin in tl.range(full * tail, full * (1 - tail) + width * tail, U * BLOCK, num_stages=STAGES):
            v = places(begin, U, BLOCK)
            raw = read(ROW, v, width, tail)
            y = base2(raw, scale, cap, CAPPED)
            top = tl.max(raw, 0)
            best = tl.where(top > peak, begin, best)
            higher = tl.maximum(peak, top)
            over = base2(higher, scale, cap, CAPPED)
            # 1 where the peak stays: by a fused multiply-add -1e30 less itself is 6e22, in lanes past a small width
            total *= tl.where(top > peak, tl.exp2(base2(peak, scale, cap, CAPPED) - over), 1.0)
            total += tl.sum(tl.exp2(y - over[None, :]), 0)
            peak = higher
            if CROSSED:
                t = base2(read(OTHER, v, width, tail), scale, cap, CAPPED)
                p = tl.exp2(t - t_lse)
                across += tl.sum(tl.where(p > 0, p * (t - y), 0.0), 0)
    over = base2(peak, scale, cap, CAPPED)
    highest, top = tl.max(over, 0), tl.max(peak, 0)
    lse = highest + tl.log2(tl.sum(total * tl.exp2(over - highest), 0))
    v = places(0, U, BLOCK) + best[None, :]
    raw = tl.load(ROW + v, mask=(peak == top)[None, :] & (v < width), other=float("-inf")).to(tl.float32)
    first = tl.min(tl.min(tl.where(raw == top, v, width - 1), 0), 0)  # an index for a row of NaN too
    return lse, first, tl.sum(across, 0)


@triton.jit
def side(q, p):
    """d |q - p| / 2 dq"""
    return tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))


@triton.jit
def variation(
    ROW, OTHER, lse, t_lse, width, scale, cap, CAPPED: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(total variation sum |p - q| / 2, sum q side) of the drafter's q and the teacher's p."""
    full = width // (U * BLOCK) * (U * BLOCK)
    apart, tilt = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for tail in tl.static_range(2):
        for begin in tl.range(full * tail, full * (1 - tail) + width * tail, U * BLOCK, num_stages=STAGES):
            v = places(begin, U, BLOCK)
            q = probability(ROW, v, lse, width, scale, cap, CAPPED, tail)
            p = probability(OTHER, v, t_lse, width, scale, cap, CAPPED, tail)
            apart += tl.sum(tl.abs(p - q), 0)
            tilt += tl.sum(q * side(q, p), 0)
    return 0.5 * tl.sum(apart, 0), tl.sum(tilt, 0)


@triton.jit
def turn(
    ROW, OTHER, begin, label, slope, lse, t_lse, width, scale, cap, CAPPED: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a tile of raw logits with the loss's gradient."""
    v = places(begin, U, BLOCK)
    y = base2(read(ROW, v, width, MASKED), scale, cap, CAPPED)
    g = tl.exp2(y - lse)
    if KIND == "kl":
        g -= probability(OTHER, v, t_lse, width, scale, cap, CAPPED, MASKED)
    elif KIND == "tv":
        g *= side(g, probability(OTHER, v, t_lse, width, scale, cap, CAPPED, MASKED)) - slope
    else:
        g = tl.where(v == label, g - 1.0, g)
    if CAPPED:
        tanh = y / (cap * LOG2E)
        g *= 1.0 - tanh * tanh
    g = (g * scale).to(ROW.dtype.element_ty)
    if MASKED:
        tl.store(ROW + v, g, mask=v < width)
    else:
        tl.store(ROW + v, g)


@triton.jit
def loss_kernel(
    LOGITS, TEACHER, SLOT, LABEL, TEACHER_ROW, TEACHER_LSE, TEACHER_BEST, LOSS, ENTROPY, CORRECT, width, scale, cap,
    CAPPED: tl.constexpr, KIND: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Row r of the chunk is slot SLOT[r], where its label stands and its results go. It has teacher TEACHER_ROW[r]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT + row)
    ROW = LOGITS + row * width
    OTHER, t_lse, slope = ROW, 0.0, 0.0
    if KIND == "ce":
        label = tl.load(LABEL + slot).to(tl.int32)
    else:
        teacher_row = tl.load(TEACHER_ROW + row)
        label = tl.load(TEACHER_BEST + teacher_row)
        OTHER = TEACHER + teacher_row * width
        t_lse = tl.load(TEACHER_LSE + teacher_row)
    labelled = tl.load(ROW + label, mask=label < width, other=float("nan")).to(tl.float32)  # no such token: no number
    labelled = base2(labelled, scale, cap, CAPPED)
    lse, best, across = survey(ROW, OTHER, t_lse, width, scale, cap, CAPPED, KIND == "kl", U, BLOCK, STAGES)
    entropy = (lse - labelled) * LN2
    loss = entropy
    if KIND == "kl":
        loss = (across - t_lse + lse) * LN2
    if KIND == "tv":
        loss, slope = variation(ROW, OTHER, lse, t_lse, width, scale, cap, CAPPED, U, BLOCK, STAGES)
    tl.store(LOSS + slot, loss)
    tl.store(ENTROPY + slot, entropy)
    tl.store(CORRECT + slot, best == label)
    full = width // (U * BLOCK) * (U * BLOCK)
    if full < width:
        turn(ROW, OTHER, full, label, slope, lse, t_lse, width, scale, cap, CAPPED, KIND, True, U, BLOCK)
    for done in tl.range(0, full, U * BLOCK, num_stages=STAGES):
        begin = full - U * BLOCK - done
        turn(ROW, OTHER, begin, label, slope, lse, t_lse, width, scale, cap, CAPPED, KIND, False, U, BLOCK)


@triton.jit
def statistics_kernel(
    LOGITS, LSE, BEST, width, scale, cap, CAPPED: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ROW = LOGITS + row * width
    lse, best, _ = survey(ROW, ROW, 0.0, width, scale, cap, CAPPED, False, U, BLOCK, STAGES)
    tl.store(LSE + row, lse)
    tl.store(BEST + row, best)


@triton.jit
def dpace_kernel(ENTROPY, SUPERVISED, WEIGHT, slots, alpha, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < slots
    at = block * slots + k
    supervised = tl.load(SUPERVISED + at, mask=inside, other=0) != 0
    entropy = tl.load(ENTROPY + at, mask=inside, other=0.0)
    smooth = tl.where(supervised, (1.0 - alpha) * tl.exp(-entropy) + alpha, 1.0)
    reach = tl.where(supervised, tl.cumprod(smooth, 0), 0.0)
    weight = tl.where(supervised, tl.cumsum(reach, 0, reverse=True), 0.0)
    tl.store(WEIGHT + at, weight, mask=inside)


@triton.jit
def spread_kernel(ROWS, WEIGHT, COUNT, OUT, width, size, BLOCK: tl.constexpr):
    """State i of the blocks is slot i % size of block i // size; COUNT: how many rows there are up to each slot."""
    state = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    slot = tl.maximum(state - state // size - 1, 0)
    weight = tl.where(state % size > 0, tl.load(WEIGHT + slot), 0.0)
    if weight == 0.0:
        tl.store(OUT + state * width + d, tl.zeros([BLOCK], OUT.dtype.element_ty), mask=d < width)
    else:
        row = tl.load(COUNT + slot) - 1
        gradient = weight * tl.load(ROWS + row * width + d, mask=d < width).to(tl.float32)
        tl.store(OUT + state * width + d, gradient.to(OUT.dtype.element_ty), mask=d < width)


@dataclass(frozen=True)
class LogitShape:
    """How a head's raw products become logits: cap tanh(scale x / cap), or scale x where cap is None."""

    scale: float = 1.0
    cap: float | None = None

    def constants(self) -> dict[str, object]:
        return {"scale": self.scale, "cap": self.cap or 1.0, "CAPPED": self.cap is not None}


@dataclass(frozen=True)
class Teacher:
    """The target's logits that a chunk is compared with: a row [t, V] for each position, its log2-sum-exp2 float32 and
    its argmax int32 [t]; `row` int64 [n]: which of them belongs to each of the chunk's rows."""

    logits: Tensor
    lse: Tensor
    best: Tensor
    row: Tensor


@dataclass(frozen=True)
class SlotLosses:
    """Of every slot of M blocks [M, K], float32: its unweighted loss, the cross entropy of its label; bool: whether the
    drafter's argmax is the label. 0 where no row of logits was computed."""

    loss: Tensor
    entropy: Tensor
    correct: Tensor

    @staticmethod
    def zero(like: Tensor) -> SlotLosses:
        """For slots [M, K]."""
        loss, entropy = (torch.zeros(like.shape, dtype=torch.float32, device=like.device) for _ in range(2))
        return SlotLosses(loss, entropy, torch.zeros(like.shape, dtype=torch.bool, device=like.device))


def teacher_of(logits: Tensor, row: Tensor, shape: LogitShape) -> Teacher:
    rows, width = logits.shape
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int32, device=logits.device)
    launch(statistics_kernel, (rows,), logits, lse, best, width, **shape.constants(), **TILE)
    return Teacher(logits, lse, best, row)


def turn_into_gradient(
    logits: Tensor, teacher: Teacher | None, slot: Tensor, label: Tensor, kind: str, shape: LogitShape,
    into: SlotLosses,
) -> None:  # fmt: skip
    """Overwrites logits [n, V] with d loss / d raw logits, unweighted, and writes the losses of their slots.

    slot int64 [n] in 0..M*K-1; label int64 [M, K], read where kind is ce; kind: ce, or ce_target, kl, tv with a
    teacher. All vectors begin at a multiple of 16 bytes, or Triton compiles the kernel anew.
    """
    rows, width = logits.shape
    given = (logits, slot, into.loss, into.entropy) if teacher is None else (
        teacher.logits, teacher.row, teacher.lse, teacher.best
    )  # fmt: skip
    launch(
        loss_kernel, (rows,),
        logits, given[0], slot, label, given[1], given[2], given[3], into.loss, into.entropy, into.correct, width,
        **shape.constants(), KIND=kind, **TILE,
    )  # fmt: skip


def dpace(entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights float32 [m, K] of cross entropies, as drafter.anchors.dpace_weights, in one launch."""
    blocks, slots = entropy.shape
    weight = torch.empty_like(entropy)
    launch(
        dpace_kernel, (blocks,),
        entropy, supervised, weight, slots, alpha, BLOCK=max(2, triton.next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip
    return weight


def spread(rows: Tensor, weight: Tensor, supervised: Tensor) -> Tensor:
    """Weighted rows at their places: [M, K+1, d] with 0 in slot 0 and wherever there is no row.

    rows [n, d] of the supervised slots in order; weight float32 and supervised bool [M, K].
    """
    (blocks, slots), width = weight.shape, rows.shape[1]
    out = torch.empty((blocks, slots + 1, width), dtype=rows.dtype, device=rows.device)
    launch(
        spread_kernel, (blocks * (slots + 1),),
        rows, weight, supervised.flatten().cumsum(0), out, width, slots + 1, BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    return out
