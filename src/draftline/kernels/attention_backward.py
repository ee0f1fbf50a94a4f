"""Backward of block attention as Triton kernels: queries, keys of the context, and keys of the blocks' own slots."""

from __future__ import annotations

import triton
import triton.language as tl

from draftline.kernels.attention_forward import load_heads, load_keys, rows_of, store_heads


@triton.jit
def query_step(dq, q, do, k, v, lse, delta, seen, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def query_range(
    dq, q, do, KC, VC, lse, delta, first, last, low, high, length, kc_stride, vc_stride, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(first, last):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_keys(KC, n, length, kc_stride, D, BLOCK_D, MASKED)
        v = load_keys(VC, n, length, vc_stride, D, BLOCK_D, MASKED)
        seen = (n[None, :] >= low[:, None]) & (n[None, :] < high[:, None])
        dq = query_step(dq, q, do, k, v, lse, delta, seen, scale, MASKED, PRECISION)
    return dq


@triton.jit
def query_kernel(
    Q, KC, VC, KB, VB, OUT, DO, DQ, LSE, DELTA, LOW, HIGH, BOUNDS, slots, length, q_stride, kc_stride, vc_stride,
    kb_stride, vb_stride, out_stride, do_stride, dq_stride, scale, natural_scale, H: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * PACK
    tiles = tl.num_programs(1)
    tile = tiles - 1 - tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    kv = head // GROUP
    slot, packed, valid = rows_of(tile, PACK, ROWS, SLOTS, slots)
    q = load_heads(Q + row * slots * q_stride + head * D, slot, packed, valid, q_stride, D, BLOCK_D)
    do = load_heads(DO + row * slots * do_stride + head * D, slot, packed, valid, do_stride, D, BLOCK_D)
    out = load_heads(OUT + row * slots * out_stride + head * D, slot, packed, valid, out_stride, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    number = (row * H + head + packed) * slots + slot
    tl.store(DELTA + number, delta, mask=valid)
    lse = tl.load(LSE + number, mask=valid, other=float("inf"))
    own = tile * SLOTS + tl.arange(0, OWN)
    k = load_keys(KB + row * slots * kb_stride + kv * D, own, slots, kb_stride, D, BLOCK_D, True)
    v = load_keys(VB + row * slots * vb_stride + kv * D, own, slots, vb_stride, D, BLOCK_D, True)
    seen = (own[None, :] // B == slot[:, None] // B) & (own < slots)[None, :]
    if CAUSAL:
        seen = seen & (own[None, :] <= slot[:, None])
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dq = query_step(dq, q, do, k, v, lse, delta, seen, scale, True, PRECISION)
    low = tl.load(LOW + row * slots + slot, mask=valid, other=0)
    high = tl.load(HIGH + row * slots + slot, mask=valid, other=0)
    bounds = BOUNDS + (row * tiles + tile) * 4
    begin, full, edge, end = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3)
    KC += row * length * kc_stride + kv * D
    VC += row * length * vc_stride + kv * D
    dq = query_range(
        dq, q, do, KC, VC, lse, delta, begin, full, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    dq = query_range(
        dq, q, do, KC, VC, lse, delta, full, edge, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    dq = query_range(
        dq, q, do, KC, VC, lse, delta, edge, end, low, high, length, kc_stride, vc_stride, scale,
        D, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    store_heads(DQ + row * slots * dq_stride + head * D, dq * natural_scale, slot, packed, valid, dq_stride, D, BLOCK_D)


@triton.jit
def key_step(dk, dv, q, do, k, v, lse, delta, seen, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one query tile's part to dk and dv [n, D]. `seen` [n, m] and both score tiles are transposed."""
    p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale - lse[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def context_range(
    dk, dv, k, v, Q, DO, LSE, DELTA, LOW, HIGH, first, last, n, slots, q_stride, do_stride, scale,
    PACK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(first, last):
        slot, packed, valid = rows_of(tile, PACK, ROWS, SLOTS, slots)
        q = load_heads(Q, slot, packed, valid, q_stride, D, BLOCK_D)
        do = load_heads(DO, slot, packed, valid, do_stride, D, BLOCK_D)
        lse = tl.load(LSE + packed * slots + slot, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + packed * slots + slot, mask=valid, other=0.0)
        low = tl.load(LOW + slot, mask=valid, other=0)
        high = tl.load(HIGH + slot, mask=valid, other=0)
        seen = (n[:, None] >= low[None, :]) & (n[:, None] < high[None, :])
        dk, dv = key_step(dk, dv, q, do, k, v, lse, delta, seen, scale, MASKED, PRECISION)
    return dk, dv


@triton.jit
def context_kernel(
    Q, KC, VC, DO, DKC, DVC, LSE, DELTA, LOW, HIGH, BOUNDS, slots, length, q_stride, kc_stride, vc_stride, do_stride,
    dkc_stride, dvc_stride, scale, natural_scale, H: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0)
    tile = tl.program_id(1)  # the first tiles are seen by most: they start first
    row = tl.program_id(2).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_keys(KC + row * length * kc_stride + kv * D, n, length, kc_stride, D, BLOCK_D, True)
    v = load_keys(VC + row * length * vc_stride + kv * D, n, length, vc_stride, D, BLOCK_D, True)
    bounds = BOUNDS + (row * tl.num_programs(1) + tile) * 4
    begin, full, edge, end = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2), tl.load(bounds + 3)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    Q += row * slots * q_stride
    DO += row * slots * do_stride
    LOW += row * slots
    HIGH += row * slots
    for pack in range(GROUP // PACK):
        head = kv * GROUP + pack * PACK
        number = (row * H + head) * slots
        dk, dv = context_range(
            dk, dv, k, v, Q + head * D, DO + head * D, LSE + number, DELTA + number, LOW, HIGH, begin, full, n, slots,
            q_stride, do_stride, scale, PACK, D, BLOCK_D, ROWS, SLOTS, True, PRECISION,
        )  # fmt: skip
        dk, dv = context_range(
            dk, dv, k, v, Q + head * D, DO + head * D, LSE + number, DELTA + number, LOW, HIGH, full, edge, n, slots,
            q_stride, do_stride, scale, PACK, D, BLOCK_D, ROWS, SLOTS, False, PRECISION,
        )  # fmt: skip
        dk, dv = context_range(
            dk, dv, k, v, Q + head * D, DO + head * D, LSE + number, DELTA + number, LOW, HIGH, edge, end, n, slots,
            q_stride, do_stride, scale, PACK, D, BLOCK_D, ROWS, SLOTS, True, PRECISION,
        )  # fmt: skip
    zero = n * 0
    store_heads(
        DKC + row * length * dkc_stride + kv * D, dk * natural_scale, n, zero, n < length, dkc_stride, D, BLOCK_D
    )
    store_heads(DVC + row * length * dvc_stride + kv * D, dv, n, zero, n < length, dvc_stride, D, BLOCK_D)


@triton.jit
def own_kernel(
    Q, KB, VB, DO, DKB, DVB, LSE, DELTA, slots, q_stride, kb_stride, vb_stride, do_stride, dkb_stride, dvb_stride,
    scale, natural_scale, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot, zero, valid = rows_of(tile, 1, ROWS, SLOTS, slots)
    k = load_heads(KB + row * slots * kb_stride + kv * D, slot, zero, valid, kb_stride, D, BLOCK_D)
    v = load_heads(VB + row * slots * vb_stride + kv * D, slot, zero, valid, vb_stride, D, BLOCK_D)
    seen = slot[:, None] // B == slot[None, :] // B  # [key, query]
    if CAUSAL:
        seen = seen & (slot[:, None] <= slot[None, :])
    dk = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = kv * GROUP + member
        q = load_heads(Q + row * slots * q_stride + head * D, slot, zero, valid, q_stride, D, BLOCK_D)
        do = load_heads(DO + row * slots * do_stride + head * D, slot, zero, valid, do_stride, D, BLOCK_D)
        number = (row * H + head) * slots + slot
        lse = tl.load(LSE + number, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + number, mask=valid, other=0.0)
        dk, dv = key_step(dk, dv, q, do, k, v, lse, delta, seen, scale, True, PRECISION)
    store_heads(DKB + row * slots * dkb_stride + kv * D, dk * natural_scale, slot, zero, valid, dkb_stride, D, BLOCK_D)
    store_heads(DVB + row * slots * dvb_stride + kv * D, dv, slot, zero, valid, dvb_stride, D, BLOCK_D)
