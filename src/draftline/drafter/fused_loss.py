"""The target's frozen head and the loss on it for the CUDA step: chunk by chunk, gradient in place of the logits.

Weights are linear in the gradient, so they are applied to the gradient of the states, at the end: D-PACE needs the
cross entropies of whole blocks, and chunks need not hold whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.drafter.anchors import exponential_weights
from draftline.drafter.head_rows import Chunk, HeadRows, chunk_rows
from draftline.drafter.losses import LossKind, SlotOutcome
from draftline.kernels.loss import LogitShape, SlotLosses, Teacher, dpace, spread, teacher_of, turn_into_gradient
from draftline.records import Head


@dataclass(frozen=True)
class HeadGradient:
    """loss_sum and weight_sum are undivided; hidden is the gradient of the head's input [M, B, d], 0 in slot 0."""

    loss_sum: Tensor
    weight_sum: Tensor
    outcome: SlotOutcome
    hidden: Tensor


@torch.no_grad()
def head_loss_and_gradient(
    hidden: Tensor, head: Head, label: Tensor, supervised: Tensor, final: Tensor | None, rows: HeadRows,
    kind: LossKind,
) -> HeadGradient:  # fmt: skip
    """As losses.head_loss, with its gradient; `correct` is False in slots without weight.

    hidden [M, B, d] dense; label int64 and supervised bool [M, K]; final [R*S, d]: the target's final-normed states, or
    None for ce; rows: the same slots as `supervised`, and where each finds its target's state.
    """
    found = SlotLosses.zero(label)
    states = unweighted_gradient(hidden, head, label, final, rows, kind, found)
    weight = (
        dpace(found.entropy, supervised, kind.alpha)
        if kind.weights == "dpace"
        else exponential_weights(supervised, kind.gamma or 0.0)
    )
    gradient = spread(states, weight, supervised)
    return HeadGradient((found.loss * weight).sum(), weight.sum(), SlotOutcome(found.correct, supervised), gradient)


def unweighted_gradient(
    hidden: Tensor, head: Head, label: Tensor, final: Tensor | None, rows: HeadRows, kind: LossKind,
    found: SlotLosses,
) -> Tensor:  # fmt: skip
    """d loss / d states of the supervised slots [n, d]; their losses go to `found`.

    What it allocates has the same size in every step, whatever n is: an allocator never has to look for more.
    """
    shape = LogitShape(head.scale, head.soft_cap)
    states = hidden.new_empty((label.numel(), hidden.shape[-1]))[: len(rows.slot)]
    held = min(chunk_rows(len(head.weight)), label.numel())
    own, others = (hidden.new_empty((count, len(head.weight))) for count in (held, 0 if final is None else held))
    torch.index_select(hidden.flatten(0, 1), 0, rows.state, out=states)
    for chunk in rows.chunks:
        logits = product(head, states[chunk.rows], own)
        teacher = None if final is None else chunk_teacher(head, final, rows, chunk, others, shape)
        turn_into_gradient(logits, teacher, rows.slot[chunk.rows], label, kind.kind, shape, found)
        torch.mm(logits, head.weight, out=states[chunk.rows])  # in place of the states
    return states


def product(head: Head, states: Tensor, buffer: Tensor) -> Tensor:
    """head.product(states), into the first rows of `buffer`."""
    out = torch.mm(states, head.weight.t(), out=buffer[: len(states)])
    return out if head.bias is None else out.add_(head.bias)


def chunk_teacher(
    head: Head, final: Tensor, rows: HeadRows, chunk: Chunk, buffer: Tensor, shape: LogitShape
) -> Teacher:
    """The target's logits at each position once: neighbouring anchors share most of theirs."""
    logits = product(head, final[rows.position[chunk.positions]], buffer)
    return teacher_of(logits, rows.teacher[chunk.rows], shape)
