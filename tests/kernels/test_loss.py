"""The loss kernels against float64 autograd, and the head's loss and gradient on random packings against the plain
one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_fused import random_batch, spec_of
from torch import Tensor

from draftline.drafter import head_rows as head_rows_module
from draftline.drafter.anchors import dpace_weights, sample_blocks
from draftline.drafter.fused_loss import HeadGradient, head_loss_and_gradient
from draftline.drafter.head_rows import head_rows
from draftline.drafter.losses import LossKind, head_loss
from draftline.drafter.step import Placed, gather_teacher, place
from draftline.kernels import loss as kernels
from draftline.kernels.loss import LogitShape, SlotLosses, dpace, spread, teacher_of, turn_into_gradient
from draftline.records import FeatureBatch, Head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"U": 2, "BLOCK": 128, "STAGES": 2, "num_warps": 1}  # so that small vocabularies have several tiles too


def shaped(x: Tensor, shape: LogitShape) -> Tensor:
    x = x.double() * shape.scale
    return x if shape.cap is None else shape.cap * torch.tanh(x / shape.cap)


@pytest.mark.parametrize(
    "shape", [LogitShape(), LogitShape(scale=0.5), LogitShape(cap=3.0), LogitShape(2.0, 5.0)], ids=str
)
@pytest.mark.parametrize("kind", ["ce", "ce_target", "kl", "tv"])
def test_loss_and_gradient_equal_autograd(kind: str, shape: LogitShape) -> None:
    """Six rows and four of a teacher, which two rows share twice; more than two tiles of the vocabulary."""
    torch.manual_seed(2)
    width, slot = 20011, torch.tensor([0, 1, 3, 4, 6, 7], device=DEVICE)
    raw, others = 3 * torch.randn(6, width, device=DEVICE), 3 * torch.randn(4, width, device=DEVICE)
    row = torch.tensor([2, 0, 0, 3, 1, 1], device=DEVICE)
    label = torch.randint(0, width, (2, 4), device=DEVICE)
    own = raw.double().requires_grad_()
    logq, logp = shaped(own, shape).log_softmax(-1), shaped(others, shape).log_softmax(-1)[row]
    wanted = label.flatten()[slot] if kind == "ce" else others.argmax(-1)[row]
    entropy = -logq.gather(1, wanted[:, None])[:, 0]
    each = {
        "kl": (logp.exp() * (logp - logq)).sum(-1),
        "tv": 0.5 * (logp.exp() - logq.exp()).abs().sum(-1),
    }.get(kind, entropy)
    (gradient,) = torch.autograd.grad(each.sum(), own)

    found, into = raw.clone(), SlotLosses.zero(label)
    teacher = None if kind == "ce" else teacher_of(others, row, shape)
    turn_into_gradient(found, teacher, slot, label, kind, shape, into)
    torch.testing.assert_close(into.loss.flatten()[slot].double(), each.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(into.entropy.flatten()[slot].double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-3, atol=1e-6)
    assert torch.equal(into.correct.flatten()[slot], raw.argmax(-1) == wanted)
    assert not into.loss.flatten()[[2, 5]].any() and not into.entropy.flatten()[[2, 5]].any()


@pytest.mark.parametrize(
    "places", [(100, 4196), (4196, 8000), (4000, 12192), (9000, 17000), (16384, 20010), (20010,)], ids=str
)
def test_of_equal_logits_the_first_is_the_argmax(places: tuple[int, ...]) -> None:
    """In one lane of a tile, in two, in two tiles, and where the vocabulary ends inside a tile."""
    torch.manual_seed(3)
    logits = torch.randn(1, 20011, device=DEVICE).bfloat16()
    logits[0, list(places)] = 20.0
    found = teacher_of(logits, torch.zeros(1, dtype=torch.int64), LogitShape(cap=30.0))
    assert int(found.best) == places[0]
    expected = shaped(logits, LogitShape(cap=30.0)).logsumexp(-1)
    torch.testing.assert_close(found.lse.double() * np.log(2), expected, rtol=1e-6, atol=0)


def test_a_row_of_nan_has_a_loss_of_nan_and_some_argmax() -> None:
    logits = torch.full((1, 300), torch.nan, device=DEVICE)
    found = teacher_of(logits, torch.zeros(1, dtype=torch.int64), LogitShape())
    assert found.lse.isnan().all() and 0 <= int(found.best) < 300


def test_a_label_outside_the_vocabulary_has_a_loss_of_nan() -> None:
    logits, label = torch.randn(2, 300, device=DEVICE), torch.tensor([299, 300], device=DEVICE)
    into = SlotLosses.zero(label)
    turn_into_gradient(logits, None, torch.arange(2, device=DEVICE), label, "ce", LogitShape(), into)
    assert into.loss.isnan().tolist() == [False, True]


def test_dpace_weights() -> None:
    torch.manual_seed(3)
    cross_entropy = torch.rand(9, 15, device=DEVICE) * 4
    supervised = torch.arange(15, device=DEVICE) < torch.tensor([0, 1, 2, 5, 7, 9, 14, 15, 15], device=DEVICE)[:, None]
    torch.testing.assert_close(
        dpace(cross_entropy, supervised, 0.3), dpace_weights(cross_entropy, supervised, 0.3), rtol=1e-5, atol=1e-6
    )


def test_rows_are_spread_over_their_slots() -> None:
    supervised = torch.tensor([[True, True, False], [False] * 3, [True, False, False]], device=DEVICE)
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0] * 3, [0.5, 0.0, 0.0]], device=DEVICE)
    out = spread(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=DEVICE), weight, supervised)
    none = [0.0, 0.0]
    assert out.tolist() == [[none, [1, 2], [6, 8], none], [none] * 4, [none, [2.5, 3], none, none]]


SIZE, ANCHORS = 8, 12


def packing(seed: int) -> FeatureBatch:
    """Two rows of short documents with holes in their masks, and one of which nothing is supervised."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, 3, 60, spec_of())
    mask = batch.packed.loss_mask & (rng.random(batch.packed.loss_mask.shape) < 0.9)
    mask[1] = False
    return replace(batch, packed=replace(batch.packed, loss_mask=mask))


