"""Anchors, labels and slot weights (SPEC 4, 5), by hand and against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from builders import packed
from drafter_samples import blocks_at, features, make_spec, make_step, random_document
from draftline.drafter.anchors import (
    dpace_weights,
    eligible,
    exponential_weights,
    sample_blocks,
    slot_targets,
)
from draftline.drafter.losses import LossKind
from draftline.drafter.step import gather_teacher
from draftline.records import FeatureBatch, PackedBatch
from reference import block_weights, dpace


def targets_of(batch: PackedBatch, blocks, size: int):
    ids, mask, document = (torch.from_numpy(a) for a in (batch.ids, batch.loss_mask, batch.document))
    return slot_targets(ids, mask, document, blocks, size)


def test_eligible_anchors_by_hand() -> None:
    """M_a = M_{a+1} = 1, a+1 in the same document; a turn of one token has no anchor."""
    batch = packed([[([9] * 7, [0, 1, 1, 1, 0, 1, 0]), ([9] * 3, [1, 1, 1])], [([9] * 2, [1, 1])]], 12)
    assert np.flatnonzero(eligible(batch)[0]).tolist() == [1, 2, 7, 8]
    assert np.flatnonzero(eligible(batch)[1]).tolist() == [0]


@pytest.mark.parametrize("supervised", [1, 2, 5, 15, 16, 17])
def test_short_answers_are_trained_on(supervised: int) -> None:
    """CASES 5: block 16, a prompt of 3. Every anchor but the last token's, and no weight past the end."""
    size, prompt = 16, 3
    mask = [0] * prompt + [1] * supervised
    batch = packed([[(list(range(5, 5 + len(mask))), mask)]], 40)
    blocks = sample_blocks(batch, 64, seed=0)
    anchors = blocks.anchor[0, blocks.keep[0]].tolist()
    assert anchors == list(range(prompt, prompt + supervised - 1))
    slots = targets_of(batch, blocks, size)
    for n, anchor in enumerate(anchors):
        left = min(size - 1, len(mask) - 1 - anchor)
        assert slots.supervised[0, n].tolist() == [True] * left + [False] * (size - 1 - left)
        assert slots.label[0, n, :left].tolist() == list(range(5 + anchor + 1, 5 + anchor + 1 + left))
        weights = exponential_weights(slots.supervised[0, n], 7.0)
        assert weights.tolist() == pytest.approx(block_weights(mask, anchor, size, 7.0), rel=1e-6)
    assert not slots.supervised[0, len(anchors) :].any()


def test_a_slot_predicts_the_token_at_its_own_position() -> None:
    batch = packed([[([10, 11, 12, 13, 14, 15, 16], [1] * 7)]], 8)
    slots = targets_of(batch, blocks_at(FeatureBatch(batch, torch.zeros(1, 8, 1), None), [[1, 4]]), 4)
    assert slots.label[0].tolist() == [[12, 13, 14], [15, 16, 0]]
    assert slots.position[0].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert slots.supervised[0].tolist() == [[True, True, True], [True, True, False]]


def test_weights_equal_the_reference_over_random_packings() -> None:
    """Masks with holes, documents of 2..20 tokens, anchors near every end; blocks 5, 8, 10 and 16."""
    rng, checked = np.random.default_rng(0), 0
    for size, gamma in ((5, 3.0), (8, 4.0), (10, 5.0), (16, 7.0)):
        for _ in range(8):
            row, starts = [], []
            while sum(len(ids) for ids, _ in row) < 40:
                starts.append(sum(len(ids) for ids, _ in row))
                length = int(rng.integers(2, 21))
                row.append((rng.integers(5, 30, length).tolist(), (rng.random(length) < 0.8).astype(int).tolist()))
            batch = packed([row], 64)
            blocks = sample_blocks(batch, 20, seed=int(rng.integers(1000)))
            weights = exponential_weights(targets_of(batch, blocks, size).supervised, gamma)
            for n in np.flatnonzero(blocks.keep[0].numpy()):
                anchor = int(blocks.anchor[0, n])
                number = int(batch.document[0, anchor])
                assert int(blocks.start[0, n]) == starts[number]
                expected = block_weights(row[number][1], anchor - starts[number], size, gamma)
                assert weights[0, n].tolist() == pytest.approx(expected, rel=1e-6)
                assert expected[0] == 1.0
                checked += 1
            assert not weights[0, ~blocks.keep[0]].any()
    assert checked > 300


