"""An independent drafter, loss and walk, written from the method's description: float64, block by block, plain loops.

It shares no code with draftline beyond the names of tensors in a checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rope(x: Tensor, position: int, base: float, share: float) -> Tensor:
    """x [heads, D] at one position; only the first `share` of the D dimensions turns."""
    half = int(x.shape[-1] * share) // 2
    angles = torch.tensor([position * base ** (-2 * i / (2 * half)) for i in range(half)], dtype=x.dtype)
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], dim=-1)


def projected(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    y = x @ w[name + ".weight"].T
    return y + w[name + ".bias"] if name + ".bias" in w else y


def block_states(state: dict[str, Tensor], spec, taps: Tensor, embeds: Tensor) -> Tensor:
    """Final-normed states of one block [B, d].

    taps [a, K*d]: features of exactly the positions 0..a-1 of the block's document; embeds [B, d].
    """
    w = {name: value.double() for name, value in state.items()}
    heads, kv_heads, size, eps = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.rms_norm_eps
    base, share = spec.rope_parameters["rope_theta"], spec.rope_parameters.get("partial_rotary_factor", 1.0)
    taps, z = taps.double(), embeds.double()
    anchor, slots = taps.shape[0], embeds.shape[0]
    c = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    for i in range(spec.num_hidden_layers):
        name = f"layers.{i}."
        u = rms(z, w[name + "input_layernorm.weight"], eps)
        source = torch.cat([c, u])
        at = list(range(anchor)) + [anchor + j for j in range(slots)]
        q = projected(u, w, name + "self_attn.q_proj").view(slots, heads, size)
        k = projected(source, w, name + "self_attn.k_proj").view(len(at), kv_heads, size)
        v = projected(source, w, name + "self_attn.v_proj").view(len(at), kv_heads, size)
        q = rms(q, w[name + "self_attn.q_norm.weight"], eps)
        k = rms(k, w[name + "self_attn.k_norm.weight"], eps)
        q = torch.stack([rope(q[j], anchor + j, base, share) for j in range(slots)])
        k = torch.stack([rope(k[n], p, base, share) for n, p in enumerate(at)])
        out = torch.zeros(slots, heads, size, dtype=torch.float64)
        sliding = spec.layer_types[i] == "sliding_attention"
        causal = spec.is_causal if spec.is_causal is not None else sliding
        for j in range(slots):
            seen = []
            for n, p in enumerate(at):
                if n < anchor:
                    seen.append(not sliding or p > anchor + j - spec.sliding_window)
                else:
                    seen.append(not causal or n - anchor <= j)
            index = torch.tensor([n for n, yes in enumerate(seen) if yes])
            rows = []
            for h in range(heads):
                g = h // (heads // kv_heads)
                scores = (k[index, g] @ q[j, h]) / math.sqrt(size)
                rows.append(scores.softmax(0) @ v[index, g])
            out[j] = torch.stack(rows)
        z = z + projected(out.reshape(slots, -1), w, name + "self_attn.o_proj")
        u = rms(z, w[name + "post_attention_layernorm.weight"], eps)
        gate = u @ w[name + "mlp.gate_proj.weight"].T
        up = u @ w[name + "mlp.up_proj.weight"].T
        z = z + (gate * torch.sigmoid(gate) * up) @ w[name + "mlp.down_proj.weight"].T
    return rms(z, w["norm.weight"], eps)


def block_weights(loss_mask: list[int], anchor: int, size: int, gamma: float) -> list[float]:
    """Exponential weights of slots 1..B-1 for a document's mask; 0 past its end or the first unsupervised token."""
    weights, alive = [], True
    for k in range(1, size):
        alive = alive and anchor + k < len(loss_mask) and bool(loss_mask[anchor + k])
        weights.append(math.exp(-(k - 1) / gamma) if alive else 0.0)
    return weights


def dpace(cross_entropy: list[float], supervised: list[bool], alpha: float) -> list[float]:
    q = [((1 - alpha) * math.exp(-c) + alpha) if s else 1.0 for c, s in zip(cross_entropy, supervised, strict=True)]
    reach = [math.prod(q[: j + 1]) for j in range(len(q))]
    return [sum(reach[i] for i in range(j, len(q)) if supervised[i]) if supervised[j] else 0.0 for j in range(len(q))]


def walk_tau(answer: list[int], draft_at, block_size: int) -> float:
    """Tokens per step when the target's own greedy answer is walked: draft_at(n) drafts what follows answer[:n+1]."""
    at, steps = 0, 0
    while at < len(answer) - 1:
        drafts = draft_at(at)
        r = 0
        while r < block_size - 1 and at + r + 1 < len(answer) and drafts[r] == answer[at + r + 1]:
            r += 1
        at, steps = at + r + 1, steps + 1
    return (len(answer) - 1) / steps
