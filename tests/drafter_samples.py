"""Random drafters, documents and features for tests of the training forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from builders import packed
from draftline.drafter.anchors import Blocks
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.records import DrafterSpec, FeatureBatch, Head
from reference import block_states

CE = LossKind("ce", "exponential", gamma=7.0, alpha=0.5)
SLIDING, FULL = "sliding_attention", "full_attention"
GEOMETRIES = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 3},
    "sliding, bidirectional": {"layer_types": (SLIDING, SLIDING), "sliding_window": 4, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "mixed, bidirectional": {"layer_types": (FULL, SLIDING), "sliding_window": 5, "is_causal": False},
    "one kv head": {"num_key_value_heads": 1},
    "four kv heads": {"num_key_value_heads": 4},
    "another rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 40.0}},
    "half rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5}},
    "biases": {"attention_bias": True},
    "one layer, one tap": {"num_hidden_layers": 1, "layer_types": (FULL,), "target_layer_ids": (1,)},
}


def make_spec(**changes) -> DrafterSpec:
    values = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 32, "block_size": 5, "mask_token_id": 4,
        "target_layer_ids": (0, 2, 3), "num_target_layers": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "max_position_embeddings": 256,
        "layer_types": (FULL, FULL),
    }  # fmt: skip
    return DrafterSpec(**(values | changes))


def random_drafter(spec: DrafterSpec, seed: int = 0) -> Drafter:
    """Every tensor random, norms and biases too, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(spec)
    for name, parameter in drafter.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if name.endswith("norm.weight") else 0.2 * noise
    return drafter


def make_step(spec: DrafterSpec, kind: LossKind = CE, anchors: int = 64, seed: int = 0) -> DrafterStep:
    generator = torch.Generator().manual_seed(seed + 1)
    embedding = nn.Embedding(spec.vocab_size, spec.hidden_size).requires_grad_(False)
    embedding.weight.data = torch.randn(embedding.weight.shape, generator=generator)
    head = 0.3 * torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
    return DrafterStep(random_drafter(spec, seed), embedding, Head(head), kind, anchors, seed)


def table_of(step: DrafterStep) -> Tensor:
    """The embedding [V, d] of a step of `make_step`."""
    assert isinstance(step.embed, nn.Embedding)
    return step.embed.weight


Document = tuple[list[int], list[int], Tensor, Tensor]  # ids, loss mask, taps [T, K*d], final [T, d]


def random_document(rng: np.random.Generator, spec: DrafterSpec, length: int, prompt: int) -> Document:
    def noise(width: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((length, width))).float()

    ids = rng.integers(5, spec.vocab_size, length).tolist()
    mask = [int(p >= prompt) for p in range(length)]
    return ids, mask, noise(len(spec.target_layer_ids) * spec.hidden_size), noise(spec.hidden_size)


def features(rows: list[list[Document]], length: int, index: int = 0) -> FeatureBatch:
    """Rows of documents laid out with their features; padding has features of no meaning, as from a store."""
    batch = packed([[(ids, mask) for ids, mask, _, _ in row] for row in rows], length, index)
    sample = rows[0][0]
    taps = torch.full((len(rows), length, sample[2].shape[1]), 0.7)
    final = torch.full((len(rows), length, sample[3].shape[1]), 0.7)
    for r, row in enumerate(rows):
        at = 0
        for ids, _, tap, state in row:
            taps[r, at : at + len(ids)], final[r, at : at + len(ids)] = tap, state
            at += len(ids)
    return FeatureBatch(batch, taps, final)


def blocks_at(batch: FeatureBatch, anchors: list[list[int]], keep: list[list[bool]] | None = None) -> Blocks:
    """Blocks at the given row positions, anchors of padded blocks 0."""
    anchor = torch.tensor(anchors)
    start = anchor - torch.from_numpy(batch.packed.position).gather(1, anchor)
    alive = torch.ones_like(anchor, dtype=torch.bool) if keep is None else torch.tensor(keep)
    return Blocks(anchor, start.masked_fill(~alive, 0), alive)


def hidden(step: DrafterStep, batch: FeatureBatch, blocks: Blocks) -> Tensor:
    """[R, N, B, d] without gradients."""
    ids, position = torch.from_numpy(batch.packed.ids), torch.from_numpy(batch.packed.position)
    with torch.no_grad():
        return step.hidden(batch.taps, ids, position, blocks)


def reference_states(step: DrafterStep, batch: FeatureBatch, blocks: Blocks, row: int, block: int) -> Tensor:
    """The independent float64 states [B, d] of one kept block."""
    anchor, start = int(blocks.anchor[row, block]), int(blocks.start[row, block])
    spec, table = step.drafter.spec, table_of(step)
    ids = [int(batch.packed.ids[row, anchor])] + [spec.mask_token_id] * (spec.block_size - 1)
    return block_states(step.drafter.state_dict(), spec, batch.taps[row, start:anchor], table[ids])
