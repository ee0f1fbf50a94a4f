"""DFlash drafting and greedy verification from their definition (SPEC 2, 3 and 6), densely and without any cache.

The independent reference for what a serving engine does with an exported folder. Everything is recomputed in float64
at every step, so a fault in a cache, a position or a mask on either side shows as different counts.

vLLM's float32 kernels on a CPU were seen to turn a decision with a logit gap of 0.013, so a prompt on which a draft
hangs on less than `SMALLEST_GAP` compares nothing and is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from draftline.records import DrafterSpec

SMALLEST_GAP = 0.03


@dataclass
class Counts:
    answers: list[list[int]]
    drafts: int
    accepted_per_slot: list[int]

    def add(self, other: "Counts") -> None:
        self.answers += other.answers
        self.drafts += other.drafts
        pairs = zip(self.accepted_per_slot, other.accepted_per_slot, strict=True)
        self.accepted_per_slot = [a + b for a, b in pairs]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE on [T, heads, head_dim], halves paired."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions.to(x.dtype)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@dataclass
class DenseDrafter:
    spec: DrafterSpec
    weights: dict[str, Tensor]
    embedding: Tensor  # [V, d]
    head: Tensor  # [V, d]

    def draft(self, taps: Tensor, anchor_id: int) -> tuple[list[int], list[float]]:
        """The B-1 drafted tokens after an anchor, and by how much each leads the next best in logits.

        taps: [a, K*d], the features of all positions before the anchor.
        """
        w, spec = self.weights, self.spec
        context = rms_norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], spec.rms_norm_eps)
        z = self.embedding[[anchor_id] + [spec.mask_token_id] * (spec.block_size - 1)]
        for layer in range(spec.num_hidden_layers):
            z = self.layer(layer, z, context)
        logits = rms_norm(z, w["norm.weight"], spec.rms_norm_eps) @ self.head.T
        best = logits[1:].topk(2, -1)
        gaps = best.values[:, 0] - best.values[:, 1]
        return [int(i) for i in best.indices[:, 0]], [float(gap) for gap in gaps]

    def layer(self, i: int, z: Tensor, context: Tensor) -> Tensor:
        eps = self.spec.rms_norm_eps
        w = {k.removeprefix(f"layers.{i}."): v for k, v in self.weights.items() if k.startswith(f"layers.{i}.")}
        u = rms_norm(z, w["input_layernorm.weight"], eps)
        z = z + self.attention(i, w, u, context) @ w["self_attn.o_proj.weight"].T
        u = rms_norm(z, w["post_attention_layernorm.weight"], eps)
        gated = silu(u @ w["mlp.gate_proj.weight"].T) * (u @ w["mlp.up_proj.weight"].T)
        return z + gated @ w["mlp.down_proj.weight"].T

    def attention(self, i: int, w: dict[str, Tensor], u: Tensor, context: Tensor) -> Tensor:
        spec, a, both = self.spec, len(context), torch.cat([context, u])
        positions, theta = torch.arange(len(both)), spec.rope_parameters["rope_theta"]

        def heads(x: Tensor, name: str) -> Tensor:
            return (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, spec.head_dim)

        q = rms_norm(heads(u, "q"), w["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = rms_norm(heads(both, "k"), w["self_attn.k_norm.weight"], spec.rms_norm_eps)
        q, k = rotate(q, positions[a:], theta), rotate(k, positions, theta)
        groups = spec.num_attention_heads // spec.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), heads(both, "v").repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        scores = scores.masked_fill(~self.visible(i, a, len(u)), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(u), -1)

    def visible(self, i: int, a: int, block: int) -> Tensor:
        """[B, a+B]: whether slot j at position a+j sees each position (SPEC 3)."""
        seen = torch.ones(block, a + block, dtype=torch.bool)
        for j in range(block):
            for p in range(a + block):
                window, inside = self.spec.window(i), p >= a
                if inside:
                    seen[j, p] = p <= a + j or not self.spec.causal(i)
                elif window is not None:
                    seen[j, p] = p > a + j - window
        return seen


@torch.no_grad()
def speculate(target: PreTrainedModel, drafter: DenseDrafter, prompt: list[int], limit: int) -> Counts | None:
    """Greedy speculative decoding of one prompt up to `limit` tokens; the last step counts in full, as vLLM's does.

    None when an accepted or first rejected token leads the next best by less than SMALLEST_GAP.
    """
    slots = drafter.spec.block_size - 1
    counts = Counts([], 0, [0] * slots)
    ids = [*prompt, next_ids(target, prompt)[-1]]  # the first token comes from prefill
    while len(ids) - len(prompt) < limit:
        draft, gaps = drafter.draft(read_taps(target, ids[:-1], drafter.spec.target_layer_ids), ids[-1])
        verdict = next_ids(target, ids + draft)[len(ids) - 1 :]
        accepted = next((k for k in range(slots) if draft[k] != verdict[k]), slots)
        if min(gaps[: accepted + 1]) < SMALLEST_GAP:
            return None
        ids += draft[:accepted] + [verdict[accepted]]
        counts.add(Counts([], 1, [int(k < accepted) for k in range(slots)]))
    counts.answers.append(ids[len(prompt) :][:limit])
    return counts


def next_ids(target: PreTrainedModel, ids: list[int]) -> list[int]:
    """The target's greedy next token after every position."""
    return [int(i) for i in target(torch.tensor([ids])).logits[0].argmax(-1)]


def read_taps(target: PreTrainedModel, ids: list[int], taps: tuple[int, ...]) -> Tensor:
    """[len(ids), K*d]. Entry l+1 of `hidden_states` is the output of layer l, except for the last, which is normed."""
    states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert taps[-1] + 1 < len(states) - 1
    return torch.cat([states[tap + 1][0] for tap in taps], -1)
