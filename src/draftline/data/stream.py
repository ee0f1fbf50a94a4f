"""The training stream: every epoch's documents, shuffled and packed, as batches of one shape with access by number.

Batch i is a pure function of rows, geometry, seed and i, so the number of the next batch is all that a resume needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np

from draftline.data.packing import pack
from draftline.records import PackedBatch, TokenRow

PADDING_ID = 0  # any id with an embedding row; `document` is -1 there, so nothing looks at it


class RowStream:
    """All micro-batches of a run.

    An epoch shuffles the documents with a generator seeded by [seed, epoch], packs them, and shuffles the packed rows.
    The epochs' rows follow each other without a gap and every `rows_per_batch` of them are a batch: a batch may hold
    the end of one epoch and the start of the next, so nothing is dropped and no batch is lighter than the others. Only
    the last batch of the run may be completed with rows of padding. One shape throughout: [rows_per_batch, row_length].

    rows: documents of 1..row_length tokens; stored flat, about 5 bytes a token. `where` says where each came from.
    Raises ValueError where there are no rows or one is too long.
    """

    def __init__(self, rows: Sequence[TokenRow], row_length: int, rows_per_batch: int, seed: int, epochs: int) -> None:
        if not rows:
            raise ValueError("a stream needs at least one row")
        self.row_length = row_length
        self.rows_per_batch = rows_per_batch
        self.where = tuple(row.where for row in rows)
        self.lengths = np.array([len(row.ids) for row in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids = np.concatenate([row.ids for row in rows]).astype(np.int32, copy=False)
        self.loss_mask = np.concatenate([row.loss_mask for row in rows]).astype(bool, copy=False)
        layouts = [self.epoch_layout(seed, epoch) for epoch in range(epochs)]
        self.order = np.concatenate([documents for documents, _ in layouts])  # document numbers, row after row
        row_sizes = np.concatenate([sizes for _, sizes in layouts])
        self.row_starts = np.concatenate([[0], np.cumsum(row_sizes)])  # where each row begins in `order`
        self.epoch_rows = np.cumsum([len(sizes) for _, sizes in layouts])  # rows up to the end of each epoch

    def __len__(self) -> int:
        """Micro-batches over all epochs."""
        return -(-len(self.row_starts[1:]) // self.rows_per_batch)

    @property
    def fill_share(self) -> float:
        """Share of all batches' tokens that are documents, not padding."""
        tokens = int(self.lengths.sum()) * len(self.epoch_rows)
        return tokens / (len(self) * self.rows_per_batch * self.row_length)

    @cached_property
    def content_hash(self) -> str:
        """sha256 over every document's length, ids and mask, in order: a resume with other data is refused by it."""
        digest = hashlib.sha256()
        for array, kind in ((self.lengths, "<i8"), (self.ids, "<i4"), (self.loss_mask, "|b1")):
            digest.update(np.ascontiguousarray(array, dtype=kind).data)
        return digest.hexdigest()

    def epoch(self, index: int) -> int:
        """Epoch, from 0, of the first row of batch `index`."""
        return int(np.searchsorted(self.epoch_rows, index * self.rows_per_batch, side="right"))

    def epoch_layout(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(document numbers row after row [n], documents per row) of one epoch, both int32."""
        generator = np.random.default_rng([seed, epoch])
        documents = generator.permutation(len(self.lengths))
        packed = pack(self.lengths[documents], self.row_length)
        shuffled = [packed[row] for row in generator.permutation(len(packed))]
        places = np.fromiter(chain.from_iterable(shuffled), dtype=np.int32, count=len(documents))
        return documents[places].astype(np.int32), np.array([len(row) for row in shuffled], dtype=np.int32)

    def documents(self, row: int) -> np.ndarray:
        """Numbers of the documents in a packed row; none past the end of the run."""
        if row + 1 >= len(self.row_starts):
            return self.order[:0]
        return self.order[self.row_starts[row] : self.row_starts[row + 1]]

    def batch(self, index: int) -> PackedBatch:
        """Micro-batch `index` of 0..len-1. Raises IndexError outside of that."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a stream of {len(self)}")
        shape = (self.rows_per_batch, self.row_length)
        ids = np.full(shape, PADDING_ID, dtype=np.int64)
        loss_mask = np.zeros(shape, dtype=bool)
        document = np.full(shape, -1, dtype=np.int64)
        position = np.zeros(shape, dtype=np.int64)
        token = np.full(shape, -1, dtype=np.int64)
        for row in range(self.rows_per_batch):
            at = 0
            for number, which in enumerate(self.documents(index * self.rows_per_batch + row)):
                length, start = int(self.lengths[which]), int(self.starts[which])
                here = (row, slice(at, at + length))
                ids[here] = self.ids[start : start + length]
                loss_mask[here] = self.loss_mask[start : start + length]
                document[here] = number
                position[here] = np.arange(length)
                token[here] = np.arange(start, start + length)
                at += length
        return PackedBatch(index, ids, loss_mask, document, position, token)
