"""The drafter on CUDA: forward and backward written out, so that each tensor is kept, recomputed or freed on purpose.

Products are cuBLAS on copies of the fp32 masters in the compute dtype, the layers' own on request in FP8
(`fp8_matrix.py`); weight gradients are added straight into fp32 (`out_dtype`), with no pass of their own. What lies
between products is one Triton kernel each (`kernels/`).
Nothing here is traced or compiled by torch: no recompilation, no graph break, no tracing flag that another thread
could see.

Kept per layer for the backward: its input, q/k/v before norm and RoPE, attention's output, the middle of the residual
stream, and gate and up. Norms, RoPE and SwiGLU are computed again, which is cheaper than keeping them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from draftline.config import Products
from draftline.drafter.anchors import Blocks
from draftline.drafter.fp8_matrix import Fp8Matrix
from draftline.drafter.matrix import Matrix, PlainMatrix
from draftline.drafter.model import Drafter, DrafterLayer
from draftline.errors import InputError
from draftline.kernels.attention import BlockAttention
from draftline.kernels.pointwise import (
    head_norm_rope,
    head_norm_rope_backward,
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
)
from draftline.kernels.tiling import Geometry, is_hopper, tilings
from draftline.kernels.visibility import Anchors, visible
from draftline.records import DrafterSpec

RopeHalves = tuple[Tensor, Tensor]  # cos and sin, float32 [positions, rotary/2]


def add_vector(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


QUERIES = 1  # the first of the stacked q, k and v, which the context has no need of


class FusedLayer:
    """One layer's matrices and norms."""

    def __init__(self, layer: DrafterLayer, dtype: torch.dtype, kind: type[PlainMatrix] | type[Fp8Matrix]) -> None:
        self.layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv: Matrix = kind((attention.q_proj, attention.k_proj, attention.v_proj), dtype)
        self.o: Matrix = kind((attention.o_proj,), dtype)
        self.gate_up: Matrix = kind((mlp.gate_proj, mlp.up_proj), dtype)
        self.down: Matrix = kind((mlp.down_proj,), dtype)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass
class LayerTape:
    """What a layer's backward needs, M = R*Q slots and C = R*S context positions."""

    z: Tensor  # [M, d]
    qkv: Tensor  # [M, (heads + 2 kv heads) D] before norm and RoPE
    kv: Tensor  # [C, 2 kv heads D]
    out: Tensor  # [R, Q, heads, D]
    lse: Tensor  # [R, heads, Q]
    middle: Tensor  # [M, d]
    gate_up: Tensor  # [M, 2 f]


@dataclass
class Tape:
    layers: list[LayerTape]
    taps: Tensor
    mixed: Tensor  # fc's output [C, d]
    c: Tensor
    last: Tensor  # the last layer's output [M, d]


@dataclass(frozen=True)
class Place:
    """Where a micro-batch's blocks stand: attention of every layer, and RoPE of block slots and of the context."""

    rows: int
    attention: tuple[BlockAttention, ...]
    rope_block: RopeHalves
    rope_context: RopeHalves


