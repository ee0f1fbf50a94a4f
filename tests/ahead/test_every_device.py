"""Every kernel of the CUDA step, compiled for each kind of GPU that it may meet: it fits there, and spills little."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

import pytest
import torch
from compiler import compiled_for
from torch import Tensor
from triton.runtime.jit import JITFunction

import draftline.kernels
from draftline.errors import InputError
from draftline.kernels.attention import BlockAttention
from draftline.kernels.inference import gated, rotate
from draftline.kernels.loss import LogitShape, SlotLosses, dpace, spread, teacher_of, turn_into_gradient
from draftline.kernels.pointwise import (
    head_norm_rope,
    head_norm_rope_backward,
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
)
from draftline.kernels.quantise import fp8_rows, quantise, transpose
from draftline.kernels.tiling import Geometry, tilings
from draftline.kernels.visibility import Anchors, visible

# Bytes of shared memory that a program may take, by compute capability: A100, RTX 4090 and L40S, H200, B200, RTX 5090
# (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Bytes of stack a thread, with Triton 3.6 or 3.9, whichever spills more: 736 in the queries' backward of wide heads on
# an A100, 640 in the context's on a B200 with five heads a group, 520 on an H200, and at most 320 in all else.
SPILLED_BYTES = 750


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    size: int
    block: int
    dtype: torch.dtype = torch.bfloat16


ATTENTION = {
    "Qwen3-8B, four heads a group": Heads(32, 8, 128, 16),
    "SmolLM2, ten slots": Heads(9, 3, 64, 10),
    "Qwen3.6-27B, five heads a group": Heads(40, 8, 128, 16),
    "sixteen heads a group, blocks of eight": Heads(32, 2, 128, 8),
    "the longest block": Heads(40, 8, 128, 32),
    "wide heads, the longest block": Heads(16, 4, 256, 32),
    "float32": Heads(32, 8, 128, 16, torch.float32),
    "float32, a tile of one block of eight": Heads(4, 2, 64, 8, torch.float32),
    "float32, the longest block": Heads(8, 4, 64, 32, torch.float32),
    "float32, wide heads": Heads(8, 2, 256, 16, torch.float32),
}


def attend(case: Heads, capability: int) -> None:
    """Forward and backward of one small row."""
    length, blocks = 192, 16
    geometry = Geometry(case.heads, case.kv_heads, case.size, case.block, causal=True)
    tiling = tilings(geometry, case.dtype, hopper=capability == 90)
    anchor = torch.arange(1, blocks + 1)[None] * 11
    blocks_seen = Anchors(anchor, torch.zeros_like(anchor), torch.ones_like(anchor, dtype=torch.bool))
    attention = BlockAttention(geometry, tiling, visible(blocks_seen, length, geometry, None, tiling))

    def empty(positions: int, heads: int) -> Tensor:
        return torch.empty(1, positions, heads, case.size, dtype=case.dtype)

    q = empty(blocks * case.block, case.heads)
    context, own = empty(length, case.kv_heads), empty(blocks * case.block, case.kv_heads)
    out, lse = attention.forward(q, context, context, own, own)
    attention.backward(q, q, (context, context, own, own), out, lse, (q, context, context, own, own))


def everything_else(dtype: torch.dtype, fp8: bool) -> None:
    """With the widths of the largest drafters: a kernel's registers follow them."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    for width in (576, 8192):
        x, weight = empty(32, width), torch.empty(width)
        rms_norm(x, weight, 1e-6)
        rms_norm_backward(x, weight, 1e-6, x, residual=x, y=x)
        rms_norm_backward(x, weight, 1e-6, x)
        spread(x, torch.empty(16, 15), torch.ones(16, 15, dtype=torch.bool))
    for size in (64, 128, 256):
        x, weight, rope = (
            empty(32, 8, size),
            torch.empty(size),
            (torch.empty(32, size // 2), torch.empty(32, size // 2)),
        )
        head_norm_rope(x, weight, 1e-6, rope)
        head_norm_rope_backward(x, weight, 1e-6, rope, x, x)
        table = empty(1, 32, size)
        rotate(empty(1, 8, 32, size), empty(1, 2, 32, size), table, table)
    wide = empty(32, 2 * 17408)
    swiglu(wide)
    swiglu_backward(wide, empty(32, 17408))
    for activation in ("silu", "gelu_tanh"):
        gated(empty(32, 17408), empty(32, 17408), activation)
    logits, rows, losses = empty(16, 248320), torch.arange(16), SlotLosses.zero(torch.empty(4, 4))
    label = torch.zeros(4, 4, dtype=torch.int64)
    for kind, shape in (("ce", LogitShape()), ("kl", LogitShape()), ("tv", LogitShape(0.5, 30.0))):
        teacher = None if kind == "ce" else teacher_of(logits, rows, shape)
        turn_into_gradient(logits, teacher, rows, label, kind, shape, losses)
    dpace(torch.empty(16, 15), torch.ones(16, 15, dtype=torch.bool), 0.5)
    for width in (4096, 17408) if fp8 else ():
        quantise(empty(32, width))
        quantise(empty(32, width), factor=torch.empty(width))
    if fp8:
        transpose(fp8_rows(64, 128, torch.device("cpu")).values, fp8_rows(128, 64, torch.device("cpu")).values)


@pytest.mark.parametrize(
    ("name", "capability"),
    [(n, c) for n, case in ATTENTION.items() for c in SHARED_BYTES if c in (80, 90) or case.dtype == torch.bfloat16],
)
def test_attention_fits(name: str, capability: int) -> None:
    case, limit = ATTENTION[name], SHARED_BYTES[capability]
    taken = compiled_for(capability, lambda: attend(case, capability))
    assert [one.name for one in taken] == ["forward_kernel", "query_kernel", "context_kernel", "own_kernel"]
    assert [one for one in taken if one.shared_bytes > limit or one.stack_bytes > SPILLED_BYTES] == []


@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, torch.float32), *((c, torch.bfloat16) for c in SHARED_BYTES)], ids=str
)
def test_every_other_kernel_fits(capability: int, dtype: torch.dtype) -> None:
    has_fp8 = capability >= 89
    taken = compiled_for(capability, lambda: everything_else(dtype, has_fp8))
    limit = SHARED_BYTES[capability]
    assert [one for one in taken if one.shared_bytes > limit or one.stack_bytes > SPILLED_BYTES] == []
    attention = {"forward_kernel", "query_kernel", "context_kernel", "own_kernel"}
    fp8 = {"quantise_kernel", "transpose_kernel"}
    assert {one.name for one in taken} == all_kernels() - attention - (set() if has_fp8 else fp8)


def all_kernels() -> set[str]:
    modules = [
        importlib.import_module(f"draftline.kernels.{module.name}")
        for module in pkgutil.iter_modules(draftline.kernels.__path__)
    ]
    return {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


@pytest.mark.parametrize(
    ("head_dim", "block", "dtype"),
    [
        (128, 33, torch.bfloat16),
        (256, 33, torch.bfloat16),
        (64, 33, torch.float32),
        (256, 17, torch.float32),
        (512, 8, torch.bfloat16),
    ],
)
def test_what_no_tile_holds_is_refused(head_dim: int, block: int, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"blocks of {block} slots and heads of {head_dim} dimensions"):
        tilings(Geometry(8, 2, head_dim, block, causal=True), dtype, hopper=True)
