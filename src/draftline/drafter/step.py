"""One micro-batch through the drafter: blocks, forward, loss, backward. Sums only; `train` divides them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftline.config import Products
from draftline.drafter.anchors import Blocks, SlotTargets, copy_together, sample_blocks, slot_targets, teacher_position
from draftline.drafter.attention import DenseAttention
from draftline.drafter.cost import RowWork
from draftline.drafter.head_rows import head_rows
from draftline.drafter.losses import LossKind, SlotOutcome, head_loss
from draftline.drafter.model import Drafter
from draftline.monitor.phases import PhaseClock
from draftline.records import FeatureBatch, Head, PackedBatch

if TYPE_CHECKING:
    from draftline.drafter.fused import FusedDrafter


@dataclass(frozen=True)
class MicroStep:
    """Sums over one micro-batch, on its device; nothing here has been divided by anything."""

    loss_sum: Tensor
    weight_sum: Tensor
    committed: Tensor  # tokens committed and
    verify_steps: Tensor  # steps taken by decoding's walk over the sampled anchors; their quotient is proxy tau
    blocks: Tensor
    slot_correct: Tensor  # [K]
    slot_count: Tensor  # [K]

    def __add__(self, other: MicroStep) -> MicroStep:
        return MicroStep(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    @staticmethod
    def zero(slots: int, device: torch.device) -> MicroStep:
        """The sums over no micro-batch; K = `slots`."""
        single, per_slot = torch.zeros((), device=device), torch.zeros(slots, device=device)
        return MicroStep(single, single, single, single, single, per_slot, per_slot)

    def values(self) -> tuple[Tensor, ...]:
        return (
            self.loss_sum, self.weight_sum, self.committed, self.verify_steps, self.blocks, self.slot_correct,
            self.slot_count,
        )  # fmt: skip


class DrafterStep:
    """The drafter and the two frozen pieces that it borrows from its target: `embed`, from ids [...] to what the
    target's first layer receives [..., d], and the head.

    On CUDA the written-out step of `fused.py` runs, elsewhere the plain model under autograd: the reference.
    products: `train.products`; FP8 ones exist on CUDA alone (`products.py` refuses them elsewhere).
    """

    def __init__(
        self, drafter: Drafter, embed: Callable[[Tensor], Tensor], head: Head, loss: LossKind, anchors: int, seed: int,
        products: Products = "plain",
    ) -> None:  # fmt: skip
        self.drafter = drafter
        self.embed = embed
        self.head = head
        self.loss = loss
        self.anchors = anchors
        self.seed = seed
        self.products: Products = products
        self.fused = fused_drafter(drafter, head.weight.dtype, products) if head.weight.is_cuda else None
        self.clock = PhaseClock(head.weight.device)

    def with_plain_products(self) -> DrafterStep:
        """This step, or where its products are FP8 one of the same drafter with products in its features' dtype."""
        if self.fused is None or self.products == "plain":
            return self
        plain = copy.copy(self)
        plain.products, plain.fused = "plain", fused_drafter(self.drafter, self.head.weight.dtype, "plain")
        return plain

    def forward_backward(self, batch: FeatureBatch) -> MicroStep:
        """Adds the gradient of the *undivided* loss sum to the parameters' grads."""
        with self.clock.phase("forward", batch.packed.index):
            blocks = sample_blocks(batch.packed, self.anchors, self.seed)
            if self.fused is not None:
                return self.fused_pass(batch, place(batch, blocks, self.drafter.spec.block_size), self.fused)
            loss_sum, micro = self.forward(batch, blocks)
        with self.clock.phase("backward", batch.packed.index):
            loss_sum.backward()
        return micro

    def measure(self, batch: FeatureBatch) -> MicroStep:
        """The sums of a micro-batch, and no gradient."""
        with torch.no_grad():
            return self.forward(batch, sample_blocks(batch.packed, self.anchors, self.seed))[1]

    def forward(self, batch: FeatureBatch, blocks: Blocks) -> tuple[Tensor, MicroStep]:
        """(undivided loss sum, the step's sums) of blocks on the host; differentiable where the plain model runs."""
        placed = place(batch, blocks, self.drafter.spec.block_size)
        hidden = self.hidden(batch.taps, placed.ids, placed.position, placed.blocks)  # [R, N, B, d]
        loss_sum, weight_sum, outcome = head_loss(
            hidden[:, :, 1:].flatten(0, 1), self.head, placed.slots.label.flatten(0, 1),
            placed.slots.supervised.flatten(0, 1), self.teacher(batch, placed), self.loss,
        )  # fmt: skip
        return loss_sum, placed.tally(loss_sum.detach(), weight_sum, outcome)

    def fused_pass(self, batch: FeatureBatch, placed: Placed, fused: FusedDrafter) -> MicroStep:
        from draftline.drafter.fused_loss import head_loss_and_gradient  # needs Triton

        where = fused.place(placed.blocks, placed.position)
        final = captured(batch.final).flatten(0, 1) if self.loss.needs_final else None
        rows = head_rows(
            placed.host_slots, placed.ids.shape[1], len(self.head.weight), final is not None, placed.ids.device
        )
        embeds = self.slot_embeds(placed.ids, placed.blocks, batch.taps.dtype)
        hidden, tape = fused.forward(embeds.flatten(0, 2), batch.taps.flatten(0, 1), where)
        done = head_loss_and_gradient(
            hidden.unflatten(0, (-1, self.drafter.spec.block_size)), self.head, placed.slots.label.flatten(0, 1),
            placed.slots.supervised.flatten(0, 1), final, rows, self.loss,
        )  # fmt: skip
        with self.clock.phase("backward", batch.packed.index):
            fused.backward(done.hidden.flatten(0, 1), tape, where)
        return placed.tally(done.loss_sum, done.weight_sum, done.outcome)

    def work(self, packed: PackedBatch) -> RowWork:
        """What a forward and backward of this batch has to do, of a row: for drafter.cost."""
        rows, length = packed.ids.shape
        blocks = sample_blocks(packed, self.anchors, self.seed)
        slots = host_slots(packed, blocks, self.drafter.spec.block_size)
        context = (blocks.anchor - blocks.start)[blocks.keep].double()
        supervised = int(slots.supervised.sum())
        compared = 0
        if self.loss.needs_final:
            compared = len(teacher_position(slots, length)[slots.supervised.flatten(0, 1)].unique())
        mean_context = float(context.mean()) if len(context) else 0.0
        return RowWork(length, self.anchors, mean_context, supervised / rows, compared / rows)

    def teacher(self, batch: FeatureBatch, placed: Placed) -> Tensor | None:
        return gather_teacher(batch.final, placed.slots) if self.loss.needs_final else None

    def hidden(self, taps: Tensor, ids: Tensor, position: Tensor, blocks: Blocks) -> Tensor:
        """Final-normed states of every slot of every block, [R, N, B, d]. taps [R, S, K*d], ids and position [R, S]."""
        size = self.drafter.spec.block_size
        embeds = self.slot_embeds(ids, blocks, taps.dtype)
        if self.fused is not None:
            z, _ = self.fused.forward(embeds.flatten(0, 2), taps.flatten(0, 1), self.fused.place(blocks, position))
            return z.view_as(embeds)
        attend = DenseAttention(self.drafter.spec, blocks, ids.shape[1])
        offset = torch.arange(size, device=ids.device)
        block_position = position.gather(1, blocks.anchor)[..., None] + offset
        z = self.drafter(embeds.flatten(1, 2), block_position.flatten(1), self.drafter.context(taps), position, attend)
        return z.unflatten(1, (-1, size))

    @torch.no_grad()
    def slot_embeds(self, ids: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
        """[R, N, B, d]: the anchor's embedding in slot 0, the mask token's in every other slot."""
        spec = self.drafter.spec
        anchor_ids = ids.gather(1, blocks.anchor)
        mask = torch.full((1,), spec.mask_token_id, dtype=ids.dtype, device=ids.device)
        first, rest = self.embed(anchor_ids), self.embed(mask)[0]
        embeds = torch.cat([first[..., None, :], rest.expand(*anchor_ids.shape, spec.block_size - 1, -1)], dim=-2)
        return embeds.to(dtype)


def fused_drafter(drafter: Drafter, dtype: torch.dtype, products: Products) -> FusedDrafter:
    from draftline.drafter.fused import FusedDrafter  # needs Triton, which only CUDA builds of torch bring

    return FusedDrafter(drafter, dtype, products)


@dataclass(frozen=True)
class Placed:
    """A micro-batch's tokens and blocks on the device of its features."""

    ids: Tensor  # int64 [R, S]
    mask: Tensor  # bool [R, S]
    document: Tensor  # int64 [R, S]
    position: Tensor  # int64 [R, S]
    blocks: Blocks
    slots: SlotTargets
    host_slots: SlotTargets  # the same on the host, which knows without waiting which slots carry weight

    def tally(self, loss_sum: Tensor, weight_sum: Tensor, outcome: SlotOutcome) -> MicroStep:
        return tally(loss_sum, weight_sum, outcome, self.blocks, eligible_rank(self.mask, self.document))


def host_slots(packed: PackedBatch, blocks: Blocks, block_size: int) -> SlotTargets:
    ids, mask, document = (torch.from_numpy(part) for part in (packed.ids, packed.loss_mask, packed.document))
    return slot_targets(ids, mask, document, blocks, block_size)


def place(batch: FeatureBatch, blocks: Blocks, block_size: int) -> Placed:
    """All in one copy from the host, which does not wait for the device. blocks: on the host."""
    packed, device = batch.packed, batch.taps.device
    slots = host_slots(packed, blocks, block_size)
    on_host = (blocks.anchor, blocks.start, blocks.keep, slots.position, slots.label, slots.supervised)
    parts = (packed.ids, packed.loss_mask, packed.document, packed.position, *(part.numpy() for part in on_host))
    ids, mask, document, position, anchor, start, keep, at, label, supervised = copy_together(parts, device)
    there = SlotTargets(at, label, supervised.bool())
    return Placed(ids, mask.bool(), document, position, Blocks(anchor, start, keep.bool()), there, slots)


def captured(final: Tensor | None) -> Tensor:
    if final is None:
        raise ValueError("this loss needs the target's final states, but the capture did not keep them")
    return final


def gather_teacher(final: Tensor | None, slots: SlotTargets) -> Tensor:
    """The target's final-normed states at a+k-1, which give its distribution of token a+k. [R*N, K, d]"""
    states = captured(final)
    return states.flatten(0, 1)[teacher_position(slots, states.shape[1])]


def tally(loss_sum: Tensor, weight_sum: Tensor, outcome: SlotOutcome, blocks: Blocks, rank: Tensor) -> MicroStep:
    """The sums behind loss, proxy tau and slot accuracy. outcome bool [R*N, K], rank as in `walk`."""
    hit = outcome.correct & outcome.supervised
    matched, known = hit.long().cumprod(-1).sum(-1), outcome.supervised.sum(-1)
    ends = (matched == known) & (known < hit.shape[-1])  # the answer ends inside the block: no bonus token follows
    length = (matched + ~ends).clamp(min=1).view_as(blocks.anchor)  # padded blocks too: a step commits a token
    committed, verify_steps = walk(blocks, length, rank)
    kept = blocks.keep.sum()
    return MicroStep(loss_sum, weight_sum, committed, verify_steps, kept, hit.sum(0), outcome.supervised.sum(0))


def walk(blocks: Blocks, length: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens committed, verification steps) of decoding's walk over the sampled anchors of each row.

    length [R, N]: tokens committed from each anchor (matched prefix and bonus); rank [R, S+1]: eligible anchors before
    each position. From anchor a the walk goes on at the first sampled anchor from a + length on. With every eligible
    anchor sampled this is decoding itself, and committed / steps is tau. Otherwise anchors are passed over that
    decoding may have stopped at: half of them are counted, at the rate of the anchor after them. Counting none or all
    gave 3.83 and 3.31 for a SmolLM2 drafter of tau 3.47 with 45% of its anchors sampled; a plain mean over blocks gave
    5.07, because decoding leaps over the easy stretches that sampling lingers in.
    """
    stops, following = marked_stops(blocks, length)
    last = rank.shape[1] - 1
    landing = rank.gather(1, (blocks.anchor + length).clamp(max=last))
    reached = rank.gather(1, blocks.anchor)
    pad = reached.new_zeros((len(reached), 1))
    has_next = torch.cat([blocks.keep, pad.bool()], 1).gather(1, following)
    next_rank, next_length = torch.cat([reached, pad], 1).gather(1, following), torch.cat([length, pad + 1], 1)
    skipped = torch.where(stops & has_next, next_rank - landing, 0)
    skipped_steps = skipped / next_length.gather(1, following)
    before = torch.where(blocks.keep[:, 0], reached[:, 0], 0)  # eligible anchors before the first sampled one
    tokens = (length * stops).sum() + 0.5 * (skipped.sum() + before.sum())
    steps = stops.sum() + 0.5 * (skipped_steps.sum() + (before / length[:, 0]).sum())
    return tokens, steps


def marked_stops(blocks: Blocks, length: Tensor) -> tuple[Tensor, Tensor]:
    """(anchors that the walk stops at, bool [R, N]; number of the anchor after each, N past the end, int64 [R, N]).

    Pointer doubling: after t rounds the first 2^t stops of each row are marked.
    """
    rows, count = blocks.anchor.shape
    place = torch.where(blocks.keep, blocks.anchor, torch.iinfo(torch.int64).max // 2)
    following = torch.searchsorted(place, place + length)
    jump = torch.cat([following, following.new_full((rows, 1), count)], dim=1)
    marked = torch.zeros_like(jump)
    marked[:, 0] = 1
    for _ in range(count.bit_length()):
        marked = marked.scatter_reduce(1, jump, marked, "amax")
        jump = jump.gather(1, jump)
    return marked[:, :count].bool() & blocks.keep, following


def eligible_rank(mask: Tensor, document: Tensor) -> Tensor:
    """int64 [R, S+1]: how many eligible anchors (SPEC 4) stand before each position."""
    inside = mask[:, :-1] & mask[:, 1:] & (document[:, :-1] == document[:, 1:]) & (document[:, :-1] >= 0)
    count = inside.long().cumsum(1)
    return torch.cat([count.new_zeros((len(count), 1)), count, count[:, -1:]], dim=1)
