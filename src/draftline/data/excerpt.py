"""A few documents, cut short, as one small batch: what proofs run on where a whole batch takes too long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from draftline.data.stream import PADDING_ID, RowStream
from draftline.records import FeatureBatch, PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATES = 256  # documents looked at
ROWS, DOCUMENTS_PER_ROW = 2, 2
KEPT_ANSWER_TOKENS = 32  # of each answer: two blocks of 16


@dataclass(frozen=True)
class Documents:
    """Documents one after the other in flat arrays [T]; `start`, `length` and `token` [D] say where each begins, how
    long it is, and which token of the data its first one is."""

    ids: np.ndarray
    loss_mask: np.ndarray
    start: np.ndarray
    length: np.ndarray
    token: np.ndarray

    def kept_length(self, number: int) -> int:
        """Tokens of a document up to KEPT_ANSWER_TOKENS past its first supervised one; 0 where there is none."""
        start, length = int(self.start[number]), int(self.length[number])
        supervised = np.flatnonzero(self.loss_mask[start : start + length])
        return min(length, int(supervised[0]) + KEPT_ANSWER_TOKENS) if len(supervised) else 0


def excerpt(stream: RowStream) -> PackedBatch:
    """Up to four documents with the shortest prompts among the first ones, two a row, longer answers cut. Of unequal
    lengths where there are such, so that padding is met.

    A causal target's features of a document's beginning do not depend on what follows, so nothing is lost by the cut.
    Raises ValueError where no document has a supervised token.
    """
    starts = stream.starts[:-1][:CANDIDATES]
    packed, _ = lay_out(Documents(stream.ids, stream.loss_mask, starts, stream.lengths[:CANDIDATES], starts))
    return packed


def excerpt_of(batch: FeatureBatch) -> FeatureBatch:
    """The same of a batch whose features are known: its shortest documents with theirs, zeros on padding."""
    packed, at = lay_out(documents_in(batch.packed))

    def taken(features: Tensor) -> Tensor:
        rows = features.flatten(0, 1)[np.maximum(at, 0)]
        rows[at < 0] = 0
        return rows

    return FeatureBatch(packed, taken(batch.taps), None if batch.final is None else taken(batch.final))


def documents_in(packed: PackedBatch) -> Documents:
    """The first CANDIDATES documents of a batch, as its rows hold them one after the other."""
    document, position = packed.document.reshape(-1), packed.position.reshape(-1)
    start = np.flatnonzero((document >= 0) & (position == 0))[:CANDIDATES]
    row = start // packed.ids.shape[1]
    length = np.array([int((packed.document[r] == document[s]).sum()) for r, s in zip(row, start, strict=True)])
    ids, loss_mask, token = (values.reshape(-1) for values in (packed.ids, packed.loss_mask, packed.token))
    return Documents(ids, loss_mask, start, length, token[start])


def lay_out(documents: Documents) -> tuple[PackedBatch, np.ndarray]:
    """The chosen documents, each cut to its length, one after the other as packing would; and for each place of the
    rows the index of its token in the flat arrays, -1 on padding."""
    ends = {number: documents.kept_length(number) for number in range(len(documents.start))}
    rows = choose(ends)
    shape = (len(rows), max(sum(ends[number] for number in row) for row in rows))
    at, token = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    document, position = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        begin = 0
        for order, number in enumerate(row):
            here, inside = (index, slice(begin, begin + ends[number])), np.arange(ends[number])
            at[here], token[here] = documents.start[number] + inside, documents.token[number] + inside
            document[here], position[here] = order, inside
            begin += ends[number]
    known = at >= 0
    ids = np.where(known, documents.ids[np.maximum(at, 0)], PADDING_ID).astype(np.int64)
    return PackedBatch(0, ids, known & documents.loss_mask[np.maximum(at, 0)], document, position, token), at


def choose(ends: dict[int, int]) -> list[list[int]]:
    """Rows of document numbers, the shortest first and as many unlike lengths as there are."""
    usable = sorted((number for number in ends if ends[number]), key=lambda number: ends[number])
    first = {ends[number]: number for number in reversed(usable)}  # of each length, ascending below
    unlike = sorted(first.values(), key=lambda number: ends[number])
    chosen = [*unlike, *(number for number in usable if number not in first.values())][: ROWS * DOCUMENTS_PER_ROW]
    if not chosen:
        raise ValueError("no document of the data has a supervised token")
    return [chosen[begin : begin + DOCUMENTS_PER_ROW] for begin in range(0, len(chosen), DOCUMENTS_PER_ROW)]
