"""What the loss is told: labels, which slots count, and the teacher's logits, from the step's own preparation (SPEC
5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from draftline.drafter.anchors import Blocks, sample_blocks
from draftline.drafter.step import DrafterStep, place
from draftline.errors import InputError
from draftline.evaluate.proofs import logits_of
from draftline.records import FeatureBatch
from draftline.target.agreement import token_errors
from draftline.target.load import Target
from draftline.target.parts import LOGIT_TOLERANCE
from draftline.target.proofs import Document, OwnOutputs, judged

TEACHER_BLOCKS = 16  # whose teacher logits are compared


def prove_labels(
    target: Target, step: DrafterStep, batch: FeatureBatch, documents: Sequence[Document], own: Sequence[OwnOutputs]
) -> str:
    """Slot k of the block at a is told x_{a+k}, exactly where SPEC 5 supervises it, and the target's logits at a+k-1.

    The rule is written out here in plain Python, and the logits come from a forward of the target's own.
    """
    blocks = sample_blocks(batch.packed, step.anchors, step.seed)
    slots = list(rule(batch, blocks, step.drafter.spec.block_size))
    places = [found for found in map(locator(batch, documents), slots) if found is not None]
    wanted = sorted({slot.block for slot, _, _ in places})[:TEACHER_BLOCKS]
    placed = place(batch, blocks, step.drafter.spec.block_size)
    label, supervised = (values.flatten(0, 1).cpu() for values in (placed.slots.label, placed.slots.supervised))
    check_rule(label, supervised, slots)
    states = step.teacher(batch, placed)
    teacher = {} if states is None else {block: logits_of(target, states[block]) for block in wanted}
    if teacher:
        check_teacher(target, teacher, [found for found in places if found[0].block in teacher], own)
    if not places:
        return f"x_(a+k) in {len(slots):,} slots"
    shares = agreement(label, places, own)
    return f"x_(a+k) in {len(slots):,} slots; the target says the slot's own in {shares[1]:.0%}, neighbours' in " + (
        f"{shares[0]:.0%} and {shares[2]:.0%}"
    )


@dataclass(frozen=True)
class Slot:
    """A slot that must be supervised: block m of the batch, slot k, where its label stands, and the label."""

    block: int
    k: int
    row: int
    position: int
    label: int


def rule(batch: FeatureBatch, blocks: Blocks, block_size: int) -> Iterator[Slot]:
    packed, count = batch.packed, blocks.anchor.shape[1]
    for row, anchors in enumerate(blocks.anchor.tolist()):
        for n, anchor in enumerate(anchors):
            if not blocks.keep[row, n]:
                continue
            for k in range(1, block_size):
                at = anchor + k
                if at >= packed.ids.shape[1] or packed.document[row, at] != packed.document[row, anchor]:
                    break
                if not packed.loss_mask[row, at]:
                    break
                yield Slot(row * count + n, k - 1, row, at, int(packed.ids[row, at]))


def check_rule(label: Tensor, supervised: Tensor, slots: Sequence[Slot]) -> None:
    expected = torch.zeros_like(supervised)
    block, k = torch.tensor([slot.block for slot in slots]), torch.tensor([slot.k for slot in slots])
    expected[block, k] = True
    if not torch.equal(expected, supervised):
        wrong = (expected != supervised).nonzero()[0].tolist()
        raise InputError(
            f"block {wrong[0]}, slot {wrong[1] + 1}: expected {'a' if expected[tuple(wrong)] else 'no'} label, found "
            "the opposite",
            "likely a loss mask that is shifted, or slots that run past their document",
        )
    wanted = torch.tensor([slot.label for slot in slots])
    found = label[block, k]
    if not torch.equal(found, wanted):
        first = int((found != wanted).nonzero()[0])
        raise InputError(
            f"block {slots[first].block}, slot {slots[first].k + 1}: expected x_(a+k) = {int(wanted[first])} as label, "
            f"found {int(found[first])}; {int((found != wanted).sum())} of {len(slots)} labels differ",
            "likely labels that are shifted by one: a slot predicts the token at its own position, not the next one's",
        )


Place = tuple[Slot, int, int]  # the slot, the number of its document, and where in that the label stands


def locator(batch: FeatureBatch, documents: Sequence[Document]) -> Callable[[Slot], Place | None]:
    """slot -> its Place; None where its document is not among `documents`, or is cut there before the slot.

    A document of the batch is known by its first tokens, as many as `documents` holds of it: a causal target says the
    same of them whatever follows.
    """
    packed = batch.packed

    @cache
    def number_of(row: int, start: int) -> int | None:
        """Of the longest that begins here."""
        known = None
        for number, document in sorted(enumerate(documents), key=lambda pair: len(pair[1].ids)):
            here = slice(start, start + len(document.ids))
            within = len(set(packed.document[row, here].tolist())) == 1
            known = number if within and packed.ids[row, here].tolist() == document.ids else known
        return known

    def locate(slot: Slot) -> Place | None:
        inside = int(packed.position[slot.row, slot.position])
        number = number_of(slot.row, slot.position - inside)
        return None if number is None or inside > len(documents[number].ids) else (slot, number, inside)

    return locate


def check_teacher(
    target: Target, teacher: dict[int, Tensor], places: Sequence[Place], own: Sequence[OwnOutputs]
) -> None:
    """The teacher's logits of each slot against the target's own at the position before its label."""
    limit = LOGIT_TOLERANCE[target.dtype] * (1 if target.dtype == torch.float32 else 2)
    found = torch.stack([teacher[slot.block][slot.k] for slot, _, _ in places])

    def at(shift: int) -> Tensor:
        rows = [(own[n].logits, min(inside - 1 + shift, len(own[n].logits) - 1)) for _, n, inside in places]
        return torch.stack([logits[index] for logits, index in rows])

    error = judged(target, found, at(0))
    if not error <= limit:
        shifted = next((s for s in (-1, 1) if float(token_errors(found, at(s)).median()) <= limit), None)
        likely = "features of another model, or a logit scale or soft-cap that is not applied"
        if shifted is not None:
            likely = f"labels that are shifted by one: these are the logits at a+k{-1 + shifted:+d}".replace("+0", "")
        raise InputError(
            f"expected the teacher's logits to be the target's own at a+k-1 within {limit:g}, found a relative "
            f"difference of {error:.2g}",
            f"likely {likely}",
        )


def agreement(label: Tensor, places: Sequence[Place], own: Sequence[OwnOutputs]) -> list[float]:
    """How often the target's greedy token one position before, at, and one after a slot's is the slot's label.

    A figure for people: on the target's own greedy answers the middle one is 1. It decides nothing, since a target with
    random weights and a tied embedding says its input again.
    """
    greedy = [outputs.logits.argmax(-1).tolist() for outputs in own]
    hits = np.zeros(3)
    for slot, number, inside in places:
        for which, shift in enumerate((-1, 0, 1)):
            at = inside - 1 + shift
            hits[which] += 0 <= at < len(greedy[number]) and greedy[number][at] == int(label[slot.block, slot.k])
    return list((hits / max(1, len(places))).tolist())
