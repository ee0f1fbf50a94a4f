"""The loss kernels on capped and scaled logits against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from draftline.drafter.anchors import dpace_weights
from draftline.kernels.loss import LogitShape, dpace, statistics, turn_into_gradient, variation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "shape", [LogitShape(), LogitShape(scale=0.5), LogitShape(cap=3.0), LogitShape(2.0, 5.0)], ids=str
)
@pytest.mark.parametrize("kind", ["ce", "kl", "tv"])
def test_loss_and_gradient_equal_autograd(kind: str, shape: LogitShape) -> None:
    torch.manual_seed(2)
    rows, width = 6, 5003  # more than one tile of the vocabulary, and no multiple of it
    raw, teacher = 3 * torch.randn(rows, width, device=DEVICE), 3 * torch.randn(rows, width, device=DEVICE)
    label = torch.randint(0, width, (rows,), device=DEVICE)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.25], device=DEVICE)

    def logits(x: torch.Tensor) -> torch.Tensor:
        x = x.double() * shape.scale
        return x if shape.cap is None else shape.cap * torch.tanh(x / shape.cap)

    own = raw.double().requires_grad_()
    logq, logp = logits(own).log_softmax(-1), logits(teacher).log_softmax(-1)
    each = {
        "ce": -logq.gather(1, label[:, None])[:, 0],
        "kl": (logp.exp() * (logp - logq)).sum(-1),
        "tv": 0.5 * (logp.exp() - logq.exp()).abs().sum(-1),
    }[kind]
    (gradient,) = torch.autograd.grad((each * weight.double()).sum(), own)

    found = raw.clone()
    given = None if kind == "ce" else teacher
    numbers = statistics(found, given, shape)
    assert torch.equal(numbers.best.long(), raw.argmax(-1))
    torch.testing.assert_close(numbers.lse.double(), logits(raw).logsumexp(-1), rtol=1e-5, atol=1e-5)
    slope = None
    if given is not None:
        assert torch.equal(numbers.teacher_best.long(), teacher.argmax(-1))
    if kind == "kl":
        loss = numbers.cross - numbers.teacher_lse + numbers.lse
        torch.testing.assert_close(loss.double(), each.detach(), rtol=1e-4, atol=1e-5)
    if kind == "tv":
        loss, slope = variation(found, teacher, numbers, shape)
        torch.testing.assert_close(loss.double(), each.detach(), rtol=1e-4, atol=1e-5)
    turn_into_gradient(found, given, numbers, label, slope, weight, kind, shape)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-3, atol=1e-6)
    assert not found[2].any()


def test_dpace_weights() -> None:
    torch.manual_seed(3)
    cross_entropy = torch.rand(9, 15, device=DEVICE) * 4
    supervised = torch.arange(15, device=DEVICE) < torch.tensor([0, 1, 2, 5, 7, 9, 14, 15, 15], device=DEVICE)[:, None]
    torch.testing.assert_close(
        dpace(cross_entropy, supervised, 0.3), dpace_weights(cross_entropy, supervised, 0.3), rtol=1e-5, atol=1e-6
    )
