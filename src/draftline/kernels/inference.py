"""Rotary embedding of queries and keys, and the product of a gated MLP: a target's forward, one pass over memory each.

All arithmetic is float32; results are in the inputs' dtype. What varies from forward to forward, the number of tokens,
is not specialised on: a kernel is compiled once a model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftline.kernels.launch import launch
from draftline.kernels.pointwise import partner_of


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    Q, K, COS, SIN, QY, KY, tokens, q_batch, q_head, q_token, k_batch, k_head, k_token, cos_batch, cos_token, sin_batch,
    sin_token, half, q_heads, k_heads, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    other, sign = partner_of(d, half)
    valid = token < tokens
    inside = valid[:, None] & (d < D)[None, :]
    turned = valid[:, None] & (d < 2 * half)[None, :]
    if head < q_heads:  # the grid runs over the heads of both
        start = Q + batch * q_batch + head * q_head + token * q_token
        end = QY + ((batch * tokens + token) * q_heads + head) * D
    else:
        start = K + batch * k_batch + (head - q_heads) * k_head + token * k_token
        end = KY + ((batch * tokens + token) * k_heads + head - q_heads) * D
    x = tl.load(start[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    mate = tl.load(start[:, None] + other[None, :], mask=turned, other=0.0).to(tl.float32)
    cos_at = COS + batch * cos_batch + (token * cos_token)[:, None] + d[None, :]
    sin_at = SIN + batch * sin_batch + (token * sin_token)[:, None] + d[None, :]
    cos = tl.load(cos_at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_at, mask=turned, other=0.0).to(tl.float32)
    y = x * cos + sign[None, :] * mate * sin
    tl.store(end[:, None] + d[None, :], y.to(QY.dtype.element_ty), mask=inside)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE of q [B, Hq, S, D] and k [B, Hk, S, D], views of any layout whose last stride is 1, by the halves convention
    over the first `rotary` dimensions. cos, sin [B or 1, S, rotary], each dimension by its own value.

    Returns them as views [B, H, S, D] of dense [B, S, H, D], which is how attention kernels want them.
    """
    batch, q_heads, tokens, size = q.shape
    k_heads, rotary = k.shape[1], cos.shape[-1]
    q_y, k_y = (torch.empty(batch, tokens, heads, size, dtype=q.dtype, device=q.device) for heads in (q_heads, k_heads))
    block = max(16, triton.next_power_of_2(size))
    together = max(1, 4096 // block)
    tables = [table.stride(0) if table.shape[0] > 1 else 0 for table in (cos, sin)]
    launch(
        rope_kernel, (triton.cdiv(tokens, together), batch, q_heads + k_heads),
        q, k, cos, sin, q_y, k_y, tokens, *q.stride()[:3], *k.stride()[:3], tables[0], cos.stride(1), tables[1],
        sin.stride(1), rotary // 2, q_heads, k_heads, D=size, BLOCK_D=block, TOKENS=together, num_warps=4,
    )  # fmt: skip
    return q_y.transpose(1, 2), k_y.transpose(1, 2)


@triton.jit
def gated_kernel(GATE, UP, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    gate = tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    else:  # gelu by tanh: 0.5 (1 + tanh u) is the sigmoid of 2 u
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    # rounded between activation and product, as the plain model does
    product = active.to(GATE.dtype.element_ty).to(tl.float32) * up
    tl.store(GATE + at, product.to(GATE.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) up, written over gate. Both dense and of one shape. activation: silu or gelu_tanh."""
    width = gate.shape[-1]
    launch(
        gated_kernel, (gate.numel() // width, triton.cdiv(width, 2048)),
        gate, up, width, ACTIVATION=activation, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return gate
