"""The compiled CUDA step against the dense CPU step: values and gradients over packings, windows, losses and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.records import DrafterSpec, FeatureBatch, Head, PackedBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = {
    "full": {},
    "mixed windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 100},
    "sliding, bidirectional": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 40, "is_causal": False},
}


def spec_of(**changes) -> DrafterSpec:
    values = {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "block_size": 16, "mask_token_id": 4,
        "target_layer_ids": (0, 1), "num_target_layers": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": ("full_attention",) * 2,
    }  # fmt: skip
    return DrafterSpec(**(values | changes))


def random_batch(rng: np.random.Generator, rows: int, length: int, spec: DrafterSpec) -> FeatureBatch:
    """Rows of random documents, one of them padded from the middle on."""
    document = np.full((rows, length), -1, dtype=np.int64)
    position = np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        at, number, end = 0, 0, length if row else length // 2
        while at < end:
            count = min(int(rng.integers(5, 300)), end - at)
            document[row, at : at + count] = number
            position[row, at : at + count] = np.arange(count)
            at, number = at + count, number + 1
    ids = rng.integers(5, spec.vocab_size, (rows, length))
    mask = (rng.random((rows, length)) < 0.95) & (document >= 0)
    packed = PackedBatch(int(rng.integers(100)), ids, mask, document, position, np.where(document >= 0, 0, -1))
    width = spec.hidden_size
    taps = torch.from_numpy(rng.standard_normal((rows, length, len(spec.target_layer_ids) * width))).float()
    final = torch.from_numpy(rng.standard_normal((rows, length, width))).float()
    return FeatureBatch(packed, taps, final)


def run(spec: DrafterSpec, batch: FeatureBatch, kind: LossKind, device: str, dtype: torch.dtype):
    torch.manual_seed(1)
    drafter = Drafter(spec)
    drafter.init_weights(3, std=0.1)
    embedding, head = nn.Embedding(spec.vocab_size, spec.hidden_size), torch.randn(spec.vocab_size, spec.hidden_size)
    drafter.to(device)
    step = DrafterStep(
        drafter, embedding.to(device, dtype), Head(0.3 * head).to(device).to(dtype), kind, anchors=32, seed=0
    )  # fmt: skip
    if device == "cuda":
        step.compile()
    final = batch.final.to(device, dtype) if batch.final is not None else None
    micro = step.forward_backward(FeatureBatch(batch.packed, batch.taps.to(device, dtype), final))
    gradients = {name: p.grad.double().cpu() for name, p in drafter.named_parameters()}
    return [v.double().cpu() for v in micro.values()], gradients


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "kind", [("ce", "exponential"), ("kl", "dpace"), ("tv", "exponential"), ("ce_target", "dpace")], ids="-".join
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_step_equals_the_dense_reference(name, kind, dtype):
    torch._dynamo.reset()
    spec = spec_of(**SPECS[name])
    rng = np.random.default_rng(abs(hash((name, kind))) % 1000)
    loss = LossKind(*kind, gamma=7.0, alpha=0.5)
    batch = random_batch(rng, 3, 512, spec)
    if dtype == torch.bfloat16:  # round first, so that both sides see the same inputs
        batch = FeatureBatch(batch.packed, batch.taps.bfloat16().float(), batch.final.bfloat16().float())
    expected, reference = run(spec, batch, loss, "cpu", torch.float32)
    found, gradients = run(spec, batch, loss, "cuda", dtype)
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    assert torch.isfinite(found[0])
    for index in (0, 1):
        assert abs(found[index] - expected[index]) <= limit * abs(expected[index])
    assert found[4] == expected[4] and torch.equal(found[6], expected[6])
    for key, value in reference.items():
        error = (gradients[key] - value).norm() / value.norm()
        assert error <= limit, f"{key}: {error}"