def test_dpace_weights_by_hand_and_by_the_reference() -> None:
    """alpha 0.5, q = 1/2, 1/4, 1: q' = 3/4, 5/8, 1; C = 3/4, 15/32, 15/32; w = sums from the right."""
    ce = torch.tensor([[np.log(2), np.log(4), 0.0]])
    found = dpace_weights(ce, torch.ones(1, 3, dtype=torch.bool), 0.5)
    torch.testing.assert_close(found.double(), torch.tensor([[27 / 16, 15 / 16, 15 / 32]]).double(), rtol=1e-6, atol=0)
    rng = np.random.default_rng(1)
    for _ in range(50):
        ce, supervised, alpha = rng.exponential(2, 7), rng.random(7) < 0.7, float(rng.random())
        found = dpace_weights(torch.from_numpy(ce), torch.from_numpy(supervised), alpha)
        assert found.tolist() == pytest.approx(dpace(ce.tolist(), supervised.tolist(), alpha), rel=1e-9)


def test_anchors_are_uniform_without_replacement_sorted_and_a_function_of_the_number() -> None:
    """30 eligible positions over two documents, 10 drawn, 3000 times: each near 1000 times (4.9 deviations of 26)."""
    base = packed([[([9] * 12, [0] * 4 + [1] * 8), ([9] * 25, [0] + [1] * 24)]], 40)
    allowed, counts = np.flatnonzero(eligible(base)[0]), np.zeros(40)
    assert len(allowed) == 30
    for number in range(3000):
        blocks = sample_blocks(replace(base, index=number), 10, seed=5)
        anchors = blocks.anchor[0].numpy()
        assert blocks.keep.all() and (np.diff(anchors) > 0).all()
        counts[anchors] += 1
    assert (np.abs(counts[allowed] - 1000) < 4.9 * np.sqrt(1000 * 2 / 3)).all() and counts.sum() == 30000
    again = sample_blocks(replace(base, index=7), 10, seed=5)
    assert torch.equal(again.anchor, sample_blocks(replace(base, index=7), 10, seed=5).anchor)
    assert not torch.equal(again.anchor, sample_blocks(replace(base, index=8), 10, seed=5).anchor)
    assert not torch.equal(again.anchor, sample_blocks(replace(base, index=7), 10, seed=6).anchor)


def test_the_teacher_of_slot_k_is_the_state_one_position_before() -> None:
    """The target's distribution of x_{a+k} comes from its state at a+k-1."""
    spec = make_spec(block_size=4)
    document = random_document(np.random.default_rng(0), spec, 12, 0)
    batch = features([[document]], 14)
    blocks = blocks_at(batch, [[2, 7, 10]])
    teacher = gather_teacher(batch.final, targets_of(batch.packed, blocks, 4))
    assert torch.equal(teacher[0], document[3][[2, 3, 4]])
    assert torch.equal(teacher[1], document[3][[7, 8, 9]])
    assert torch.equal(teacher[2, :1], document[3][[10]])  # its other slots lie past the end


@pytest.mark.parametrize("kind", ["ce", "ce_target", "kl", "tv"])
@pytest.mark.parametrize("weights", ["exponential", "dpace"])
def test_a_fully_padded_row_is_finite_and_weighs_nothing(kind: str, weights: str) -> None:
    """CASES 11: the batch with the row has the sums and gradients of the batch without, bit for bit."""
    spec, loss = make_spec(), LossKind(kind, weights, 4.0, 0.5)
    document = random_document(np.random.default_rng(0), spec, 20, 3)
    sums, gradients = [], []
    for rows in ([[document]], [[document], []]):
        step = make_step(spec, loss)
        sums.append(step.forward_backward(features(rows, 24)).values())
        gradients.append([p.grad for p in step.drafter.parameters()])
    assert all(torch.isfinite(g).all() and g.any() for g in gradients[1])
    for with_padding, alone in zip(sums[1], sums[0], strict=True):
        torch.testing.assert_close(with_padding, alone, rtol=1e-6, atol=0)
    for with_padding, alone in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(with_padding, alone, rtol=1e-4, atol=1e-6)


def test_a_batch_of_padding_alone_has_no_weight_and_zero_gradients() -> None:
    spec = make_spec()
    document = random_document(np.random.default_rng(0), spec, 20, 19)  # one supervised token: no anchor
    step = make_step(spec, LossKind("kl", "dpace", 4.0, 0.5))
    micro = step.forward_backward(features([[document]], 24))
    assert [float(v.sum()) for v in micro.values()] == [0.0] * 7
    assert all(not p.grad.any() for p in step.drafter.parameters())
