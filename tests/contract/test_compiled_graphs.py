"""One shape for all lengths, one graph a kind of layer (CASES 16)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import open_target, save_target, spec_for
from drafter_samples import GEOMETRIES, random_drafter
from draftline.data.stream import RowStream
from draftline.drafter.anchors import sample_blocks
from draftline.drafter.attention import FlexAttention
from draftline.drafter.losses import LossKind, chunk_loss
from draftline.drafter.step import DrafterStep
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture

LENGTHS = [9, 14, 20, 23, 31, 38, 44, 52, 61, 70, 83, 95, 110, 128]


class Counting:
    """A compiler that only counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: object) -> object:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(("geometry", "kinds"), [("full", 1), ("sliding", 1), ("mixed", 2)])
def test_fourteen_lengths_need_one_graph_a_kind_of_layer(geometry: str, kinds: int, tmp_path, monkeypatch) -> None:
    """Every layer and the loss compiled as on CUDA, with the fused attention's masks, over two epochs."""
    torch._dynamo.reset()
    target = open_target(save_target(tmp_path))
    layer_kinds = GEOMETRIES[geometry].get("layer_types", ("full_attention",) * 2) * 2
    changes = GEOMETRIES[geometry] | {"num_hidden_layers": 4, "layer_types": layer_kinds, "block_size": 8}
    loss = LossKind("kl", "dpace", 4.0, 0.5)
    spec = spec_for(target, **changes)
    step = DrafterStep(random_drafter(spec), target.embed, target.parts.head, loss, anchors=16, seed=0)
    step.drafter.requires_grad_(False)  # torch has no backward for it on the CPU
    layers, losses = Counting(), Counting()
    for layer in step.drafter.layers:
        layer.compile(backend=layers, fullgraph=True, dynamic=False)
    step.chunk_loss = torch.compile(chunk_loss, backend=losses, fullgraph=True, dynamic=False)
    monkeypatch.setattr("draftline.drafter.step.DenseAttention", FlexAttention)

    rows = [TokenRow(np.full(n, 7, dtype=np.int32), np.ones(n, dtype=bool), "") for n in LENGTHS]
    stream = RowStream(rows, row_length=128, rows_per_batch=2, seed=0, epochs=2)
    capture = FeatureCapture(target, spec.target_layer_ids, loss.needs_final)
    fills = set()
    for index in range(len(stream)):
        batch = capture(stream.batch(index))
        fills.add(batch.packed.tokens)
        with torch.no_grad():
            loss_sum, _ = step.forward(batch, sample_blocks(batch.packed, step.anchors, step.seed))
        assert torch.isfinite(loss_sum)
    assert len(stream) >= 7 and len(fills) >= 4
    assert (layers.graphs, losses.graphs) == (kinds, 1)
