"""Rows in FP8 against torch's own cast, and the transpose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftline.kernels.quantise import FP8, fp8_rows, quantise, transpose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same rule in float64: the smallest power of two that brings a row to 448 or less, and torch's cast."""
    exact = x.double().cpu() * (1.0 if factor is None else factor.double().cpu())
    scale = torch.exp2(torch.ceil(torch.log2(exact.abs().amax(1).clamp(min=2.0**-100) / 448)))
    return (exact / scale[:, None]).float().to(FP8), scale.float()


@pytest.mark.parametrize(
    ("rows", "width"), [(70, 48), (5, 16), (3, 700), (3, 16384), (4, 17008)] + [(4, 25600)] * (DEVICE == "cuda")
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_torchs_own_cast(rows: int, width: int, dtype: torch.dtype) -> None:
    """Values over many binades, a row of zeros, an outlier, ties, and largest values on both sides of 448 * 2^k."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator) * torch.exp(4 * torch.randn(rows, width, generator=generator))
    x[0] = 0
    x[1, :4] = torch.tensor([1.75, 1.0625, 1.1875, -(1.75 + 2**-6)])  # 1.75 * 2^k fits its scale, more takes the next
    x[1, 4:] = x[1, 4:].clamp(-1.5, 1.5)
    x[-1, 5] = x[-2, -1] = 3e5  # the largest of a row may stand in any of its pieces
    x = x.to(dtype)
    for factor in (None, torch.exp2(torch.randint(-6, 6, (width,), generator=generator).float())):
        values, scale = reference(x, factor)
        found = quantise(x.to(DEVICE), None if factor is None else factor.to(DEVICE))
        assert torch.equal(found.scale.cpu(), scale)
        assert torch.equal(found.values.cpu().float(), values.float())  # a zero's sign is nobody's concern


def test_a_row_of_448_keeps_its_scale_and_the_next_number_does_not() -> None:
    x = torch.ones(2, 16)
    x[:, 3] = -448.0
    x[1, 3] = torch.nextafter(x[1, 3], torch.tensor(-1e9))
    assert quantise(x.to(DEVICE)).scale.tolist() == [1.0, 2.0]


def test_rows_of_a_wider_tensor_go_where_they_are_told() -> None:
    wide = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    into = fp8_rows(10, 32, torch.device(DEVICE))
    first, _ = into.split([6, 4])
    quantise(wide[:, 32:], into=first)
    values, scale = reference(wide[:, 32:], None)
    assert torch.equal(into.values[:6].float().cpu(), values.float()) and torch.equal(into.scale[:6].cpu(), scale)


# Triton's interpreter casts NaN to 1.5
@pytest.mark.parametrize("bad", [float("inf"), float("-inf")] + [float("nan")] * (DEVICE == "cuda"))
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.ones(2, 16, device=DEVICE)
    x[0, 3] = bad
    found = quantise(x)
    restored = found.values.float() * found.scale[:, None]
    assert not torch.isfinite(restored[0]).all() and torch.equal(restored[1], x[1])


def test_the_transpose_is_exact() -> None:
    values = quantise(torch.randn(70, 130, generator=torch.Generator().manual_seed(0)).to(DEVICE)).values
    into = torch.empty(130, 70, dtype=FP8, device=DEVICE)
    transpose(values, into)
    assert torch.equal(into.view(torch.uint8), values.view(torch.uint8).t())
