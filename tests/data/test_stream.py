"""The stream: every epoch holds every document once, every batch has one shape, and a number is all a resume needs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.data.stream import RowStream
from draftline.records import PackedBatch, TokenRow

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def documents_of(lengths: list[int]) -> list[TokenRow]:
    """Documents that can be told apart: number n has ids n*100, n*100+1, ..."""
    return [
        TokenRow(np.arange(length, dtype=np.int32) + 100 * (number + 1), np.arange(length) % 3 == 1, "t")
        for number, length in enumerate(lengths)
    ]


def contents(batches: list[PackedBatch]) -> Counter[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """Every document of the batches, cut out by its number, with its mask; its positions are checked on the way."""
    found: Counter[tuple[tuple[int, ...], tuple[bool, ...]]] = Counter()
    for batch in batches:
        for row in range(len(batch.ids)):
            for number in range(batch.document[row].max() + 1):
                here = np.flatnonzero(batch.document[row] == number)
                assert here.tolist() == list(range(here[0], here[0] + len(here)))
                assert batch.position[row, here].tolist() == list(range(len(here)))
                found[tuple(batch.ids[row, here].tolist()), tuple(batch.loss_mask[row, here].tolist())] += 1
    return found


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_every_document_once_an_epoch(lengths: list[int], rows_per_batch: int, epochs: int, seed: int) -> None:
    rows = documents_of(lengths)
    stream = RowStream(rows, 16, rows_per_batch, seed, epochs)
    batches = [stream.batch(index) for index in range(len(stream))]
    once = Counter((tuple(row.ids.tolist()), tuple(row.loss_mask.tolist())) for row in rows)
    assert contents(batches) == Counter({document: epochs for document in once})
    assert sum(batch.tokens for batch in batches) == epochs * sum(lengths)
    first_rows = int(stream.epoch_rows[0])
    if first_rows % rows_per_batch == 0:
        assert contents(batches[: first_rows // rows_per_batch]) == once


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3), st.data())
def test_a_resumed_stream_is_the_same_stream(lengths: list[int], rows: int, epochs: int, data: st.DataObject) -> None:
    through = RowStream(documents_of(lengths), 16, rows, 5, epochs)
    resumed = RowStream(documents_of(lengths), 16, rows, 5, epochs)
    assert resumed.content_hash == through.content_hash
    expected = [through.batch(index) for index in range(len(through))]
    start = data.draw(st.integers(0, len(through) - 1))
    for index in range(start, len(resumed)):
        assert arrays_of(resumed.batch(index)) == arrays_of(expected[index])


def arrays_of(batch: PackedBatch) -> list[object]:
    return [batch.index, *(array.tolist() for array in (batch.ids, batch.loss_mask, batch.document, batch.position))]


def test_fourteen_lengths_give_one_shape() -> None:
    """Case 16: what is compiled sees one shape, also where the last batch is not full."""
    stream = RowStream(documents_of([*range(1, 15)]), 16, 4, 0, 3)
    batches = [stream.batch(index) for index in range(len(stream))]
    arrays = [array for batch in batches for array in (batch.ids, batch.loss_mask, batch.document, batch.position)]
    assert {array.shape for array in arrays} == {(4, 16)}
    assert {array.dtype.name for array in arrays} == {"int64", "bool"}


def test_only_the_last_batch_of_the_run_is_completed_with_padding() -> None:
    stream = RowStream(documents_of([16] * 5), 16, 4, 0, 3)  # 15 rows, one document each
    assert len(stream) == 4
    assert [int((stream.batch(index).document[:, 0] >= 0).sum()) for index in range(4)] == [4, 4, 4, 3]
    last = stream.batch(3)
    assert (last.ids[3] == 0).all() and not last.loss_mask[3].any() and (last.document[3] == -1).all()
    assert [stream.epoch(index) for index in range(4)] == [0, 0, 1, 2]
    assert stream.fill_share == 15 / 16


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int) -> list[list[int]]:
        stream = RowStream(documents_of([16] * 20), 16, 20, seed, 2)
        return [stream.batch(index).ids[:, 0].tolist() for index in range(2)]

    (first, second), (other, _) = order(0), order(1)
    assert sorted(first) == sorted(second) == sorted(other)
    assert first != second and first != other and first != sorted(first)


def test_a_batch_outside_the_stream() -> None:
    stream = RowStream(documents_of([3]), 16, 1, 0, 1)
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"batch {index} of a stream of 1"):
            stream.batch(index)


def test_rows_longer_than_the_row_are_a_bug() -> None:
    with pytest.raises(ValueError, match=r"must lie in 1\.\.16"):
        RowStream(documents_of([17]), 16, 1, 0, 1)
    with pytest.raises(ValueError, match="at least one row"):
        RowStream([], 16, 1, 0, 1)


def test_the_hash_sees_ids_masks_and_borders() -> None:
    def digest(*documents: tuple[list[int], list[bool]]) -> str:
        rows = [TokenRow(np.array(ids, np.int32), np.array(mask), "t") for ids, mask in documents]
        return RowStream(rows, 16, 1, 0, 1).content_hash

    t, f = True, False
    base = digest(([1, 2], [f, t]), ([3], [t]))
    assert base == digest(([1, 2], [f, t]), ([3], [t]))
    others = {
        digest(([1, 4], [f, t]), ([3], [t])),
        digest(([1, 2], [t, t]), ([3], [t])),
        digest(([1], [f]), ([2, 3], [t, t])),
        digest(([3], [t]), ([1, 2], [f, t])),
    }
    assert len(others | {base}) == 5
