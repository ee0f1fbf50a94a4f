"""Tiles of block attention's kernels, chosen so that they fit a device's shared memory and its registers.

What a kernel takes of both is known once it is compiled, which needs no GPU: `tests/ahead` compiles every kernel of a
step for each kind of device and holds it against that device's limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from draftline.errors import InputError


@dataclass(frozen=True)
class Geometry:
    """What never changes from one micro-batch to the next."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    causal: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def pack(self, rows: int) -> int:
        """Heads that share a tile of `rows`: the whole group if its size is a power of two and a block still fits."""
        whole = self.group & (self.group - 1) == 0 and self.group * self.block_size <= rows
        return self.group if whole else 1

    def slots(self, rows: int, pack: int) -> int:
        """Slots of a tile: whole blocks only, so that a tile's own keys are its own slots."""
        return rows // pack // self.block_size * self.block_size


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work: rows of a query tile, keys of a key tile, warps, stages of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tilings:
    forward: Tiling
    query: Tiling
    context: Tiling
    own: Tiling


def tilings(geometry: Geometry, dtype: torch.dtype, hopper: bool) -> Tilings:
    """For heads up to 128 in half precision on Hopper as measured on an H200 (docs/LOG.md); the others fit every device
    from compute capability 8.0 on, and spill few registers. Raises InputError where no tile holds a whole block.
    """
    wide, exact = geometry.head_dim > 128, dtype == torch.float32
    largest = 16 if wide and exact else 32
    if geometry.head_dim > 256 or geometry.block_size > largest:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            f"blocks of {geometry.block_size} slots and heads of {geometry.head_dim} dimensions in {name}: on CUDA a "
            "head may have 256 dimensions, and a block 32 slots, or 16 with heads over 128 in float32",
            "choose another drafter.block_size or drafter.head_dim",
        )
    if exact or wide:
        one = Tiling(16, 16, warps=8 if wide else 4, stages=1) if exact else Tiling(32, 32, warps=8, stages=2)
        chosen = (one, one, one, one)
    elif hopper:
        queries, context = Tiling(rows=128, keys=64, warps=8, stages=3), Tiling(rows=32, keys=64, warps=4, stages=3)
        chosen = (queries, queries, context, Tiling(rows=16, keys=16, warps=2, stages=2))
    else:
        packed = geometry.pack(128) > 1  # else every row of a tile is a slot, whose own keys it holds too
        queries = Tiling(rows=128, keys=32, warps=8, stages=2) if packed else Tiling(32, 32, warps=4, stages=2)
        context = Tiling(rows=64, keys=64, warps=8, stages=2)
        chosen = (queries, queries, context, Tiling(rows=16, keys=16, warps=2, stages=2))
    return Tilings(*(with_room(one, geometry.block_size) for one in chosen))


def with_room(tiling: Tiling, block_size: int) -> Tiling:
    """Rows enough for a block: tiles are made of whole ones."""
    if block_size <= tiling.rows:
        return tiling
    return replace(tiling, rows=1 << (block_size - 1).bit_length(), warps=8)


def is_hopper(device: torch.device) -> bool:
    """An H100, H200 or GH200: compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
