"""Forward of block attention as a Triton kernel, and the loads and stores it shares with the backward.

Rows of a query tile are (slot, head of the group) pairs: they share keys, and nearly share limits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(tile, PACK: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, length):
    """(slot, head within the pack, is it a row at all) of the rows of a query tile of SLOTS slots."""
    row = tl.arange(0, ROWS)
    local = row // PACK
    slot = tile * SLOTS + local
    return slot, row % PACK, (local < SLOTS) & (slot < length)


@triton.jit
def load_heads(pointer, position, head, valid, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a tensor [L, heads, D] whose positions are `stride` elements apart; 0 where not valid."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < D)[None, :]
    return tl.load(pointer + position[:, None] * stride + head[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(pointer, position, limit, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    where = pointer + position[:, None] * stride + d[None, :]
    if MASKED:
        return tl.load(where, mask=(position < limit)[:, None] & (d < D)[None, :], other=0.0)
    if BLOCK_D == D:
        return tl.load(where)
    return tl.load(where, mask=(d < D)[None, :], other=0.0)


@triton.jit
def store_heads(pointer, value, position, head, valid, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    where = pointer + position[:, None] * stride + head[:, None] * D + d[None, :]
    tl.store(where, value.to(pointer.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])


@triton.jit
def softmax_step(acc, total, peak, q, k, v, seen, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    higher = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    shrink = tl.exp2(peak - higher)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total * shrink + tl.sum(p, 1), higher


@triton.jit
def forward_range(
    acc, total, peak, q, KC, VC, first, last, low, high, length, kc_stride, vc_stride, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(first, last):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_keys(KC, n, length, kc_stride, D, BLOCK_D, MASKED)
        v = load_keys(VC, n, length, vc_stride, D, BLOCK_D, MASKED)
        seen = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
        acc, total, peak = softmax_step(acc, total, peak, q, k, v, seen, scale, MASKED, PRECISION)
    return acc, total, peak


@triton.jit
def forward_kernel(
    Q, KC, VC, KB, VB, OUT, LSE, LOW, HIGH, BOUNDS, slots, length, q_stride, kc_stride, vc_stride, kb_stride, vb_stride,
    out_stride, scale, H: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, OWN: tl.constexpr,
    B: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * PACK
    tiles = tl.num_programs(1)
    tile = tiles - 1 - tl.program_id(1)  # the last tiles see most: they start first
    row = tl.program_id(2).to(tl.int64)
    kv = head // GROUP
    slot, packed, valid = rows_of(tile, PACK, ROWS, SLOTS, slots)
    q = load_heads(Q + row * slots * q_stride + head * D, slot, packed, valid, q_stride, D, BLOCK_D)
    own = tile * SLOTS + tl.arange(0, OWN)
    k = load_keys(KB + row * slots * kb_stride + kv * D, own, slots, kb_stride, D, BLOCK_D, True)
    v = load_keys(VB + row * slots * vb_stride + kv * D, own, slots, vb_stride, D, BLOCK_D, True)
    seen = (own[None, :] // B == slot[:, None] // B) & (own < slots)[None, :]
    if CAUSAL:
        seen = seen & (own[None, :] <= slot[:, None])
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    acc, total, peak = softmax_step(acc, total, peak, q, k, v, seen, scale, True, PRECISION)
    low = tl.load(LOW + row * slots + slot, mask=valid, other=0)
    high = tl.load(HIGH + row * slots + slot, mask=valid, other=0)
    bounds = BOUNDS + (row * tiles + tile) * 4
    begin, full, edge, end = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3)
    KC += row * length * kc_stride + kv * D
    VC += row * length * vc_stride + kv * D
    acc, total, peak = forward_range(
        acc, total, peak, q, KC, VC, begin, full, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    acc, total, peak = forward_range(
        acc, total, peak, q, KC, VC, full, edge, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, total, peak = forward_range(
        acc, total, peak, q, KC, VC, edge, end, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    store_heads(
        OUT + row * slots * out_stride + head * D, acc / total[:, None], slot, packed, valid, out_stride, D, BLOCK_D
    )
    tl.store(LSE + (row * H + head + packed) * slots + slot, peak + tl.log2(total), mask=valid)
