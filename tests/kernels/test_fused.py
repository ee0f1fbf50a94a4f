"""The written-out step against the plain model under autograd: sums, and the gradient of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from draftline.config import OptimSection
from draftline.drafter.losses import LossKind
from draftline.drafter.model import untrained
from draftline.drafter.step import DrafterStep, fused_drafter
from draftline.records import DrafterSpec, FeatureBatch, Head, PackedBatch
from draftline.train.optimizer import Optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [("ce", "exponential"), ("kl", "dpace"), ("tv", "exponential"), ("ce_target", "dpace")]
SPECS = {
    "full": {},
    "mixed windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 60},
    "sliding, bidirectional": {
        "layer_types": ("sliding_attention",) * 2, "sliding_window": 40, "is_causal": False,
    },
    "partial rotary, blocks of ten, six heads": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "block_size": 10, "num_attention_heads": 6,
    },
}  # fmt: skip


def spec_of(**changes) -> DrafterSpec:
    values = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "block_size": 8, "mask_token_id": 4,
        "target_layer_ids": (0, 1), "num_target_layers": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "layer_types": ("full_attention",) * 2,
    }  # fmt: skip
    return DrafterSpec(**(values | changes))


def random_batch(rng: np.random.Generator, rows: int, length: int, spec: DrafterSpec) -> FeatureBatch:
    """Rows of random documents; the first is padded from the middle on."""
    document = np.full((rows, length), -1, dtype=np.int64)
    position = np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        at, number, end = 0, 0, length if row else length // 2
        while at < end:
            count = min(int(rng.integers(5, 50)), end - at)
            document[row, at : at + count] = number
            position[row, at : at + count] = np.arange(count)
            at, number = at + count, number + 1
    ids = rng.integers(5, spec.vocab_size, (rows, length))
    mask = (rng.random((rows, length)) < 0.95) & (document >= 0)
    packed = PackedBatch(int(rng.integers(100)), ids, mask, document, position, np.where(document >= 0, 0, -1))
    width = spec.hidden_size
    taps = torch.from_numpy(rng.standard_normal((rows, length, len(spec.target_layer_ids) * width))).float()
    final = torch.from_numpy(rng.standard_normal((rows, length, width))).float()
    return FeatureBatch(packed, taps.bfloat16().float(), final.bfloat16().float())


def random_step(
    spec: DrafterSpec, kind: LossKind, device: str, dtype: torch.dtype, fused: bool, shape: dict[str, Any] | None = None
) -> DrafterStep:
    """shape: bias, scale and soft-cap of the head, of which a plain one has none."""
    torch.manual_seed(1)
    drafter = untrained(spec, 3, std=0.1)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    embedding, head = nn.Embedding(spec.vocab_size, spec.hidden_size), torch.randn(spec.vocab_size, spec.hidden_size)
    drafter.to(device)
    borrowed = Head(0.3 * head, **(shape or {})).to(device).to(dtype)
    step = DrafterStep(drafter, embedding.to(device, dtype), borrowed, kind, anchors=7, seed=0)
    step.fused = fused_drafter(drafter, dtype, "plain") if fused else None
    return step


def run(step: DrafterStep, batch: FeatureBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    device, dtype = step.head.weight.device, step.head.weight.dtype
    assert batch.final is not None
    micro = step.forward_backward(
        FeatureBatch(batch.packed, batch.taps.to(device, dtype), batch.final.to(device, dtype))
    )
    gradients = {name: p.grad.double().cpu().clone() for name, p in step.drafter.named_parameters()}
    return [value.double().cpu() for value in micro.values()], gradients


ALL = [(name, kind) for name in SPECS for kind in KINDS]
SOME = [(name, kind) for name, kind in zip(SPECS, KINDS, strict=True)]  # interpreted, a case takes ten seconds


@pytest.mark.parametrize(("name", "kind"), ALL if DEVICE == "cuda" else SOME, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32], ids=str)
def test_it_equals_the_plain_model(name: str, kind: tuple[str, str], dtype: torch.dtype) -> None:
    """bf16 loses a slot's argmax here and there, which moves a whole label of ce_target and a sign of tv (0.12)."""
    spec, loss = spec_of(**SPECS[name]), LossKind(*kind, gamma=5.0, alpha=0.5)
    batch = random_batch(np.random.default_rng(3), 2, 70, spec)
    expected, reference = run(random_step(spec, loss, "cpu", torch.float32, fused=False), batch)
    found, gradients = run(random_step(spec, loss, DEVICE, dtype, fused=True), batch)
    flips = kind[0] in ("ce_target", "tv")
    limit = 1e-4 if dtype == torch.float32 else 0.2 if flips else 3e-2
    for index in (0, 1):
        assert abs(found[index] - expected[index]) <= limit * abs(expected[index])
    assert found[4] == expected[4] and torch.equal(found[6], expected[6])
    for key, value in reference.items():
        assert (gradients[key] - value).norm() <= limit * value.norm(), key


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_head_with_bias_scale_and_soft_cap(kind: tuple[str, str]) -> None:
    spec, loss = spec_of(), LossKind(*kind, gamma=5.0, alpha=0.5)
    bias = torch.randn(spec.vocab_size, generator=torch.Generator().manual_seed(5))
    shape = {"bias": bias, "scale": 1.4, "soft_cap": 2.0}
    batch = random_batch(np.random.default_rng(6), 1, 60, spec)
    expected, reference = run(random_step(spec, loss, "cpu", torch.float32, False, shape), batch)
    found, gradients = run(random_step(spec, loss, DEVICE, torch.float32, True, shape), batch)
    for index in (0, 1):
        assert abs(found[index] - expected[index]) <= 1e-4 * abs(expected[index])
    for key, value in reference.items():
        assert (gradients[key] - value).norm() <= 1e-4 * value.norm(), key


def test_a_second_micro_batch_adds_to_the_gradient_and_changed_masters_are_taken_over() -> None:
    spec, loss = spec_of(), LossKind("ce", "exponential", 5.0, 0.5)
    batch = random_batch(np.random.default_rng(4), 1, 60, spec)
    step = random_step(spec, loss, DEVICE, torch.float32, fused=True)
    _, once = run(step, batch)
    _, twice = run(step, batch)
    for key, value in once.items():
        torch.testing.assert_close(twice[key], 2 * value, rtol=1e-4, atol=1e-5)
    plain = random_step(spec, loss, "cpu", torch.float32, fused=False)
    for changed in (step, plain):
        changed.drafter.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter in changed.drafter.parameters():
                parameter.mul_(1.1)
    (found, _), (expected, _) = run(step, batch), run(plain, batch)
    assert abs(found[0] - expected[0]) <= 1e-5 * expected[0]


def test_training_goes_on_from_the_optimizers_weights() -> None:
    """Six real optimizer steps on both paths: a working copy that is not renewed stays at its first loss."""
    spec, loss = spec_of(), LossKind("ce", "exponential", 5.0, 0.5)
    batch = random_batch(np.random.default_rng(4), 1, 60, spec)
    losses = {}
    for device, fused in ((DEVICE, True), ("cpu", False)):
        step = random_step(spec, loss, device, torch.float32, fused)
        optimizer = Optimizer(step.drafter, OptimSection(lr=0.01, warmup_share=0.0), total_steps=20)
        losses[fused] = []
        for _ in range(6):
            (sums, _) = run(step, batch)
            optimizer.finish(sums[1].float().to(device))
            losses[fused].append(float(sums[0] / sums[1]))
    assert losses[False][-1] < 0.9 * losses[False][0]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
