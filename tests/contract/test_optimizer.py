"""The optimizer step by hand: sums, schedule, clip, masters, and steps that must not be taken (SPEC 5, CASES 10)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from drafter_samples import features, make_spec, make_step, random_document
from draftline.config import OptimSection
from draftline.drafter.model import untrained
from draftline.train.optimizer import Optimizer, learning_rate

SECTION = OptimSection()


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=dtype))
        self.b = nn.Parameter(torch.ones(1, dtype=dtype))


def with_gradient(model: Two, a: list[float], b: float) -> None:
    model.a.grad = torch.tensor(a, dtype=model.a.dtype)
    model.b.grad = torch.tensor([b], dtype=model.b.dtype)


def adamw_by_hand(x: float, gradients: list[float], rates: list[float], section: OptimSection) -> float:
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        x -= lr * section.weight_decay * x
        m = section.betas[0] * m + (1 - section.betas[0]) * g
        v = section.betas[1] * v + (1 - section.betas[1]) * g * g
        x -= lr * (m / (1 - section.betas[0] ** t)) / (math.sqrt(v / (1 - section.betas[1] ** t)) + 1e-8)
    return x


def test_schedule_by_hand() -> None:
    """100 steps: 4 of warm-up, then a cosine over 96 that reaches half in its middle and almost 0 at its end."""
    rates = [learning_rate(step, 100, SECTION) / 6e-4 for step in range(100)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[4 + 24] == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert rates[4 + 48] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 95 / 96)))
    assert all(later <= earlier for earlier, later in zip(rates[3:], rates[4:], strict=False))
    assert learning_rate(0, 1, SECTION) == 6e-4  # a run of one step does step
    assert learning_rate(0, 10, OptimSection(warmup_share=0.0)) == 6e-4


def test_divides_by_the_summed_weight_then_clips_by_the_global_norm() -> None:
    """Sums (30, 0 | 40) over weight 10: gradient (3, 0 | 4) of norm 5, clipped to (0.6, 0 | 0.8)."""
    section, model = OptimSection(lr=0.1, warmup_share=0.0, weight_decay=0.1), Two()
    optimizer = Optimizer(model, section, 4)
    with_gradient(model, [30, 0], 40)
    assert float(optimizer.finish(torch.tensor(10.0))) == pytest.approx(5.0)
    state = optimizer.adamw.state[model.a]
    assert state["exp_avg"].tolist() == pytest.approx([0.06, 0.0]) and float(state["step"]) == 1
    assert optimizer.adamw.state[model.b]["exp_avg"].item() == pytest.approx(0.08)
    with_gradient(model, [0.2, 0.0], -0.4)
    assert float(optimizer.finish(torch.tensor(2.0))) == pytest.approx(math.hypot(0.1, 0.2))  # below 1: not scaled up
    rates = [learning_rate(step, 4, section) for step in range(2)]
    assert model.a[0].item() == pytest.approx(adamw_by_hand(1, [0.6, 0.1], rates, section), rel=1e-6)
    assert model.b.item() == pytest.approx(adamw_by_hand(1, [0.8, -0.2], rates, section), rel=1e-6)
    assert optimizer.steps_done == 2 and model.a.grad is None


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(
    ("gradient", "weight"),
    [([0.0, 0.0], 0.0), ([float("nan"), 1.0], 4.0), ([float("inf"), 1.0], 4.0), ([1.0, 1.0], 0.0)],
    ids=["no weight", "nan", "inf", "gradient without weight"],
)
def test_a_step_that_must_not_be_taken_leaves_everything_as_it_was(first: bool, gradient, weight: float) -> None:
    model = Two()
    optimizer = Optimizer(model, OptimSection(lr=0.1, weight_decay=0.1), 10)
    if not first:
        with_gradient(model, [1, 2], 3)
        optimizer.finish(torch.tensor(2.0))
    parameters = [p.detach().clone() for p in model.parameters()]
    moments = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    with_gradient(model, gradient, gradient[1])
    optimizer.finish(torch.tensor(weight))
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), parameters, strict=True))
    after = optimizer.state_tensors()
    if first:
        assert not any(value.any() for value in after.values())
    else:
        assert after.keys() == moments.keys() and all(torch.equal(after[name], moments[name]) for name in moments)
    assert model.a.grad is None and optimizer.steps_done == 2 - first
    with_gradient(model, [1, 2], 3)  # and the next step is an ordinary one
    optimizer.finish(torch.tensor(2.0))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model.a, parameters[0])


def test_restored_moments_give_the_same_next_step() -> None:
    one, two = Two(), Two()
    first, second = (Optimizer(model, OptimSection(lr=0.1), 10) for model in (one, two))
    for gradient in ([1, 2], [3, -1]):
        with_gradient(one, gradient, 1)
        first.finish(torch.tensor(2.0))
    two.load_state_dict(one.state_dict())
    second.load_state_tensors({k: v.clone() for k, v in first.state_tensors().items()}, first.steps_done)
    for model, optimizer in ((one, first), (two, second)):
        with_gradient(model, [0.5, 0.25], -1)
        optimizer.finish(torch.tensor(2.0))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert first.lr == second.lr


def test_norm_weights_at_one_move_under_bf16_compute() -> None:
    """CASES 10: bf16 features and head, lr 6e-4. The masters are float32; bf16 would stand still."""
    spec = make_spec()
    step = make_step(spec)
    step.drafter.load_state_dict(untrained(spec, seed=0).state_dict())
    for name, p in step.drafter.named_parameters():
        if name.endswith("norm.weight"):
            p.data.fill_(1.0)
    step.embed.to(torch.bfloat16)
    step.head = step.head.to(torch.bfloat16)
    assert {p.dtype for p in step.drafter.parameters()} == {torch.float32}
    optimizer = Optimizer(step.drafter, OptimSection(warmup_share=0.0), 100)
    batch = features([[random_document(np.random.default_rng(0), spec, 30, 3)]], 32)
    batch = type(batch)(batch.packed, batch.taps.bfloat16(), None)
    optimizer.finish(step.forward_backward(batch).weight_sum)
    norms = {name: p for name, p in step.drafter.named_parameters() if name.endswith("norm.weight")}
    assert len(norms) == 2 + 4 * spec.num_hidden_layers
    for name, weight in norms.items():
        moved = (weight - 1).abs()
        assert (moved > 1e-4).float().mean() > 0.9 and moved.max() < 7e-4, name
        assert torch.equal((weight.detach()).bfloat16(), torch.ones_like(weight).bfloat16()), name


def test_bf16_parameters_would_stand_still() -> None:
    model = Two(torch.bfloat16)
    optimizer = Optimizer(model, OptimSection(warmup_share=0.0), 100)
    for _ in range(20):
        with_gradient(model, [1, 1], 1)
        optimizer.finish(torch.tensor(1.0))
    assert model.a.tolist() == [1.0, 1.0]
