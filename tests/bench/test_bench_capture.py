"""`bench capture`: uneven documents, useful arithmetic counted by hand, and the figures of a tiny shape on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from draftline.bench.capture import capture_figures, flop, measure_capture, random_target, uneven_rows
from draftline.bench.measure import Ceiling
from draftline.bench.shapes import QWEN3_8B, Shape
from draftline.target.capture import document_spans

CPU = torch.device("cpu")
TINY = replace(
    QWEN3_8B, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=60, target_layer_ids=(0, 2), num_target_layers=3,
)  # fmt: skip
SHAPE = Shape("tiny", TINY, rows=2, sequence=80, anchors=4, documents=5)


def test_documents_are_uneven_and_fill_each_row() -> None:
    packed = uneven_rows(SHAPE)
    spans = document_spans(packed.document)
    lengths = [length for _, length in spans]
    assert (len(lengths), sum(lengths[:5]), sum(lengths[5:])) == (10, 80, 80)
    assert min(lengths) >= 2 and max(lengths) > 1.5 * min(lengths)
    for start, length in spans:
        assert packed.position.reshape(-1)[start : start + length].tolist() == list(range(length))
    assert np.array_equal(packed.ids, uneven_rows(SHAPE).ids) and packed.loss_mask.all()
    whole = uneven_rows(replace(SHAPE, documents=1))
    assert document_spans(whole.document) == [(0, 80), (80, 80)]


def test_arithmetic_is_that_of_the_documents() -> None:
    """Two products of keys and head size for each query head, query and key that it sees: half of L^2 pairs."""
    target = random_target(TINY, CPU, torch.float32)
    linear = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48
    assert flop(SHAPE, target, [7, 1]) == 3 * (8 * 2 * linear + (49 + 1) / 2 * 4 * 2 * 2 * 8)


def test_figures_of_both_ways() -> None:
    timing = measure_capture(SHAPE, CPU)
    assert list(timing.paths) == ["padded"] and timing.speed == {}
    figures = capture_figures(SHAPE, timing, Ceiling(2.0, 1.0))
    assert figures["padded_ms"] == figures["ms"] == timing.taken.capture_s * 1e3
    assert figures["share_of_bare_forward_rate"] == timing.taken.forward_s / timing.taken.capture_s
    assert figures["share_of_sustained_ceiling"] == 2 * figures["share_of_burst_ceiling"]
    assert figures["document_tokens"] == (
        f"{min(timing.lengths)} to {max(timing.lengths)}, mean 16 (uniform, 0.2 to 1.8 of it)"
    )