def placed_on(batch: FeatureBatch, device: str) -> tuple[FeatureBatch, Placed]:
    assert batch.final is not None
    batch = FeatureBatch(batch.packed, batch.taps.to(device), batch.final.to(device))
    return batch, place(batch, sample_blocks(batch.packed, ANCHORS, seed=0), SIZE)


def plain(hidden: Tensor, head: Head, batch: FeatureBatch, kind: LossKind) -> HeadGradient:
    batch, placed = placed_on(batch, "cpu")
    teacher = gather_teacher(batch.final, placed.slots) if kind.needs_final else None
    own = hidden[:, 1:].clone().requires_grad_()
    label, supervised = placed.slots.label.flatten(0, 1), placed.slots.supervised.flatten(0, 1)
    loss_sum, weight_sum, outcome = head_loss(own, head, label, supervised, teacher, kind)
    loss_sum.backward()
    assert own.grad is not None
    return HeadGradient(loss_sum.detach(), weight_sum, outcome, torch.nn.functional.pad(own.grad, (0, 0, 1, 0)))


def fused(hidden: Tensor, head: Head, batch: FeatureBatch, kind: LossKind) -> HeadGradient:
    batch, placed = placed_on(batch, DEVICE)
    rows = head_rows(placed.host_slots, 60, len(head.weight), kind.needs_final, batch.taps.device)
    final = batch.final.flatten(0, 1) if batch.final is not None and kind.needs_final else None
    label, supervised = placed.slots.label.flatten(0, 1), placed.slots.supervised.flatten(0, 1)
    there = head.to(hidden.dtype).to(DEVICE)
    return head_loss_and_gradient(hidden.to(DEVICE), there, label, supervised, final, rows, kind)


EVERY = [(name, weights) for name in ("ce", "ce_target", "kl", "tv") for weights in ("exponential", "dpace")]
ALL = [(name, weights, chunk) for name, weights in EVERY for chunk in (8, 32, 4096)]
SOME = [(name, weights, (8, 4096, 32)[i % 3]) for i, (name, weights) in enumerate(EVERY)]  # interpreted, 5 s each


@pytest.mark.parametrize(("name", "weights", "chunk"), ALL if DEVICE == "cuda" else SOME)
def test_random_packings_give_the_plain_loss_and_gradient(
    name: str, weights: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end inside blocks, blocks end early or have a single slot with weight, a row has none at all."""
    monkeypatch.setattr(head_rows_module, "TILE_ROWS", chunk)
    monkeypatch.setattr(head_rows_module, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(kernels, "TILE", SMALL)
    kind = LossKind(name, weights, gamma=5.0, alpha=0.4)
    for seed in range(5 if DEVICE == "cuda" else 1):
        batch = packing(seed)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(3 * ANCHORS, SIZE, 32, generator=generator)
        head = Head(0.3 * torch.randn(300, 32, generator=generator))
        expected, found = plain(hidden, head, batch, kind), fused(hidden, head, batch, kind)
        lengths = expected.outcome.supervised.sum(1)
        assert (lengths == 1).any() and (lengths == SIZE - 1).any() and not lengths[ANCHORS : 2 * ANCHORS].any()
        for one, other in ((found.loss_sum, expected.loss_sum), (found.weight_sum, expected.weight_sum)):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.hidden.cpu(), expected.hidden, rtol=1e-3, atol=1e-5)
        assert torch.equal(found.outcome.supervised.cpu(), expected.outcome.supervised)
        assert torch.equal(found.outcome.correct.cpu(), expected.outcome.correct & expected.outcome.supervised)


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_a_batch_with_nothing_supervised(name: str) -> None:
    batch = packing(0)
    batch = replace(batch, packed=replace(batch.packed, loss_mask=np.zeros((3, 60), dtype=bool)))
    kind = LossKind(name, "dpace", 5.0, 0.4)
    found = fused(torch.randn(3 * ANCHORS, SIZE, 32), Head(torch.randn(300, 32)), batch, kind)
    assert float(found.loss_sum) == float(found.weight_sum) == 0
    assert not found.hidden.any() and not found.outcome.correct.any()
