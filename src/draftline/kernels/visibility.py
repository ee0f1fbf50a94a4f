"""What every slot of a micro-batch sees of its context, and which tiles of keys and queries meet because of it.

Everything comes from the anchors, which ascend in a row: the context part of block attention is causal attention whose
limit rises with the anchors. No grid of queries and keys, and no host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.kernels.tiling import Geometry, Tilings


@dataclass(frozen=True)
class Visible:
    """The context that each slot of a micro-batch sees, [low, high), and what that makes of every kernel's tiles."""

    low: Tensor  # int32 [R, Q]
    high: Tensor  # int32 [R, Q]
    forward: (
        Tensor  # int32 [R, query tiles, 4]: first key tile, first full one, one past the last full, one past the last
    )
    query: Tensor
    context: Tensor  # int32 [R, key tiles, 4]: the same of the query tiles that see a key tile


@dataclass(frozen=True)
class Anchors:
    """Where the blocks of a micro-batch stand, [R, N] each: they see [start, anchor) where `keep`, else nothing.

    The kept ones come first in a row, and ascend.
    """

    anchor: Tensor
    start: Tensor
    keep: Tensor


def visible(anchors: Anchors, length: int, geometry: Geometry, window: int | None, tiling: Tilings) -> Visible:
    """Bounds from the anchors alone, on their device, without a host synchronisation."""
    size = geometry.block_size
    offset = torch.arange(size, device=anchors.anchor.device)
    high = torch.where(anchors.keep, anchors.anchor, 0)[..., None].expand(-1, -1, size)
    low = torch.where(anchors.keep, anchors.start, 0)[..., None].expand(-1, -1, size)
    if window is not None:
        low = torch.maximum(low, high + offset - window + 1)
    low, high = torch.minimum(low, high).flatten(1), high.flatten(1)
    edges = {}
    for name, one in (("forward", tiling.forward), ("query", tiling.query), ("context", tiling.context)):
        edges[name] = tile_edges(low, high, geometry.slots(one.rows, geometry.pack(one.rows)))
    return Visible(
        low.int().contiguous(), high.int().contiguous(),
        key_bounds(edges["forward"], tiling.forward.keys), key_bounds(edges["query"], tiling.query.keys),
        query_bounds(edges["context"], tiling.context.keys, length),
    )  # fmt: skip


@dataclass(frozen=True)
class TileEdges:
    """Of every query tile, int64 [R, tiles]: what any of its slots sees, [some_low, some_high), and all see, [all_low,
    all_high)."""

    some_low: Tensor
    some_high: Tensor
    all_low: Tensor
    all_high: Tensor


def tile_edges(low: Tensor, high: Tensor, slots: int) -> TileEdges:
    missing = -low.shape[1] % slots
    sees = high > low
    far = torch.iinfo(torch.int64).max // 2

    def tiles(value: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(value, (0, missing), value=fill).unflatten(1, (-1, slots))

    some_high = tiles(torch.where(sees, high, 0), 0).amax(-1)
    some_low = torch.minimum(tiles(torch.where(sees, low, far), far).amin(-1), some_high)
    return TileEdges(some_low, some_high, tiles(low, 0).amax(-1), tiles(high, far).amin(-1))


def key_bounds(edges: TileEdges, keys: int) -> Tensor:
    begin, end = edges.some_low // keys, (edges.some_high + keys - 1) // keys
    begin = torch.minimum(begin, end)
    full = torch.minimum(torch.maximum((edges.all_low + keys - 1) // keys, begin), end)
    edge = torch.minimum(torch.maximum(edges.all_high // keys, full), end)
    return torch.stack([begin, full, edge, end], dim=-1).int().contiguous()


def query_bounds(edges: TileEdges, keys: int, length: int) -> Tensor:
    tile = torch.arange(-(-length // keys), device=edges.some_low.device)[:, None] * keys  # [key tiles, 1]
    some = (tile < edges.some_high[:, None]) & (tile + keys > edges.some_low[:, None])  # [R, key tiles, query tiles]
    whole = (tile >= edges.all_low[:, None]) & (tile + keys <= edges.all_high[:, None]) & some
    begin, end = first_and_last(some)
    full, edge = first_and_last(whole)
    none = full == edge
    full, edge = torch.where(none, end, full), torch.where(none, end, edge)
    return torch.stack([begin, full, edge, end], dim=-1).int().contiguous()


def first_and_last(found: Tensor) -> tuple[Tensor, Tensor]:
    """Of a run of True in the last dimension: its begin and one past its end; 0 and 0 where there is none."""
    number = found.to(torch.int8)
    begin = number.argmax(-1)
    end = found.shape[-1] - number.flip(-1).argmax(-1)
    return begin, torch.where(found.any(-1), end, begin)
