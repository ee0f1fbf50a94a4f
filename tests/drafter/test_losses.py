"""head_loss against autograd through plain float64 operations; packed rows against documents alone (SPEC 9.12)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafter_samples import GEOMETRIES, features, make_spec, make_step, random_document
from draftline.drafter import losses
from draftline.drafter.cost import PLAIN_CHUNK_LOGITS, whole_chunks
from draftline.drafter.losses import LossKind, head_loss
from draftline.drafter.step import MicroStep
from draftline.records import Head
from reference import dpace

KINDS = [
    LossKind(kind, weights, gamma=4.0, alpha=0.3)
    for kind in ("ce", "ce_target", "kl", "tv")
    for weights in ("exponential", "dpace")
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.kind}-{kind.weights}")


HEADS = {
    "soft-cap": {"soft_cap": 2.5},  # logits of these samples reach 9
    "scale": {"scale": 0.4},
    "bias, scale and soft-cap": {
        "bias": torch.linspace(-1.5, 2, 23, dtype=torch.float64),
        "scale": 1.7,
        "soft_cap": 4.0,
    },
}


def plain_logits(head: Head, state: Tensor) -> Tensor:
    logits = (head.weight * state).sum(-1)
    logits = (logits if head.bias is None else logits + head.bias) * head.scale
    return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)


def plain_loss(hidden: Tensor, head: Head, label: Tensor, supervised: Tensor, teacher: Tensor, kind: LossKind):
    """(loss sum, weight sum, correct) in float64, one slot at a time, differentiable by autograd."""
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    correct = torch.zeros_like(supervised)
    for m in range(hidden.shape[0]):
        slot_losses, entropies = [], []
        for k in range(hidden.shape[1]):
            q = torch.softmax(plain_logits(head, hidden[m, k]), 0)
            p = torch.softmax(plain_logits(head, teacher[m, k]), 0)
            wanted = int(label[m, k]) if kind.kind == "ce" else int(p.argmax())
            entropies.append(-float(q[wanted].detach().log()))
            correct[m, k] = int(q.argmax()) == wanted
            slot_losses.append(
                -torch.log(q[wanted]) if kind.kind.startswith("ce")
                else (p * (p / q).log()).sum() if kind.kind == "kl"
                else 1 - torch.minimum(p, q).sum()  # total variation is 1 - acceptance
            )  # fmt: skip
        valid = supervised[m].tolist()
        weights = (
            dpace(entropies, valid, kind.alpha) if kind.weights == "dpace"
            else [float(v) * float(np.exp(-k / kind.gamma)) for k, v in enumerate(valid)]
        )  # fmt: skip
        total = total + sum(w * loss for w, loss in zip(weights, slot_losses, strict=True))
        weight_sum += sum(weights)
    return total, weight_sum, correct


def random_slots(seed: int, blocks: int = 6, slots: int = 7, width: int = 16, vocabulary: int = 23):
    generator = torch.Generator().manual_seed(seed)
    hidden, teacher = (torch.randn(blocks, slots, width, generator=generator, dtype=torch.float64) for _ in range(2))
    head = 0.7 * torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    label = torch.randint(0, vocabulary, (blocks, slots), generator=generator)
    length = torch.tensor([7, 0, 1, 3, 7, 5])[:blocks]
    return hidden, Head(head), label, torch.arange(slots) < length[:, None], teacher


@kinds
@pytest.mark.parametrize("chunk", [PLAIN_CHUNK_LOGITS, 2 * 7 * 23, 1], ids=["one chunk", "chunks of 2", "chunks of 1"])
def test_values_and_gradients_equal_autograd(kind: LossKind, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(losses, "PLAIN_CHUNK_LOGITS", chunk)
    check_against_autograd(kind, {})


@kinds
@pytest.mark.parametrize("name", HEADS)
def test_every_head_gives_the_values_and_gradients_of_autograd(kind: LossKind, name: str) -> None:
    check_against_autograd(kind, HEADS[name])


def check_against_autograd(kind: LossKind, shape: dict[str, Any]) -> None:
    hidden, head, label, supervised, teacher = random_slots(3)
    head = replace(head, **shape)
    own = hidden.clone().requires_grad_(True)
    expected, weight, correct = plain_loss(own, head, label, supervised, teacher, kind)
    expected.backward()
    found = hidden.float().requires_grad_(True)
    given = teacher.float() if kind.needs_final else None
    loss_sum, weight_sum, outcome = head_loss(found, head.to(torch.float32), label, supervised, given, kind)
    (3 * loss_sum).backward()
    assert loss_sum.item() == pytest.approx(expected.item(), rel=2e-6)
    assert float(weight_sum) == pytest.approx(weight, rel=2e-6)
    assert torch.equal(outcome.correct, correct) and torch.equal(outcome.supervised, supervised)
    torch.testing.assert_close(found.grad.double(), 3 * own.grad, rtol=1e-4, atol=2e-6)


@kinds
def test_labels_shifted_by_a_slot_have_another_loss(kind: LossKind) -> None:
    """A shifted label or teacher changes the loss by far more than the tolerance of the test above."""
    hidden, head, label, supervised, teacher = random_slots(4)
    one, _, _ = plain_loss(hidden, head, label, supervised, teacher, kind)
    other, _, _ = plain_loss(hidden, head, label.roll(1, 1), supervised, teacher.roll(1, 1), kind)
    assert abs(float(one - other)) > 0.01 * float(one)


def test_a_target_of_its_own_mind_beats_the_data_token() -> None:
    """ce_target, kl and tv count as correct what the target would have said, not the data."""
    hidden, head, label, supervised, _ = random_slots(5)
    hidden, head = hidden.float(), head.to(torch.float32)
    for kind in KINDS:
        teacher = hidden.clone() if kind.needs_final else None
        loss, _, outcome = head_loss(hidden, head, label, supervised, teacher, kind)
        if kind.needs_final:
            assert outcome.correct.all()
        else:
            assert torch.equal(outcome.correct, (hidden @ head.weight.T).argmax(-1) == label)
        if kind.kind in ("kl", "tv"):
            assert abs(float(loss)) < 1e-5


def test_whole_chunks() -> None:
    assert [whole_chunks(12, limit) for limit in (1, 2, 5, 6, 11, 12, 100)] == [1, 2, 4, 6, 6, 12, 12]
    assert whole_chunks(13, 12) == 1


def gradient_of(kind: LossKind, geometry, rows, length: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    step = make_step(make_spec(**geometry), kind, anchors=64)
    micro: MicroStep = step.forward_backward(features(rows, length))
    return micro.values(), [p.grad for p in step.drafter.parameters()]


@kinds
@pytest.mark.parametrize("geometry", ["full", "mixed", "causal everywhere"])
def test_packed_rows_equal_the_documents_alone(kind: LossKind, geometry: str) -> None:
    """SPEC 9.12: five documents in two packed rows, and each in a row of its own; all eligible anchors.

    The document with no prompt comes last in its row: its tokens would pass for labels of the blocks before it.
    """
    rng, spec = np.random.default_rng(0), make_spec()
    documents = [random_document(rng, spec, n, prompt) for n, prompt in ((9, 2), (17, 5), (3, 1), (12, 0), (20, 19))]
    packed_rows = [[documents[1], documents[2], documents[3]], [documents[4], documents[0]]]
    together, gradients = gradient_of(kind, GEOMETRIES[geometry], packed_rows, 36)
    apart, alone = gradient_of(kind, GEOMETRIES[geometry], [[d] for d in documents], 36)
    assert int(together[4]) == 6 + 11 + 1 + 11 + 0
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max()))


@kinds
def test_micro_batches_add_up_to_the_whole(kind: LossKind) -> None:
    """Undivided sums: two forwards of one row each give the gradient of one forward of both."""
    rng, spec = np.random.default_rng(2), make_spec()
    rows = [[random_document(rng, spec, 20, 3)], [random_document(rng, spec, 8, 1), random_document(rng, spec, 9, 6)]]
    whole, gradients = gradient_of(kind, {}, rows, 24)
    step = make_step(spec, kind)
    parts = [step.forward_backward(features([row], 24)) for row in rows]
    for a, b in zip((parts[0] + parts[1]).values(), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for parameter, expected in zip(step.drafter.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
