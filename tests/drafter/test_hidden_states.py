"""The training forward against the independent float64 drafter, block by block."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from drafter_samples import (
    GEOMETRIES,
    blocks_at,
    features,
    hidden,
    make_spec,
    make_step,
    random_document,
    reference_states,
    table_of,
)
from draftline.drafter.anchors import Blocks
from draftline.drafter.model import rope_frequencies

ANCHORS = [[3, 9, 12, 17, 28], [1, 2, 8, 0, 0]]
KEEP = [[True] * 5, [True, True, True, False, False]]


def batch_for(spec):
    """Row 0: documents of 14 and 16 tokens and 2 of padding; row 1: 12 tokens and 20 of padding."""
    rng = np.random.default_rng(7)
    rows = [[random_document(rng, spec, 14, 1), random_document(rng, spec, 16, 1)], [random_document(rng, spec, 12, 1)]]
    return features(rows, 32)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_states_equal_the_reference(geometry, block_size: int) -> None:
    """Packed documents, blocks past a document's end, and padded blocks beside them."""
    spec = make_spec(block_size=block_size, **geometry)
    step, batch = make_step(spec), batch_for(spec)
    blocks = blocks_at(batch, ANCHORS, KEEP)
    found = hidden(step, batch, blocks)
    assert found.shape == (2, 5, block_size, 32) and torch.isfinite(found).all()
    for row, block in np.argwhere(np.array(KEEP)):
        expected = reference_states(step, batch, blocks, row, block)
        torch.testing.assert_close(found[row, block].double(), expected, rtol=0, atol=3e-5)


def test_the_reference_tells_the_geometries_apart() -> None:
    """Otherwise the test above would prove nothing about windows, causality and RoPE."""
    spec = make_spec(block_size=8)
    batch, states = batch_for(spec), {}
    same_tensors = [name for name in GEOMETRIES if "kv" not in name and name not in ("biases", "one layer, one tap")]
    for name in same_tensors:
        step = make_step(make_spec(block_size=8, **GEOMETRIES[name]))
        states[name] = reference_states(step, batch, blocks_at(batch, ANCHORS, KEEP), 0, 1)
    names = list(states)
    for n, name in enumerate(names):
        for other in names[:n]:
            assert (states[name] - states[other]).abs().max() > 1e-2, (name, other)


def test_a_document_at_position_zero_of_its_row_and_later_gives_the_same_states() -> None:
    """Positions restart: with features and tokens alike, the place in the row does not matter."""
    spec = make_spec()
    step, rng = make_step(spec), np.random.default_rng(1)
    first, second = random_document(rng, spec, 9, 1), random_document(rng, spec, 15, 1)
    ahead, behind = features([[second, first]], 24), features([[first, second]], 24)
    one = hidden(step, ahead, blocks_at(ahead, [[6]]))[0, 0]
    two = hidden(step, behind, blocks_at(behind, [[15]]))[0, 0]
    torch.testing.assert_close(one, two, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("parameters", "expected", "scale"),
    [
        ({"rope_type": "default", "rope_theta": 16.0}, [1.0, 0.5, 0.25, 0.125], 1.0),
        ({"rope_type": "default", "rope_theta": 16.0, "partial_rotary_factor": 0.5}, [1.0, 0.25], 1.0),
        ({"rope_type": "linear", "rope_theta": 16.0, "factor": 4.0}, [0.25, 0.125, 0.0625, 0.03125], 1.0),
        (
            {"rope_type": "yarn", "rope_theta": 16.0, "factor": 4.0, "original_max_position_embeddings": 64},
            None,
            0.1 * math.log(4) + 1,
        ),
    ],
    ids=["default", "partial", "linear", "yarn"],
)
def test_rope_frequencies_by_hand(parameters, expected, scale: float) -> None:
    found, found_scale = rope_frequencies(make_spec(head_dim=8, rope_parameters=parameters))
    assert found_scale == pytest.approx(scale, rel=1e-6)
    if expected is not None:
        torch.testing.assert_close(found, torch.tensor(expected))


def test_blocks_begin_with_the_anchor_token_and_go_on_with_the_mask() -> None:
    spec = make_spec()
    step = make_step(spec)
    blocks = Blocks(torch.tensor([[1, 3]]), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))
    embeds = step.slot_embeds(torch.tensor([[5, 7, 8, 9]]), blocks, torch.float32)
    table = table_of(step)
    assert torch.equal(embeds[0, :, 0], table[[7, 9]])
    assert torch.equal(embeds[0, :, 1:], table[4].expand(2, 4, -1))
