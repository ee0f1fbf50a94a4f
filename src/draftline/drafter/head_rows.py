"""The slots that the head is multiplied with on CUDA, known on the host: those that carry weight, and no others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftline.drafter.anchors import SlotTargets, copy_together
from draftline.drafter.cost import CHUNK_LOGITS

TILE_ROWS = 128  # of a matrix product: chunks of whole tiles waste none, and begin at a multiple of 16 bytes


@dataclass(frozen=True)
class Chunk:
    """Rows [begin, end) of the supervised slots, and which of HeadRows.position hold their target's states."""

    rows: slice
    positions: slice


@dataclass(frozen=True)
class HeadRows:
    """n supervised slots of M = R*N blocks, in order, and the chunks in which they are multiplied with the head."""

    slot: Tensor  # int64 [n]: number among the M*K slots
    state: Tensor  # int64 [n]: number of its state among the M*B block states
    position: Tensor  # int64: number among R*S of each target state that a chunk needs, once a chunk; empty for ce
    teacher: Tensor  # int64 [n]: number of the slot's target state among its chunk's; empty for ce
    chunks: tuple[Chunk, ...]


def chunk_rows(vocabulary: int) -> int:
    """Rows of logits that a chunk has at most."""
    return max(1, CHUNK_LOGITS // (vocabulary * TILE_ROWS)) * TILE_ROWS


def chunk_slices(rows: int, limit: int) -> list[slice]:
    """Whole tiles of rows, spread evenly over the fewest chunks of up to `limit` rows."""
    tiles = -(-rows // TILE_ROWS)
    count = -(-tiles * TILE_ROWS // limit)
    edges = [min(rows, tiles * i // count * TILE_ROWS) for i in range(count + 1)] if count else [0]
    return [slice(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def head_rows(slots: SlotTargets, length: int, vocabulary: int, compares: bool, device: torch.device) -> HeadRows:
    """slots: on the host; length: S positions of a row. Neither side waits for the other."""
    supervised = slots.supervised.flatten(0, 1).numpy()
    rows = np.flatnonzero(supervised)
    states = rows + rows // supervised.shape[1] + 1
    parts = chunk_slices(len(rows), chunk_rows(vocabulary))
    wanted = rows[:0]
    if compares:  # as anchors.teacher_position, of the supervised slots and in numpy
        of_row = rows // slots.position[0].numel() * length
        wanted = of_row + np.maximum(slots.position.numpy().reshape(-1)[rows] - 1, 0)
    found = [numbered(wanted[part]) for part in parts]
    positions = np.concatenate([rows[:0], *(unique for unique, _ in found)])
    teachers = np.concatenate([rows[:0], *(number for _, number in found)])
    edges = np.cumsum([0, *(len(unique) for unique, _ in found)])
    chunks = tuple(
        Chunk(part, slice(int(begin), int(end))) for part, begin, end in zip(parts, edges, edges[1:], strict=False)
    )
    slot, state, position, teacher = copy_together((rows, states, positions, teachers), device)
    return HeadRows(slot, state, position, teacher, chunks)


def numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(each value once, ascending; the number of each value among them), as np.unique without its sorting."""
    if not len(values):
        return values, values
    first = values.min()
    there = np.zeros(values.max() - first + 1, dtype=bool)
    there[values - first] = True
    return np.flatnonzero(there) + first, (there.cumsum() - 1)[values - first]
