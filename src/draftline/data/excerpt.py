"""A few of the data's documents, cut short, as one small batch: what proofs run on where a whole batch takes too
long."""

from __future__ import annotations

import numpy as np

from draftline.data.stream import PADDING_ID, RowStream
from draftline.records import PackedBatch

CANDIDATES = 256  # documents looked at
ROWS, DOCUMENTS_PER_ROW = 2, 2
KEPT_ANSWER_TOKENS = 32  # of each answer: two blocks of 16


def excerpt(stream: RowStream) -> PackedBatch:
    """Up to four documents with the shortest prompts among the first ones, two a row, longer answers cut. Of unequal
    lengths where there are such, so that padding is met.

    A causal target's features of a document's beginning do not depend on what follows, so nothing is lost by the cut.
    Raises ValueError where no document has a supervised token.
    """
    ends = {number: kept_length(stream, number) for number in range(min(CANDIDATES, len(stream.lengths)))}
    usable = sorted((number for number in ends if ends[number]), key=lambda number: ends[number])
    first = {ends[number]: number for number in reversed(usable)}  # of each length, ascending below
    unlike = sorted(first.values(), key=lambda number: ends[number])
    chosen = [*unlike, *(number for number in usable if number not in first.values())][: ROWS * DOCUMENTS_PER_ROW]
    if not chosen:
        raise ValueError("no document of the data has a supervised token")
    rows = [chosen[begin : begin + DOCUMENTS_PER_ROW] for begin in range(0, len(chosen), DOCUMENTS_PER_ROW)]
    return lay_out(stream, rows, ends)


def kept_length(stream: RowStream, number: int) -> int:
    """Tokens of a document up to KEPT_ANSWER_TOKENS past its first supervised one; 0 where there is none."""
    start, length = int(stream.starts[number]), int(stream.lengths[number])
    supervised = np.flatnonzero(stream.loss_mask[start : start + length])
    return min(length, int(supervised[0]) + KEPT_ANSWER_TOKENS) if len(supervised) else 0


def lay_out(stream: RowStream, rows: list[list[int]], lengths: dict[int, int]) -> PackedBatch:
    """Documents `rows`, each cut to its length, one after the other as packing would."""
    shape = (len(rows), max(sum(lengths[number] for number in row) for row in rows))
    ids, loss_mask = np.full(shape, PADDING_ID, dtype=np.int64), np.zeros(shape, dtype=bool)
    document, token = np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    position = np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        at = 0
        for order, number in enumerate(row):
            start, length = int(stream.starts[number]), lengths[number]
            here = (index, slice(at, at + length))
            ids[here], loss_mask[here] = stream.ids[start:][:length], stream.loss_mask[start:][:length]
            document[here], position[here], token[here] = order, np.arange(length), np.arange(start, start + length)
            at += length
    return PackedBatch(0, ids, loss_mask, document, position, token)
