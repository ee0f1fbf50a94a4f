"""Training attention (SPEC 3): every block sees its document's context before its anchor, and its own slots.

`DenseAttention` is the plain reference and the CPU path. `FlexAttention` is the CUDA path: one fused call per layer
whose block mask comes straight from the anchors, with no Q x KV grid and no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import lcm

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftline.drafter.anchors import Blocks
from draftline.drafter.model import LayerAttend
from draftline.records import DrafterSpec

TILE = 128  # FlexAttention's mask granularity, queries and keys


class DenseAttention:
    """softmax over [visible context ; own block], in float32 or the inputs' wider dtype. Memory R H N B (S + B)."""

    def __init__(self, spec: DrafterSpec, blocks: Blocks, context_length: int) -> None:
        self.spec = spec
        offset = torch.arange(spec.block_size, device=blocks.anchor.device)
        p = torch.arange(context_length, device=blocks.anchor.device)
        before = (p < blocks.anchor[..., None]) & (p >= blocks.start[..., None]) & blocks.keep[..., None]  # [R, N, S]
        self.context_mask = before[:, :, None, :]  # [R, N, 1, S]
        self.slot_position = blocks.anchor[..., None] + offset  # [R, N, B]
        self.p = p
        # Added to scores rather than filled into them: no copy in the forward, nothing at all in the backward.
        windows = {spec.window(layer) for layer in range(spec.num_hidden_layers)}
        self.context_bias = {window: additive(self.visible_context(window)) for window in windows}
        self.causal_bias = additive(offset[:, None] >= offset[None, :])  # [B, B] slot i sees slot k <= i

    def layer(self, index: int) -> LayerAttend:
        return partial(self.attend, index)

    def attend(
        self, layer: int, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        spec = self.spec
        shape = (-1, spec.block_size)
        group = spec.num_attention_heads // spec.num_key_value_heads
        qb = (q * spec.head_dim**-0.5).unflatten(1, shape).unflatten(3, (-1, group))  # [R, N, B, kv, group, D]
        kb, vb = k_block.unflatten(1, shape), v_block.unflatten(1, shape)  # [R, N, B, kv, D]
        context = torch.einsum("rnbkgd,rskd->rkgnbs", qb, k_context).float()
        block = torch.einsum("rnbkgd,rnckd->rkgnbc", qb, kb).float()
        context = context + self.context_bias[spec.window(layer)][:, None, None]
        if spec.causal(layer):
            block = block + self.causal_bias
        weights = torch.cat([context, block], dim=-1).softmax(-1).to(q.dtype)
        on_context, on_block = weights.split([context.shape[-1], spec.block_size], dim=-1)
        out = torch.einsum("rkgnbs,rskd->rnbkgd", on_context, v_context)
        out = out + torch.einsum("rkgnbc,rnckd->rnbkgd", on_block, vb)
        return out.flatten(3, 4).flatten(1, 2)

    def visible_context(self, window: int | None) -> Tensor:
        """bool [R, N, B, S], or [R, N, 1, S] where all slots of a block see the same context."""
        if window is None:
            return self.context_mask
        return self.context_mask & (self.p > self.slot_position[..., None] - window)


def additive(visible: Tensor) -> Tensor:
    """0 where visible, -inf elsewhere: float32."""
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))


def anchors_per_tile_multiple(block_size: int) -> int:
    """The number of blocks per row must be a multiple of this for FlexAttention: whole tiles of queries."""
    return lcm(TILE, block_size) // block_size


class FlexAttention:
    """One fused flex_attention over the keys [context ; all blocks], called inside the compiled layer.

    Needs S and N*B to be multiples of TILE. The masks are built once per micro-batch and serve every layer.
    """

    def __init__(self, spec: DrafterSpec, blocks: Blocks, context_length: int) -> None:
        self.layers = tuple((spec.window(i), spec.causal(i)) for i in range(spec.num_hidden_layers))
        self.masks = {
            kind: flex_block_mask(blocks, context_length, spec.block_size, window=kind[0], causal=kind[1])
            for kind in set(self.layers)
        }

    def layer(self, index: int) -> LayerAttend:
        return FusedLayer(self.masks[self.layers[index]])


