"""What a block may see (SPEC 9.1-3, CASES 12): change one thing, and compare the block's states bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from builders import open_target, packed, save_target, spec_for
from drafter_samples import (
    CE,
    GEOMETRIES,
    blocks_at,
    features,
    hidden,
    make_spec,
    make_step,
    random_document,
    random_drafter,
)
from draftline.drafter.step import DrafterStep
from draftline.records import FeatureBatch
from draftline.target.capture import FeatureCapture

WIDE = {name: change for name, change in GEOMETRIES.items() if "kv" not in name and "rope" not in name}
geometries = pytest.mark.parametrize("geometry", WIDE.values(), ids=WIDE.keys())

# Row 0: documents of 14 and 16 tokens and 2 of padding. Row 1: one document of 32.
ANCHORS = [[3, 9, 17, 24], [2, 8, 12, 20]]
STARTS = [[0, 0, 14, 14], [0, 0, 0, 0]]


def two_rows(spec, seed: int = 0) -> FeatureBatch:
    rng = np.random.default_rng(seed)
    row = [random_document(rng, spec, 14, 2), random_document(rng, spec, 16, 2)]
    return features([row, [random_document(rng, spec, 32, 2)]], 32)


def with_ids(batch: FeatureBatch, change: np.ndarray) -> FeatureBatch:
    """Another token wherever `change` [R, S] is True."""
    ids = np.where(change, (batch.packed.ids + 1) % 32, batch.packed.ids)
    return replace(batch, packed=replace(batch.packed, ids=ids))


def with_taps(batch: FeatureBatch, row: int, positions: slice) -> FeatureBatch:
    taps = batch.taps.clone()
    taps[row, positions] += 1
    return replace(batch, taps=taps)


@geometries
def test_tokens_after_the_anchor_do_not_matter_and_the_anchor_does(geometry) -> None:
    spec = make_spec(**geometry)
    step, batch = make_step(spec), two_rows(spec)
    blocks = blocks_at(batch, ANCHORS)
    before = hidden(step, batch, blocks)
    others = np.ones((2, 32), dtype=bool)
    others[np.arange(2)[:, None], np.array(ANCHORS)] = False
    assert torch.equal(hidden(step, with_ids(batch, others), blocks), before)
    anchors = hidden(step, with_ids(batch, ~others), blocks)
    assert (anchors != before).any(-1).any(-1).all()  # every block


def test_a_real_targets_tokens_after_the_anchor_do_not_matter(tmp_path) -> None:
    """The features are captured anew from the changed text, as in training."""
    target = open_target(save_target(tmp_path / "t"))
    spec = spec_for(target)
    step = DrafterStep(random_drafter(spec), target.embed, target.parts.head, CE, 8, 0)
    capture = FeatureCapture(target, spec.target_layer_ids, want_final=False)
    ids = np.random.default_rng(0).integers(5, 32, 30)
    changed = np.where(np.arange(30) > 11, (ids + 1) % 32, ids)
    states = []
    for tokens in (ids, changed):
        batch = capture(packed([[(tokens.tolist(), [1] * 30)]], 30))
        states.append(hidden(step, batch, blocks_at(batch, [[11, 20]]))[0])
    assert torch.equal(states[0][0], states[1][0])
    assert not torch.equal(states[0][1], states[1][1])


@geometries
@pytest.mark.parametrize("kept", range(4))
def test_another_block_does_not_matter(geometry, kept: int) -> None:
    """Other anchors, and none at all, in the other places of both rows."""
    spec = make_spec(**geometry)
    step, batch = make_step(spec), two_rows(spec)
    before = hidden(step, batch, blocks_at(batch, ANCHORS))
    moved = [[a if n == kept else a + 1 for n, a in enumerate(row)] for row in ANCHORS]
    found = hidden(step, batch, blocks_at(batch, moved))
    assert torch.equal(found[:, kept], before[:, kept])
    assert not torch.equal(found[:, kept - 1], before[:, kept - 1])
    alone = blocks_at(batch, moved, [[n == kept for n in range(4)]] * 2)
    assert torch.equal(hidden(step, batch, alone)[:, kept], before[:, kept])


@geometries
@pytest.mark.parametrize(("row", "block"), [(0, 1), (0, 2), (0, 3), (1, 0), (1, 3)])
def test_the_context_ends_before_the_anchor_and_begins_with_the_document(geometry, row: int, block: int) -> None:
    spec = make_spec(**geometry)
    step, batch = make_step(spec), two_rows(spec)
    blocks = blocks_at(batch, ANCHORS)
    anchor, start = ANCHORS[row][block], STARTS[row][block]
    before = hidden(step, batch, blocks)[row, block]

    def after(changed_row: int, positions: slice) -> torch.Tensor:
        return hidden(step, with_taps(batch, changed_row, positions), blocks)[row, block]

    assert torch.equal(after(row, slice(anchor, None)), before)
    assert torch.equal(after(row, slice(0, start)), before)
    assert torch.equal(after(1 - row, slice(None)), before)
    sees_last = (after(row, slice(anchor - 1, anchor)) != before).any(-1)
    assert sees_last[0]
    assert sees_last.all()


def test_a_window_ends_exactly_at_its_width() -> None:
    """One sliding layer of window 6, anchor 20: slot j sees p > 20 + j - 6, so p = 15 is seen by slot 0 alone."""
    spec = make_spec(num_hidden_layers=1, layer_types=("sliding_attention",), sliding_window=6)
    step, batch = make_step(spec), two_rows(spec)
    blocks = blocks_at(batch, [[3], [20]])
    before = hidden(step, batch, blocks)[1, 0]
    seen = {}
    for p in range(13, 20):
        seen[p] = (hidden(step, with_taps(batch, 1, slice(p, p + 1)), blocks)[1, 0] != before).any(-1).tolist()
    assert seen == {p: [p > 20 + j - 6 for j in range(5)] for p in range(13, 20)}


@geometries
def test_the_anchor_token_reaches_every_slot_of_its_block_and_no_other(geometry) -> None:
    spec = make_spec(**geometry)
    step, batch = make_step(spec), two_rows(spec)
    blocks = blocks_at(batch, ANCHORS)
    other = np.zeros((2, 32), dtype=bool)
    other[1, ANCHORS[1][3]] = True
    changed = (hidden(step, with_ids(batch, other), blocks) != hidden(step, batch, blocks)).any(-1)
    assert changed.nonzero().tolist() == [[1, 3, slot] for slot in range(5)]


@pytest.mark.parametrize("geometry", [{}, {"is_causal": True}, GEOMETRIES["mixed"]], ids=["full", "causal", "mixed"])
def test_overlapping_blocks_do_not_answer_each_other(geometry) -> None:
    """Anchors 4 and 6 with block 8 (CASES 12): x_6, the anchor of the second, is a label of the first."""
    spec = make_spec(block_size=8, **geometry)
    step, batch = make_step(spec), two_rows(spec)
    blocks = blocks_at(batch, [[4, 6], [4, 6]])
    before = hidden(step, batch, blocks)
    other = np.zeros((2, 32), dtype=bool)
    other[:, 6] = True
    found = hidden(step, with_ids(batch, other), blocks)
    assert torch.equal(found[:, 0], before[:, 0])
    assert (found[:, 1] != before[:, 1]).any(-1).all()
    other[:, 6], other[:, 4] = False, True
    found = hidden(step, with_ids(batch, other), blocks)
    assert torch.equal(found[:, 1], before[:, 1])  # its features at p = 4 and 5 are held fixed
    assert (found[:, 0] != before[:, 0]).any(-1).all()
    for p, sees in ((3, [True, True]), (4, [False, True]), (5, [False, True]), (6, [False, False])):
        changed = hidden(step, with_taps(batch, 1, slice(p, p + 1)), blocks)[1] != before[1]
        assert changed.flatten(1).any(-1).tolist() == sees
