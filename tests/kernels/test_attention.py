"""Block attention's kernels against SPEC 3 written out in float64: values and all five gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.kernels.attention import BlockAttention
from draftline.kernels.tiling import Geometry, tilings
from draftline.kernels.visibility import Anchors, visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# rows, context, blocks, block size, heads, kv heads, head dim, window, causal, documents, dead blocks
CASES = {
    "packed documents": (2, 200, 11, 16, 4, 2, 32, None, False, 3, 2),
    "blocks of ten, one kv head": (1, 300, 9, 10, 4, 1, 32, None, False, 1, 0),
    "three heads a group, window, causal": (1, 256, 8, 8, 3, 1, 16, 50, True, 1, 0),
    "no groups, window, many dead": (2, 190, 13, 16, 2, 2, 32, 20, False, 4, 5),
    "head dim no power of two": (1, 150, 5, 7, 6, 2, 24, None, True, 2, 0),
    "nothing but dead blocks in a row": (2, 70, 4, 4, 2, 1, 16, None, False, 1, 4),
    "blocks longer than most tiles": (1, 90, 3, 24, 4, 2, 16, 40, True, 2, 1),
}

# the dtype that tiles are for, and whether for Hopper; interpreted, all of them multiply float32
TILES = {"float32": (torch.float32, True), "Hopper": (torch.bfloat16, True), "others": (torch.bfloat16, False)}


def random_blocks(rng: np.random.Generator, rows: int, length: int, count: int, documents: int, dead: int) -> Anchors:
    anchor, start = np.zeros((rows, count), dtype=np.int64), np.zeros((rows, count), dtype=np.int64)
    keep = np.ones((rows, count), dtype=bool)
    for r in range(rows):
        cuts = np.sort(rng.choice(np.arange(1, length), documents - 1, replace=False))
        begins = np.concatenate([[0], cuts]).astype(np.int64)
        anchor[r] = np.sort(rng.choice(length, count, replace=False))
        start[r] = begins[np.searchsorted(begins, anchor[r], side="right") - 1]
    if dead:
        keep[-1, -dead:] = False
        anchor[-1, -dead:] = start[-1, -dead:] = 0
    return Anchors(*(torch.from_numpy(array).to(DEVICE) for array in (anchor, start, keep)))


def definition(blocks: Anchors, q: Tensor, keys: list[Tensor], size: int, window: int | None, causal: bool) -> Tensor:
    """softmax over [visible context ; own block] on the whole grid, in the inputs' dtype."""
    k_context, v_context, k_block, v_block = keys
    group = q.shape[2] // k_context.shape[2]
    k = torch.cat([k_context, k_block], 1).repeat_interleave(group, 2)
    v = torch.cat([v_context, v_block], 1).repeat_interleave(group, 2)
    length, slot = k_context.shape[1], torch.arange(q.shape[1], device=q.device)
    number, offset, p = slot // size, slot % size, torch.arange(length, device=q.device)
    anchor, start, keep = (t[:, number, None] for t in (blocks.anchor, blocks.start, blocks.keep))
    context = (p < anchor) & (p >= start) & keep
    if window is not None:
        context &= p > anchor + offset[:, None] - window
    own = number[:, None] == number
    if causal:
        own &= slot[:, None] >= slot
    seen = torch.cat([context, own.expand(len(q), -1, -1)], -1)[:, None]
    scores = torch.einsum("rqhd,rkhd->rhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("rhqk,rkhd->rqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tiles", TILES)
def test_values_and_gradients_are_those_of_the_definition(name: str, tiles: str) -> None:
    rows, length, count, size, heads, kv_heads, head_dim, window, causal, documents, dead = CASES[name]
    tiles_for, hopper = TILES[tiles]
    dtype = tiles_for if DEVICE == "cuda" else torch.float32
    rng = np.random.default_rng(5)
    torch.manual_seed(7)
    blocks = random_blocks(rng, rows, length, count, documents, dead)

    def draw(positions: int, number: int) -> Tensor:
        return torch.randn(rows, positions, number, head_dim, device=DEVICE).to(dtype)

    q, upstream = draw(count * size, heads), draw(count * size, heads)
    wide = draw(length, 2 * kv_heads)  # keys and values of the context are slices of one tensor, as in the step
    keys = [wide[:, :, :kv_heads], wide[:, :, kv_heads:], draw(count * size, kv_heads), draw(count * size, kv_heads)]
    exact = [t.double().requires_grad_() for t in (q, *keys)]
    expected = definition(blocks, exact[0], exact[1:], size, window, causal)
    gradients = torch.autograd.grad(expected, exact, upstream.double())

    geometry = Geometry(heads, kv_heads, head_dim, size, causal)
    tiling = tilings(geometry, tiles_for, hopper)
    attention = BlockAttention(geometry, tiling, visible(blocks, length, geometry, window, tiling))
    out, lse = attention.forward(q, *keys)
    poison = torch.full_like(wide, float("nan"))
    into = [torch.full_like(t, float("nan")) for t in (q, *keys[2:])]
    whole = (into[0], poison[:, :, :kv_heads], poison[:, :, kv_heads:], into[1], into[2])
    attention.backward(upstream, q, tuple(keys), out, lse, whole)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for found, wanted in zip((out, *whole), (expected, *gradients), strict=True):
        assert distance(found, wanted) < limit
