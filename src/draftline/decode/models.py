"""The two models of speculative decoding, each with its key/value cache, batch 1 (SPEC 6)."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from draftline.drafter.model import Drafter, LayerAttend
from draftline.records import DrafterSpec
from draftline.target.capture import tapped
from draftline.target.load import Target


class CachedTarget:
    """The target over a growing prefix. `forward` appends tokens, `drop_last` takes unverified ones back.

    Keys and values are cropped. Layers with a state that forgets (linear attention, convolutions) cannot be: they are
    copied before each forward of several tokens, put back, and the target runs over the verified ones again. That
    costs one more forward for every step with a rejected draft, and changes neither text nor tau.
    """

    def __init__(self, target: Target, taps: tuple[int, ...] = ()) -> None:
        self.target = target
        self.taps = taps
        self.cache = DynamicCache(config=target.parts.config)
        # A sliding layer's own cache forgets what a roll-back brings back into the window, and refuses to be cropped
        # past it. Keeping all keys is safe: the target's mask still hides those outside.
        self.cache.layers = [
            DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self.cache.layers
        ]
        self.last_ids: list[int] = []  # of the last forward, and what forgetting layers held before it
        self.states_before: dict[int, Any] = {}
        parameters = signature(target.model.forward).parameters
        self.keyword = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24

    @torch.no_grad()
    def forward(self, ids: list[int], logits_for: int) -> tuple[Tensor, Tensor | None]:
        """(float32 logits of the last `logits_for` positions [n, V], taps of all positions [1, L, K*d] or None)."""
        self.remember(ids)
        tensor = torch.tensor([ids], device=self.target.device)
        outputs: dict[int, Tensor] = {}
        with tapped(self.target.parts.layers, self.taps, outputs.__setitem__):
            logits = self.target.model(
                input_ids=tensor, use_cache=True, logits_to_keep=logits_for, **{self.keyword: self.cache}
            ).logits
        device = self.target.device  # layers may lie on others
        taps = torch.cat([outputs[layer].to(device) for layer in self.taps], dim=-1) if self.taps else None
        return logits[0].to(device).float(), taps

    def remember(self, ids: list[int]) -> None:
        """Only a forward of several tokens can have some of them dropped."""
        self.last_ids, self.states_before = ids, {}
        if len(ids) > 1:
            self.states_before = {
                i: deepcopy(layer) for i, layer in enumerate(self.cache.layers) if type(layer) is not DynamicLayer
            }

    def drop_last(self, count: int) -> None:
        """Take back the last `count` tokens of the last forward."""
        if not count:  # older transformers read crop(0) as "keep nothing"
            return
        if not self.states_before:
            self.cache.crop(-count)
            return
        verified = self.last_ids[:-count]
        for i, layer in enumerate(self.cache.layers):
            if i in self.states_before:
                self.cache.layers[i] = self.states_before[i]
            elif isinstance(layer, DynamicLayer):
                layer.crop(-len(self.last_ids))
        if verified:
            self.forward(verified, logits_for=1)


class CachedAttend:
    """Attention of one block over all context features so far. Keys and values of the block are never kept."""

    def __init__(self, spec: DrafterSpec) -> None:
        self.spec = spec
        self.keys: list[Tensor | None] = [None] * spec.num_hidden_layers
        self.values: list[Tensor | None] = [None] * spec.num_hidden_layers

    def layer(self, index: int) -> LayerAttend:
        return partial(self.attend, index)

    def attend(
        self, layer: int, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor
    ) -> Tensor:
        self.keys[layer] = keys = grown(self.keys[layer], k_context)
        self.values[layer] = values = grown(self.values[layer], v_context)
        k = torch.cat([keys, k_block], dim=1).transpose(1, 2)
        v = torch.cat([values, v_block], dim=1).transpose(1, 2)
        mask = self.mask(layer, keys.shape[1], q.device)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def mask(self, layer: int, context_length: int, device: torch.device) -> Tensor | None:
        """bool [B, context + B], None where everything is visible. The anchor stands at `context_length`."""
        window, causal = self.spec.window(layer), self.spec.causal(layer)
        if window is None and not causal:
            return None
        slot = torch.arange(self.spec.block_size, device=device)
        position = torch.arange(context_length, device=device)
        context = torch.ones(len(slot), context_length, dtype=torch.bool, device=device)
        if window is not None:
            context = position > context_length + slot[:, None] - window
        block = slot[:, None] >= slot if causal else torch.ones(len(slot), len(slot), dtype=torch.bool, device=device)
        return torch.cat([context, block], dim=1)


def grown(cached: Tensor | None, new: Tensor) -> Tensor:
    return new if cached is None else torch.cat([cached, new], dim=1)


class CachedDrafter:
    """The drafter over the verified prefix. It is given the features of newly verified positions only."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        self.drafter = drafter
        self.target = target
        self.attend = CachedAttend(drafter.spec)
        self.verified = 0  # positions whose features the cache holds
        size = drafter.spec.block_size
        self.ids = torch.full((1, size), drafter.spec.mask_token_id, device=target.device)
        self.offset = torch.arange(size, device=target.device)[None]

    @torch.no_grad()
    def forward(self, anchor_id: int, new_taps: Tensor) -> Tensor:
        """float32 logits [B-1, V] of slots 1..B-1. new_taps [1, L, K*d]: features of the L tokens before the anchor."""
        context_position = torch.arange(self.verified, self.verified + new_taps.shape[1], device=new_taps.device)[None]
        self.verified += new_taps.shape[1]
        self.ids[0, 0] = anchor_id
        embeds = self.target.embed(self.ids).to(new_taps.dtype)
        c = self.drafter.context(new_taps)
        hidden = self.drafter(embeds, self.verified + self.offset, c, context_position, self.attend)
        return self.target.parts.head.logits(hidden[0, 1:]).float()
