"""FlexAttention's mask from anchors against the definition, on the whole grid of queries and keys."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.drafter.anchors import Blocks
from draftline.drafter.attention import TILE, anchors_per_tile_multiple, flex_block_mask


def visible(blocks: Blocks, length: int, size: int, window: int | None, causal: bool) -> np.ndarray:
    """bool [R, N*B, S + N*B] written down from SPEC 3, slot by slot."""
    rows, count = blocks.anchor.shape
    grid = np.zeros((rows, count * size, length + count * size), dtype=bool)
    for r in range(rows):
        for n in range(count):
            for j in range(size):
                query, own = n * size + j, length + n * size
                grid[r, query, own : own + (j + 1 if causal else size)] = True
                if blocks.keep[r, n]:
                    a, start = int(blocks.anchor[r, n]), int(blocks.start[r, n])
                    oldest = start if window is None else max(start, a + j - window + 1)
                    grid[r, query, oldest:a] = True
    return grid


def random_blocks(rng: np.random.Generator, rows: int, count: int, length: int) -> Blocks:
    """Rows of random documents, some short; anchors anywhere in them, fewer than the shape holds in most rows."""
    anchor, start = np.zeros((rows, count), dtype=np.int64), np.zeros((rows, count), dtype=np.int64)
    keep = np.zeros((rows, count), dtype=bool)
    for r in range(rows):
        bounds = np.sort(rng.choice(np.arange(1, length), int(rng.integers(0, 6)), replace=False))
        bounds = np.concatenate([[0], bounds])
        chosen = np.sort(rng.choice(length, min(int(rng.integers(0, count + 1)), length), replace=False))
        anchor[r, : len(chosen)], keep[r, : len(chosen)] = chosen, True
        start[r, : len(chosen)] = bounds[np.searchsorted(bounds, chosen, side="right") - 1]
    return Blocks(*(torch.from_numpy(array) for array in (anchor, start, keep)))


def listed(count: torch.Tensor, index: torch.Tensor) -> np.ndarray:
    """bool [R, query tiles, key tiles] of a BlockMask's lists; no tile is listed twice."""
    rows, _, queries = count.shape
    tiles = np.zeros((rows, queries, index.shape[-1]), dtype=bool)
    for r in range(rows):
        for q in range(queries):
            some = index[r, 0, q, : int(count[r, 0, q])].numpy()
            assert len(set(some.tolist())) == len(some)
            tiles[r, q, some] = True
    return tiles


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 2),
    size=st.sampled_from([5, 8, 10, 16]),
    context_tiles=st.integers(1, 3),
    window=st.one_of(st.none(), st.sampled_from([1, 2, 7, 100, 128, 200, 1000])),
    causal=st.booleans(),
)
def test_mask_and_tiles_equal_the_definition(
    seed: int, rows: int, size: int, context_tiles: int, window: int | None, causal: bool
) -> None:
    rng, length = np.random.default_rng(seed), context_tiles * TILE
    count = anchors_per_tile_multiple(size) * (1 if size == 5 else int(rng.integers(1, 3)))
    blocks = random_blocks(rng, rows, count, length)
    expected = visible(blocks, length, size, window, causal)
    mask = flex_block_mask(blocks, length, size, window=window, causal=causal)
    assert mask.shape == (rows, 1, count * size, length + count * size)

    index = [torch.arange(n).view(shape) for n, shape in
             zip(expected.shape, ((-1, 1, 1), (1, -1, 1), (1, 1, -1)), strict=True)]  # fmt: skip
    found = mask.mask_mod(index[0], torch.tensor(0), index[1], index[2])
    assert np.array_equal(found.numpy(), expected)

    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    tiles = expected.reshape(rows, count * size // TILE, TILE, -1, TILE).swapaxes(2, 3)
    assert not (partial & full).any()
    assert (tiles.any((-1, -2)) <= (partial | full)).all()  # every visible pair lies in a listed tile
    assert (full <= tiles.all((-1, -2))).all()  # a tile listed as full is visible throughout
    assert np.array_equal(full, tiles.all((-1, -2)) & (np.arange(tiles.shape[2]) < context_tiles))  # and none is missed


def test_tile_multiples() -> None:
    assert [anchors_per_tile_multiple(size) for size in (5, 8, 10, 16, 128)] == [128, 16, 64, 8, 1]


def test_far_context_is_not_listed() -> None:
    """8 blocks of 16 at anchors 300..307 of a document that begins at 260, or with a window: no tile before."""
    anchor = torch.arange(300, 308)[None]
    for start, window in ((260, None), (0, 30)):
        blocks = Blocks(anchor, torch.full_like(anchor, start), torch.ones_like(anchor, dtype=torch.bool))
        mask = flex_block_mask(blocks, 512, 16, window=window, causal=False)
        listed_tiles = mask.kv_indices[0, 0, 0, : int(mask.kv_num_blocks[0, 0, 0])].tolist()
        assert listed_tiles == [2, 4] and mask.full_kv_num_blocks.sum() == 0
