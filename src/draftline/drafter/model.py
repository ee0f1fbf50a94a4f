"""The DFlash drafter (SPEC 2): Qwen3-style layers whose keys and values cover the target's features and the block.

One model for training and decoding. How queries meet keys is handed in as `attend`, so the training forward
(`attention.py`) and the decoding loop (`decode/cache.py`) run the very same weights and arithmetic.

Shapes: R rows, S context positions, Q block slots (all blocks of a row, one after another), d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftline.records import DrafterSpec


class LayerAttend(Protocol):
    """How one layer's queries meet its keys: q [R, Q, heads, D], k_context and v_context [R, S, kv heads, D], k_block
    and v_block [R, Q, kv heads, D] -> [R, Q, heads, D]."""

    def __call__(self, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor) -> Tensor: ...


class Attend(Protocol):
    def layer(self, index: int) -> LayerAttend: ...


class Linear(nn.Linear):
    """A linear layer whose fp32 master weight is cast to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """RMSNorm in float32, back in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        heads, kv_heads, size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self.head_dim = size
        self.q_proj = Linear(spec.hidden_size, heads * size, bias=spec.attention_bias)
        self.k_proj = Linear(spec.hidden_size, kv_heads * size, bias=spec.attention_bias)
        self.v_proj = Linear(spec.hidden_size, kv_heads * size, bias=spec.attention_bias)
        self.o_proj = Linear(heads * size, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = RMSNorm(size, spec.rms_norm_eps)
        self.k_norm = RMSNorm(size, spec.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, u: Tensor, c: Tensor, rope_block: Rope, rope_context: Rope, attend: LayerAttend) -> Tensor:
        q = rotate(self.q_norm(self.heads(self.q_proj(u))), rope_block)
        k_block = rotate(self.k_norm(self.heads(self.k_proj(u))), rope_block)
        k_context = rotate(self.k_norm(self.heads(self.k_proj(c))), rope_context)
        v_block, v_context = self.heads(self.v_proj(u)), self.heads(self.v_proj(c))
        out = attend(q, k_context, v_context, k_block, v_block)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, z: Tensor, c: Tensor, rope_block: Rope, rope_context: Rope, attend: LayerAttend) -> Tensor:
        z = z + self.self_attn(self.input_layernorm(z), c, rope_block, rope_context, attend)
        return z + self.mlp(self.post_attention_layernorm(z))


class Drafter(nn.Module):
    """fc, hidden_norm, norm and m layers: everything that is trained. Embedding and head stay the target's.

    `untrained` makes one with its first values, `holding` one of tensors that exist.
    """

    inv_freq: Tensor

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        with torch.device("cpu"):  # also where the parameters are made without memory (`holding`)
            inv_freq, self.rope_scale = rope_frequencies(spec)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def context(self, taps: Tensor) -> Tensor:
        """Context features c = RMSNorm(W_fc taps): [R, S, K*d] -> [R, S, d]. Once, shared by every layer."""
        return self.hidden_norm(self.fc(taps))

    def forward(
        self, embeds: Tensor, block_position: Tensor, c: Tensor, context_position: Tensor, attend: Attend
    ) -> Tensor:
        """Final-normed states of all block slots [R, Q, d]; the target's head turns them into logits.

        embeds [R, Q, d]: E[x_a] in slot 0, E[MASK] elsewhere. Positions int64 [R, Q] and [R, S] count from the
        start of the document: slot j of the block at anchor a is at a+j (SPEC 2.3).
        """
        rope_block, rope_context = self.rope(block_position), self.rope(context_position)
        z = embeds
        for index, layer in enumerate(self.layers):
            z = layer(z, c, rope_block, rope_context, attend.layer(index))
        return self.norm(z)

    def rope(self, position: Tensor) -> Rope:
        angle = position.float()[..., None] * self.inv_freq  # [R, L, rotary/2]
        angle = torch.cat([angle, angle], dim=-1)[:, :, None, :]
        return angle.cos() * self.rope_scale, angle.sin() * self.rope_scale


Rope = tuple[Tensor, Tensor]  # cos and sin, float32 [R, L, 1, rotary dimensions]


def untrained(spec: DrafterSpec, seed: int, std: float = 0.02) -> Drafter:
    """A drafter before its first step, float32 on the CPU: normal weights of `std`, biases 0, norms 1.

    Each matrix has a generator of its own, of `seed` and its number, so that all are drawn at once and the values are
    the same on any number of threads and for any device. A billion of them would take one thread 5 s, and torch's own
    initial values, which nobody needs, as long again.
    """
    with torch.device("meta"):
        drafter = Drafter(spec)
    tensors = {name: torch.empty(parameter.shape) for name, parameter in drafter.named_parameters()}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]

    def draw(number: int) -> None:
        state = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        matrices[number].normal_(0, std, generator=torch.Generator().manual_seed(state))

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, range(len(matrices))))
    drafter.load_state_dict(tensors, assign=True)
    return drafter


def holding(spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> Drafter:
    """A drafter to look at, whose parameters are these very tensors, of whatever dtype: nothing is drawn, cast or
    copied.

    Raises RuntimeError where a name or a shape is not the drafter's.
    """
    with torch.device("meta"):
        drafter = Drafter(spec)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.eval().requires_grad_(False)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding over the first `rotary` dimensions of each head, halves convention. x [R, L, heads, D]."""
    cos, sin = rope
    rotary = cos.shape[-1]
    turned, rest = x[..., :rotary].float(), x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)


def rope_frequencies(spec: DrafterSpec) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [rotary/2], scale on cos and sin) of the spec's own rope_parameters."""
    parameters: dict[str, Any] = spec.rope_parameters
    if parameters["rope_type"] == "default":
        rotary = int(spec.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, rotary, 2, dtype=torch.int64).float() / rotary
        return 1.0 / parameters["rope_theta"] ** exponent, 1.0
    # Not above: transformers reads 1,700 files when it is imported, and a drafter without a target needs none of them.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_attention_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(parameters),
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return inv_freq.float(), float(scale)