class FusedDrafter:
    """`forward` leaves a tape, `backward` uses it up and adds to the masters' gradients.

    products: of the layers, as the recipe has them. `fc` stays plain: it multiplies the target's residual stream, where
    single channels are thousands of times the others, and costs 2 of a Qwen3-8B drafter's 74 TFLOP.
    """

    def __init__(self, drafter: Drafter, dtype: torch.dtype, products: Products) -> None:
        if drafter.spec.attention_bias:
            raise InputError("the drafter has attention biases, which the CUDA step does not train")
        self.drafter = drafter
        self.spec: DrafterSpec = drafter.spec
        self.fc: Matrix = PlainMatrix((drafter.fc,), dtype)
        kind = Fp8Matrix if products == "fp8" else PlainMatrix
        self.layers = [FusedLayer(cast(DrafterLayer, layer), dtype, kind) for layer in drafter.layers]
        self.tiling = tilings(self.geometry(causal=True), dtype, is_hopper(drafter.fc.weight.device))
        self.kinds = [(self.spec.window(i), self.spec.causal(i)) for i in range(self.spec.num_hidden_layers)]

    def geometry(self, causal: bool) -> Geometry:
        spec = self.spec
        return Geometry(spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.block_size, causal)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.fc, *(matrix for layer in self.layers for matrix in layer.matrices))

    def refresh(self) -> None:
        for matrix in self.matrices:
            matrix.refresh()

    def stale(self) -> int:
        """Products that the next forward would compute on other weights than the masters: 0, or something is wrong."""
        self.refresh()
        return sum(not matrix.is_current() for matrix in self.matrices)

    def place(self, blocks: Blocks, position: Tensor) -> Place:
        """From anchors and context positions int64 [R, S], both on the device."""
        spec, length = self.spec, position.shape[1]
        made: dict[tuple[int | None, bool], BlockAttention] = {}
        for window, causal in self.kinds:
            if (window, causal) not in made:
                geometry = self.geometry(causal)
                seen = visible(Anchors(blocks.anchor, blocks.start, blocks.keep), length, geometry, window, self.tiling)
                made[window, causal] = BlockAttention(geometry, self.tiling, seen)
        offset = torch.arange(spec.block_size, device=position.device)
        slots = position.gather(1, blocks.anchor)[..., None] + offset
        attention = tuple(made[kind] for kind in self.kinds)
        return Place(len(position), attention, self.rope(slots), self.rope(position))

    def rope(self, position: Tensor) -> RopeHalves:
        angle = position.reshape(-1, 1).float() * self.drafter.inv_freq
        return angle.cos() * self.drafter.rope_scale, angle.sin() * self.drafter.rope_scale

    @torch.no_grad()
    def forward(self, embeds: Tensor, taps: Tensor, place: Place) -> tuple[Tensor, Tape]:
        """Final-normed states [M, d] of all slots. embeds [M, d], taps [C, K*d]."""
        self.refresh()
        mixed = self.fc.forward(taps)
        c = rms_norm(mixed, self.drafter.hidden_norm.weight, self.spec.rms_norm_eps)
        z, tapes = embeds, []
        for layer, attention in zip(self.layers, place.attention, strict=True):
            z, tape = self.layer_forward(layer, z, c, place, attention)
            tapes.append(tape)
        y = rms_norm(z, self.drafter.norm.weight, self.spec.rms_norm_eps)
        return y, Tape(tapes, taps, mixed, c, z)

    def layer_forward(
        self, layer: FusedLayer, z: Tensor, c: Tensor, place: Place, attention: BlockAttention
    ) -> tuple[Tensor, LayerTape]:
        eps = self.spec.rms_norm_eps
        qkv = layer.qkv.forward(rms_norm(z, layer.layer.input_layernorm.weight, eps))
        kv = layer.qkv.forward(c, skip=QUERIES)
        q, keys = self.rotated(layer, qkv, kv, place)
        out, lse = attention.forward(q, *keys)
        middle = layer.o.forward(out.flatten(0, 1).flatten(1), z)
        gate_up = layer.gate_up.forward(rms_norm(middle, layer.layer.post_attention_layernorm.weight, eps))
        z_next = layer.down.forward(swiglu(gate_up), middle)
        return z_next, LayerTape(z, qkv, kv, out, lse, middle, gate_up)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [M, heads, D] of q, k and v; q is empty for a tensor of keys and values."""
        heads = qkv.unflatten(-1, (-1, self.spec.head_dim))
        kv_heads = self.spec.num_key_value_heads
        return heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]

    def rotated(
        self, layer: FusedLayer, qkv: Tensor, kv: Tensor, place: Place
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        """q [R, Q, heads, D] and the keys' four tensors k_context, v_context, k_block, v_block, normed and rotated."""
        attention, eps = layer.layer.self_attn, self.spec.rms_norm_eps
        q, k, v = self.split(qkv)
        _, k_context, v_context = self.split(kv)
        q = head_norm_rope(q, attention.q_norm.weight, eps, place.rope_block)
        k = head_norm_rope(k, attention.k_norm.weight, eps, place.rope_block)
        k_context = head_norm_rope(k_context, attention.k_norm.weight, eps, place.rope_context)
        q, *keys = (t.unflatten(0, (place.rows, -1)) for t in (q, k_context, v_context, k, v))
        return q, (keys[0], keys[1], keys[2], keys[3])

    @torch.no_grad()
    def backward(self, dy: Tensor, tape: Tape, place: Place) -> None:
        """dy [M, d]: gradient of the final-normed states."""
        eps, drafter = self.spec.rms_norm_eps, self.drafter
        dz, dw = rms_norm_backward(tape.last, drafter.norm.weight, eps, dy)
        add_vector(drafter.norm.weight, dw)
        dc: Tensor | None = None
        for layer, attention in zip(reversed(self.layers), reversed(place.attention), strict=True):
            dz, dc = self.layer_backward(layer, tape.layers.pop(), tape.c, dz, dc, place, attention)
        assert dc is not None
        dmixed, dw = rms_norm_backward(tape.mixed, drafter.hidden_norm.weight, eps, dc)
        add_vector(drafter.hidden_norm.weight, dw)
        self.fc.add_gradient(dmixed, tape.taps)

    def layer_backward(
        self, layer: FusedLayer, tape: LayerTape, c: Tensor, dz: Tensor, dc: Tensor | None, place: Place,
        attention: BlockAttention,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(dz of the layer's input, dc so far)."""
        dmiddle = self.mlp_backward(layer, tape, dz)
        dout = layer.o.backward(dmiddle).view_as(tape.out)
        layer.o.add_gradient(dmiddle, tape.out.flatten(0, 1).flatten(1))
        dqkv, dkv = self.attention_backward(layer, tape, dout, place, attention)
        u = torch.empty_like(tape.z)
        norm = layer.layer.input_layernorm.weight
        dz, dw = rms_norm_backward(tape.z, norm, self.spec.rms_norm_eps, layer.qkv.backward(dqkv), dmiddle, u)
        add_vector(norm, dw)
        layer.qkv.add_gradient(dqkv, u)
        layer.qkv.add_gradient(dkv, c, skip=QUERIES)
        return dz, layer.qkv.backward(dkv, dc, skip=QUERIES)

    def mlp_backward(self, layer: FusedLayer, tape: LayerTape, dz: Tensor) -> Tensor:
        dgate_up, h = swiglu_backward(tape.gate_up, layer.down.backward(dz))
        layer.down.add_gradient(dz, h)
        del h
        u = torch.empty_like(tape.middle)
        norm = layer.layer.post_attention_layernorm.weight
        dmiddle, dw = rms_norm_backward(
            tape.middle, norm, self.spec.rms_norm_eps, layer.gate_up.backward(dgate_up), residual=dz, y=u
        )
        add_vector(norm, dw)
        layer.gate_up.add_gradient(dgate_up, u)
        return dmiddle

    def attention_backward(
        self, layer: FusedLayer, tape: LayerTape, dout: Tensor, place: Place, attention: BlockAttention
    ) -> tuple[Tensor, Tensor]:
        """(d qkv [M, ...], d kv [C, ...]) before norm and RoPE."""
        q, keys = self.rotated(layer, tape.qkv, tape.kv, place)
        dqkv, dkv = torch.empty_like(tape.qkv), torch.empty_like(tape.kv)
        dq, dk, dk_context = torch.empty_like(q), torch.empty_like(keys[2]), torch.empty_like(keys[0])
        q_raw, k_raw, _ = self.split(tape.qkv)
        _, k_context_raw, _ = self.split(tape.kv)
        dq_raw, dk_raw, dv = self.split(dqkv)
        _, dk_context_raw, dv_context = self.split(dkv)
        by_row = (place.rows, -1)
        into = (dq, dk_context, dv_context.unflatten(0, by_row), dk, dv.unflatten(0, by_row))
        attention.backward(dout, q, keys, tape.out, tape.lse, into)
        norms, eps = layer.layer.self_attn, self.spec.rms_norm_eps
        for raw, gradient, norm, rope, rotated in (
            (q_raw, dq_raw, norms.q_norm, place.rope_block, dq),
            (k_raw, dk_raw, norms.k_norm, place.rope_block, dk),
            (k_context_raw, dk_context_raw, norms.k_norm, place.rope_context, dk_context),
        ):
            dw = head_norm_rope_backward(raw, norm.weight, eps, rope, rotated.flatten(0, 1), gradient)
            add_vector(norm.weight, dw)
        return dqkv, dkv
