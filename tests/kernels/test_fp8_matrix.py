"""FP8 products against float64 ones of the same rounded operands, and against unrounded ones within e4m3's rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draftline.drafter.fp8_matrix import Fp8Matrix
from draftline.drafter.matrix import PlainMatrix
from draftline.kernels.launch import compiling_together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
ROWS, WIDTH = (64, 32, 32), 96
# e4m3's spacing is 2^-3 of a value's power of two, its error uniform over that: 2^-3 / sqrt(12) = 3.6% of the power,
# and the power's root mean square is 1 / 1.53 of the values'. Two rounded operands: 2.4% * sqrt(2) of the product.
SUMMED = 2**-8 if DEVICE == "cpu" else 2**-7
EXPECTED = 2**-3 / 12**0.5 / (7 / 3) ** 0.5 * 2**0.5


def rounded(x: Tensor) -> Tensor:
    """float64 rows as e4m3 keeps them, by torch's own cast."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(1, keepdim=True).clamp(min=2.0**-100) / 448)))
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def linears(spread: float) -> list[nn.Linear]:
    """Three of one input; some rows of weights are much larger than the others."""
    torch.manual_seed(3)
    made = [nn.Linear(WIDTH, rows, bias=False) for rows in ROWS]
    for linear in made:
        linear.weight.data.normal_(0, 0.02).mul_(torch.exp(spread * torch.randn(len(linear.weight), 1)))
    return made


def inputs(width: int, seed: int) -> Tensor:
    """bf16 values of which one row is all zeros, one a thousand times the others, and one channel fifty times."""
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(seed))
    x[3], x[5] = 0, x[5] * 1000
    x[:, 7] *= 50
    return x.to(DTYPE)


def matrix(made: list[nn.Linear]) -> Fp8Matrix:
    built = Fp8Matrix([linear.to(DEVICE) for linear in made], DTYPE)
    built.refresh()
    return built


def stacked(made: list[nn.Linear], skip: int) -> Tensor:
    return torch.cat([linear.weight.data.double().cpu() for linear in made[skip:]])


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Relative to each row's length; rows of zeros must be zeros."""
    length = expected.norm(dim=1)
    assert not found.double().cpu()[length == 0].any()
    return ((found.double().cpu() - expected).norm(dim=1) / length)[length > 0]


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_product_is_that_of_the_rounded_operands(skip: int, spread: float) -> None:
    """To bf16's rounding of the result, 2^-8 at most, and on a GPU as much again for sums in the tensor cores."""
    made, x = linears(spread), inputs(WIDTH, 1)
    weight = rounded(stacked(made, skip))
    found = matrix(made).forward(x.to(DEVICE), skip=skip)
    assert found.dtype == DTYPE and found.shape == (40, sum(ROWS[skip:]))
    assert row_errors(found, rounded(x.double()) @ weight.t()).max() < SUMMED
    dy = inputs(sum(ROWS[skip:]), 2)
    scale = torch.exp2(torch.ceil(torch.log2(stacked(made, skip).abs().amax(1) / 448)))
    back = matrix(made).backward(dy.to(DEVICE), skip=skip)
    assert back.shape == (40, WIDTH)
    assert row_errors(back, rounded(dy.double() * scale) @ (weight / scale[:, None])).max() < SUMMED


@pytest.mark.parametrize("skip", [0, 1])
def test_rounding_costs_what_the_format_says(skip: int) -> None:
    made, x, dy = linears(spread=1.0), inputs(WIDTH, 1), inputs(sum(ROWS[skip:]), 2)
    weight, product = stacked(made, skip), matrix(made)
    forward = row_errors(product.forward(x.to(DEVICE), skip=skip), x.double() @ weight.t())
    backward = row_errors(product.backward(dy.to(DEVICE), skip=skip), dy.double() @ weight)
    for errors in (forward, backward):
        assert 0.5 * EXPECTED < errors.square().mean().sqrt() < 1.5 * EXPECTED


def test_residuals_and_sums_are_added_to_the_product() -> None:
    made, x, dy = linears(0.0), inputs(WIDTH, 1).to(DEVICE), inputs(sum(ROWS), 2).to(DEVICE)
    product, residual = matrix(made), inputs(sum(ROWS), 4).to(DEVICE)
    kept = residual.clone()
    assert torch.equal(product.forward(x, residual), product.forward(x) + residual) and torch.equal(residual, kept)
    into = inputs(WIDTH, 5).to(DEVICE)
    expected = into + product.backward(dy)
    assert product.backward(dy, into) is into and torch.equal(into, expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    """A scale for the whole tensor would let the largest value of the batch into every row's rounding."""
    product, x = matrix(linears(0.0)), inputs(WIDTH, 1).to(DEVICE)
    other = x.clone()
    other[1:] *= 3e4
    assert torch.equal(product.forward(x)[0], product.forward(other)[0])


def test_weight_gradients_are_the_plain_products_own() -> None:
    made, x, dy = linears(0.0), inputs(WIDTH, 1).to(DEVICE), inputs(sum(ROWS), 2).to(DEVICE)
    if DEVICE == "cpu":  # where torch.mm has no out_dtype for bf16
        x, dy = x.float(), dy.float()
    matrix(made).add_gradient(dy, x)
    found = [linear.weight.grad.clone() for linear in made if linear.weight.grad is not None]
    for linear in made:
        linear.weight.grad = None
    PlainMatrix(made, x.dtype).add_gradient(dy, x)
    assert len(found) == 3 and all(torch.equal(a, b.weight.grad) for a, b in zip(found, made, strict=True))


def test_a_changed_master_is_taken_over_and_an_unseen_change_is_stale() -> None:
    made = linears(0.0)
    product = matrix(made)
    assert product.is_current()
    made[1].weight.data.mul_(1.5)  # `.data` counts no change, as a fused optimizer does not
    product.refresh()
    assert not product.is_current()
    torch.autograd.graph.increment_version([made[1].weight])
    product.refresh()
    assert product.is_current()
    product.transposed.view(torch.uint8)[3, 5] ^= 1
    assert not product.is_current()


def test_weights_are_taken_over_after_a_refresh_that_only_compiled() -> None:
    made = linears(0.0)
    product = Fp8Matrix([linear.to(DEVICE) for linear in made], DTYPE)
    with compiling_together():
        product.refresh()
    product.refresh()
    assert product.is_current()
