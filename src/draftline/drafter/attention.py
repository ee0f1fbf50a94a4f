"""Training attention (SPEC 3): every block sees its document's context before its anchor, and its own slots.

`DenseAttention` is the plain reference and the CPU path; `kernels/attention.py` is the CUDA path.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from draftline.drafter.anchors import Blocks
from draftline.drafter.model import LayerAttend
from draftline.records import DrafterSpec


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