@dataclass(frozen=True)
class FusedLayer:
    """Carries a mask and no layer number, so that layers of one kind share one compiled graph."""

    mask: BlockMask

    def __call__(self, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor) -> Tensor:
        k = torch.cat([k_context, k_block], dim=1).transpose(1, 2)
        v = torch.cat([v_context, v_block], dim=1).transpose(1, 2)
        out = flex_attention(q.transpose(1, 2), k, v, block_mask=self.mask, enable_gqa=True)
        return out.transpose(1, 2)


def flex_block_mask(
    blocks: Blocks, context_length: int, block_size: int, window: int | None, causal: bool
) -> BlockMask:
    """BlockMask of a micro-batch from anchors alone: per tile of queries, the range of key tiles it can see.

    A context tile is full where every block of the query tile sees all of it, partial where any block sees some of
    it; the tiles that hold the queries' own blocks are partial. Cost: a [R, Q/128, KV/128] grid of tiles.
    """
    rows, count = blocks.anchor.shape
    slots = count * block_size
    first = torch.where(blocks.keep, blocks.start, context_length)  # a dead block sees no context
    last = torch.where(blocks.keep, blocks.anchor, 0)
    slot_block = torch.arange(slots, device=first.device) // block_size
    slot_offset = torch.arange(slots, device=first.device) % block_size
    low = first[:, slot_block]  # [R, Q] first visible context position of every query
    high = last[:, slot_block]  # [R, Q] one past the last
    if window is not None:
        low = torch.maximum(low, high + slot_offset - window + 1)
    partial, full = visible_tiles(low, high, context_length, slot_block)
    anchors_low, anchors_high = low, high

    def mask_mod(b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = kv - context_length
        in_context = (kv >= anchors_low[b, q]) & (kv < anchors_high[b, q]) & (own < 0)
        in_block = (own >= 0) & (own // block_size == q // block_size)
        if causal:
            in_block = in_block & (own <= q)
        return in_context | in_block

    return BlockMask.from_kv_blocks(
        *tile_lists(partial), *tile_lists(full), BLOCK_SIZE=TILE, mask_mod=mask_mod,
        seq_lengths=(slots, context_length + slots),
    )  # fmt: skip


def visible_tiles(low: Tensor, high: Tensor, context_length: int, slot_block: Tensor) -> tuple[Tensor, Tensor]:
    """(partial, full) bool [R, Q/128, (S+Q)/128] from each query's visible context [low, high)."""
    low, high = low.unflatten(1, (-1, TILE)), high.unflatten(1, (-1, TILE))  # [R, Q/128, 128]
    tile = torch.arange(context_length // TILE, device=low.device) * TILE
    some = (tile < high.amax(-1, keepdim=True)) & (tile + TILE > low.amin(-1, keepdim=True))
    full = (tile >= low.amax(-1, keepdim=True)) & (tile + TILE <= high.amin(-1, keepdim=True))
    block_of_tile = slot_block.unflatten(0, (-1, TILE))
    first, last = block_of_tile[:, 0], block_of_tile[:, -1]
    own = (first[:, None] <= last[None, :]) & (last[:, None] >= first[None, :])  # tiles that share a block
    own = own.expand(low.shape[0], -1, -1)
    partial = torch.cat([some & ~full, own], dim=-1)
    return partial, torch.cat([full, torch.zeros_like(own)], dim=-1)


def tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [R, q, kv] -> (count int32 [R, 1, q], indices of the True tiles first, ascending, int32 [R, 1, q, kv])."""
    count = tiles.sum(-1, dtype=torch.int32)
    order = torch.argsort((~tiles).to(torch.int8), dim=-1, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
