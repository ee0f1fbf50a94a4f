"""A target's rotary embedding and gated product, against transformers' own functions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from draftline.kernels.inference import gated, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # Triton's interpreter cuts bits off where a GPU rounds


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def equal(found: Tensor, expected: Tensor) -> None:
    """To one rounding of the result."""
    worst = ((found.double() - expected) / expected.abs().clamp(min=0.1)).abs().max()
    assert float(worst) <= ROUNDING[found.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "q_heads", "k_heads", "size", "rotary", "tables"),
    [(1, 70, 4, 1, 64, 64, 1), (3, 37, 3, 3, 80, 80, 3), (2, 33, 5, 2, 128, 32, 1), (1, 1, 2, 1, 16, 16, 1)],
)
def test_every_head_of_both_is_turned(
    batch: int, tokens: int, q_heads: int, k_heads: int, size: int, rotary: int, tables: int, dtype: torch.dtype
) -> None:
    """Queries and keys as transformers gives them: transposed views, the queries a part of something wider."""
    wide = normal(0, batch, tokens, q_heads, 2 * size, dtype=dtype)
    q, k = (
        wide.chunk(2, dim=-1)[0].transpose(1, 2),
        normal(1, batch, tokens, k_heads, size, dtype=dtype).transpose(1, 2),
    )
    cos, sin = normal(2, tables, tokens, rotary, dtype=dtype), normal(3, tables, tokens, rotary, dtype=dtype)
    found = rotate(q, k, cos, sin)
    family = llama if rotary == size else neox
    for mine, own, given in zip(found, family(*(x.double() for x in (q, k, cos, sin))), (q, k), strict=True):
        assert mine.shape == given.shape and mine.transpose(1, 2).is_contiguous()
        equal(mine, own)


def test_tables_that_are_columns_of_wider_ones() -> None:
    q, k = normal(0, 2, 3, 9, 16), normal(1, 2, 1, 9, 16)
    cos, sin = normal(2, 2, 9, 48)[..., 16:32], normal(3, 1, 9, 16).expand(2, -1, -1)
    for mine, own in zip(rotate(q, k, cos, sin), llama(q.double(), k.double(), cos, sin), strict=True):
        equal(mine, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gated_product(activation: str, dtype: torch.dtype) -> None:
    gate, up = normal(0, 3, 7, 301, dtype=dtype) * 3, normal(1, 3, 7, 301, dtype=dtype)
    act = torch.nn.functional.silu if activation == "silu" else torch.nn.GELU("tanh")
    expected = act(gate.double()).to(dtype).double() * up.double()
    found = gated(gate, up, activation)
    assert found.data_ptr() == gate.data_ptr()
    torch.testing.assert_close(found.double(), expected, rtol=2 * ROUNDING[dtype], atol=1e-5)  # rounded twice
