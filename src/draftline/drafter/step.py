"""One micro-batch through the drafter: blocks, forward, loss, backward. Sums only; `train` divides them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from draftline.drafter.anchors import Blocks, SlotTargets, sample_blocks, slot_targets, to_device
from draftline.drafter.attention import DenseAttention, FlexAttention
from draftline.drafter.losses import LossKind, SlotOutcome, chunk_loss, head_loss
from draftline.drafter.model import Drafter
from draftline.records import FeatureBatch


@dataclass(frozen=True)
class MicroStep:
    """Sums over one micro-batch, on its device; nothing here has been divided by anything."""

    loss_sum: Tensor
    weight_sum: Tensor
    steps_sum: Tensor  # sum over kept blocks of 1 / (matched prefix + 1): verification steps that a token costs there
    blocks: Tensor
    slot_correct: Tensor  # [K]
    slot_count: Tensor  # [K]

    def __add__(self, other: MicroStep) -> MicroStep:
        return MicroStep(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[Tensor, ...]:
        return (self.loss_sum, self.weight_sum, self.steps_sum, self.blocks, self.slot_correct, self.slot_count)


class DrafterStep:
    """The drafter and the two frozen pieces that it borrows from its target: `embedding` and the head weight [V, d]."""

    def __init__(
        self, drafter: Drafter, embedding: nn.Module, head: Tensor, loss: LossKind, anchors: int, seed: int
    ) -> None:
        self.drafter = drafter
        self.embedding = embedding
        self.head = head
        self.loss = loss
        self.anchors = anchors
        self.seed = seed
        self.chunk_loss = chunk_loss

    def compile(self) -> None:
        """Compile each layer (one graph for all layers of a kind) and the loss on a chunk of logits, for CUDA."""
        for layer in self.drafter.layers:
            layer.compile(fullgraph=True, dynamic=False)
        self.chunk_loss = torch.compile(chunk_loss, fullgraph=True, dynamic=False)

    def forward_backward(self, batch: FeatureBatch) -> MicroStep:
        """Adds the gradient of the *undivided* loss sum to the parameters' grads."""
        blocks = sample_blocks(batch.packed, self.anchors, self.seed)
        loss_sum, micro = self.forward(batch, blocks.to(batch.taps.device))
        loss_sum.backward()
        return micro

    def forward(self, batch: FeatureBatch, blocks: Blocks) -> tuple[Tensor, MicroStep]:
        packed = batch.packed
        stacked = np.stack([packed.ids, packed.loss_mask, packed.document, packed.position])  # one copy to the device
        ids, mask, document, position = to_device(torch.from_numpy(stacked), batch.taps.device)
        slots = slot_targets(ids, mask.bool(), document, blocks, self.drafter.spec.block_size)
        hidden = self.hidden(batch.taps, ids, position, blocks)  # [R, N, B, d]
        teacher = gather_teacher(batch.final, slots) if self.loss.needs_final else None
        loss_sum, weight_sum, outcome = head_loss(
            hidden[:, :, 1:].flatten(0, 1), self.head, slots.label.flatten(0, 1), slots.supervised.flatten(0, 1),
            teacher, self.loss, self.chunk_loss,
        )  # fmt: skip
        return loss_sum, tally(loss_sum.detach(), weight_sum, outcome, blocks.keep)

    def hidden(self, taps: Tensor, ids: Tensor, position: Tensor, blocks: Blocks) -> Tensor:
        """Final-normed states of every slot of every block, [R, N, B, d]. taps [R, S, K*d], ids and position [R, S]."""
        size = self.drafter.spec.block_size
        attention = FlexAttention if taps.is_cuda else DenseAttention
        attend = attention(self.drafter.spec, blocks, ids.shape[1])
        offset = torch.arange(size, device=ids.device)
        block_position = position.gather(1, blocks.anchor)[..., None] + offset
        embeds = self.block_embeds(ids.gather(1, blocks.anchor)).to(taps.dtype)
        c = self.drafter.context(taps)
        z = self.drafter(embeds.flatten(1, 2), block_position.flatten(1), c, position, attend)
        return z.unflatten(1, (-1, size))

    @torch.no_grad()
    def block_embeds(self, anchor_ids: Tensor) -> Tensor:
        """[..., B, d]: the anchor's embedding in slot 0, the mask token's in every other slot."""
        spec = self.drafter.spec
        mask = torch.full((1,), spec.mask_token_id, dtype=anchor_ids.dtype, device=anchor_ids.device)
        first, rest = self.embedding(anchor_ids), self.embedding(mask)[0]
        return torch.cat([first[..., None, :], rest.expand(*anchor_ids.shape, spec.block_size - 1, -1)], dim=-2)


def gather_teacher(final: Tensor | None, slots: SlotTargets) -> Tensor:
    """The target's final-normed states at a+k-1, which give its distribution of token a+k. [R*N, K, d]"""
    if final is None:
        raise ValueError("this loss needs the target's final states, but the capture did not keep them")
    index = (slots.position - 1).clamp(min=0).flatten(1)
    rows = torch.arange(final.shape[0], device=final.device)[:, None]
    return final[rows, index].unflatten(1, slots.position.shape[1:]).flatten(0, 1)


def tally(loss_sum: Tensor, weight_sum: Tensor, outcome: SlotOutcome, keep: Tensor) -> MicroStep:
    """The sums behind loss, proxy tau and slot accuracy. outcome bool [M, K], keep [R, N].

    Proxy tau is the harmonic mean of (matched prefix + 1) over blocks. Anchors are drawn evenly over tokens, while
    decoding stops at one token in every (matched prefix + 1): a plain mean over tokens counts easy stretches too often.
    """
    hit = outcome.correct & outcome.supervised
    length = hit.long().cumprod(-1).sum(-1) + 1
    kept = keep.flatten()
    return MicroStep(loss_sum, weight_sum, (kept / length).sum(), kept.sum(), hit.sum(0), outcome.supervised.sum(0))
