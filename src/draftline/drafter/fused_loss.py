"""The target's frozen head and the loss on it for the CUDA step: chunk by chunk, gradient in place of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.drafter.anchors import exponential_weights
from draftline.drafter.losses import LossKind, SlotOutcome
from draftline.kernels.loss import LogitShape, dpace, statistics, turn_into_gradient, variation
from draftline.records import Head

CHUNK_LOGITS = 160 * 1024 * 1024  # logits held at once, and as many of the target's where the loss compares them


@dataclass(frozen=True)
class HeadGradient:
    """loss_sum and weight_sum are undivided; hidden is the gradient of the head's input [M, B, d], 0 in slot 0."""

    loss_sum: Tensor
    weight_sum: Tensor
    outcome: SlotOutcome
    hidden: Tensor


@torch.no_grad()
def head_loss_and_gradient(
    hidden: Tensor, head: Head, label: Tensor, supervised: Tensor, teacher: Tensor | None, kind: LossKind,
    kept: Tensor,
) -> HeadGradient:  # fmt: skip
    """As losses.head_loss, with its gradient.

    hidden [M, B, d] dense; label int64 and supervised bool [M, K]; teacher [M, K, d] or None; kept int64:
    numbers of the blocks that weigh anything. The others are not multiplied with the head at all.
    """
    blocks, size, _ = hidden.shape
    slots = size - 1
    gradient = torch.zeros_like(hidden)
    loss = torch.zeros((blocks, slots), dtype=torch.float32, device=hidden.device)
    weights, correct = torch.zeros_like(loss), torch.zeros_like(supervised)
    limit = max(1, CHUNK_LOGITS // (slots * len(head.weight)))
    for chunk in kept.chunk(-(-len(kept) // limit)) if len(kept) else ():  # all alike in size
        rows = hidden[chunk, 1:].flatten(0, 1)
        logits = head.product(rows)
        teacher_logits = None if teacher is None else head.product(teacher[chunk].flatten(0, 1))
        part = chunk_gradient(logits, teacher_logits, label[chunk], supervised[chunk], kind, head)
        loss[chunk], weights[chunk], correct[chunk] = part
        gradient[chunk, 1:] = (logits @ head.weight).view(len(chunk), slots, -1)
    return HeadGradient(loss.sum(), weights.sum(), SlotOutcome(correct, supervised), gradient)


def chunk_gradient(
    logits: Tensor, teacher: Tensor | None, label: Tensor, supervised: Tensor, kind: LossKind, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted loss, weight, correct) [m, K]; logits [m*K, V], the head's products, become their
    own weighted gradient."""
    shape = LogitShape(head.scale, head.soft_cap)
    found = statistics(logits, teacher, shape)
    flat = label.flatten() if teacher is None else found.teacher_best.long()
    cross_entropy = (found.lse - head.shaped(logits.gather(1, flat[:, None])[:, 0].float())).view_as(label)
    weight = (
        dpace(cross_entropy, supervised, kind.alpha)
        if kind.weights == "dpace"
        else exponential_weights(supervised, kind.gamma or 0.0)
    )
    slope, name = None, "ce"
    loss = cross_entropy
    if teacher is not None and kind.kind in ("kl", "tv"):
        name = kind.kind
        loss = found.cross - found.teacher_lse + found.lse
        if name == "tv":
            loss, slope = variation(logits, teacher, found, shape)
    turn_into_gradient(logits, teacher, found, flat, slope, weight, name, shape)
    return torch.where(supervised, loss.view_as(label) * weight, 0.0), weight, (found.best == flat).view_as(label)
