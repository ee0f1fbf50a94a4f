"""The target's frozen head and the loss on it, chunk by chunk, with the gradient taken in the forward (SPEC 5).

Logits of all positions never exist at once: a chunk of whole blocks is multiplied with the head, its loss and its
gradient with respect to the hidden states are computed, and the logits are gone. The head has no weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftline.drafter.anchors import dpace_weights, exponential_weights
from draftline.drafter.cost import PLAIN_CHUNK_LOGITS, whole_chunks
from draftline.records import Head


@dataclass(frozen=True)
class LossKind:
    """Resolved from the recipe's loss section: kind, weights, gamma and alpha as config.LossSection describes them."""

    kind: str
    weights: str
    gamma: float | None  # given where the weights are exponential
    alpha: float

    @property
    def needs_final(self) -> bool:
        """Whether the target's own next-token state must be captured."""
        return self.kind != "ce"


@dataclass(frozen=True)
class SlotOutcome:
    """Per slot, detached: was the drafter's argmax the label, and which slots count. bool [M, K] each."""

    correct: Tensor
    supervised: Tensor


def head_loss(
    hidden: Tensor,
    head: Head,
    label: Tensor,
    supervised: Tensor,
    teacher: Tensor | None,
    kind: LossKind,
) -> tuple[Tensor, Tensor, SlotOutcome]:
    """(sum of weighted slot losses, sum of weights, outcome). The caller divides after summing over ranks (SPEC 5).

    hidden [M, K, d] final-normed states of slots 1..K of M blocks; head frozen; label int64 [M, K] data
    tokens; supervised bool [M, K]; teacher [M, K, d] the target's final-normed states at a+k-1, needed by all
    kinds but `ce`. Differentiable in `hidden`.
    """
    loss_sum, weight_sum, correct = _HeadLoss.apply(hidden, head, label, supervised, teacher, kind)
    return loss_sum, weight_sum, SlotOutcome(correct, supervised)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        label: Tensor,
        supervised: Tensor,
        teacher: Tensor | None,
        kind: LossKind,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks, slots, _ = hidden.shape
        chunk = whole_chunks(blocks, max(1, PLAIN_CHUNK_LOGITS // (slots * head.weight.shape[0])))
        loss_sum = torch.zeros((), device=hidden.device)
        weight_sum = torch.zeros((), device=hidden.device)
        correct = torch.empty_like(supervised)
        gradient = torch.empty_like(hidden)
        for begin in range(0, blocks, chunk):
            part = slice(begin, begin + chunk)
            logits = head.logits(hidden[part])
            teacher_logits = None if teacher is None else head.logits(teacher[part])
            loss, weight, hit, dlogits = chunk_loss(logits, teacher_logits, label[part], supervised[part], kind)
            loss_sum += loss
            weight_sum += weight
            correct[part] = hit
            dproduct = head.product_gradient(logits, dlogits)
            gradient[part] = (dproduct.flatten(0, 1) @ head.weight).view_as(gradient[part])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, correct)
        return loss_sum, weight_sum, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None, None


def chunk_loss(
    logits: Tensor, teacher_logits: Tensor | None, label: Tensor, supervised: Tensor, kind: LossKind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weighted loss sum, weight sum, correct [m, K], gradient with respect to the logits [m, K, V]) of one chunk."""
    logp = logits.float().log_softmax(-1)
    if teacher_logits is not None:
        label = teacher_logits.argmax(-1)
    cross_entropy = -logp.gather(-1, label[..., None]).squeeze(-1)
    if kind.weights == "dpace":
        weight = dpace_weights(cross_entropy, supervised, kind.alpha)
    else:
        assert kind.gamma is not None
        weight = exponential_weights(supervised, kind.gamma)
    correct = logits.argmax(-1) == label
    if kind.kind in ("kl", "tv") and teacher_logits is not None:
        loss, gradient = divergence(logp, teacher_logits.float(), kind.kind)
    else:
        loss, gradient = cross_entropy, logp.exp()
        gradient.scatter_add_(-1, label[..., None], torch.full_like(label[..., None], -1, dtype=gradient.dtype))
    weighted = torch.where(supervised, loss * weight, torch.zeros_like(loss))
    return weighted.sum(), weight.sum(), correct, (gradient * weight[..., None]).to(logits.dtype)


def divergence(logp: Tensor, teacher_logits: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Forward KL sum p (log p - log q), or total variation 0.5 sum |p - q|, of target p and drafter q.

    Returns (loss [m, K], its gradient with respect to the drafter's logits [m, K, V]).
    """
    teacher_logp = teacher_logits.log_softmax(-1)
    p, q = teacher_logp.exp(), logp.exp()
    if kind == "kl":
        return (p * (teacher_logp - logp)).sum(-1), q - p
    side = 0.5 * (q - p).sign()
    return 0.5 * (p - q).abs().sum(-1), q * (side - (q * side).sum(-1, keepdim=True))
