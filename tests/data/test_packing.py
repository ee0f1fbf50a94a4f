"""Packing: whole documents, each exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.data.packing import fill_share, pack


@given(st.lists(st.integers(1, 64), max_size=300), st.integers(64, 128), st.integers(1, 8))
def test_every_document_once_whole_and_within_its_row(lengths: list[int], row_length: int, open_rows: int) -> None:
    rows = pack(lengths, row_length, open_rows)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[document] for document in row) <= row_length for row in rows)
    assert rows == pack(np.array(lengths, dtype=np.int32), row_length, open_rows)


def test_the_tightest_open_row_takes_a_document() -> None:
    assert pack([6, 7, 3, 4, 10], 10) == [[0, 3], [1, 2], [4]]


def test_the_fullest_row_is_closed_when_too_many_are_open() -> None:
    assert pack([6, 7, 3, 4], 10, open_rows=1) == [[0, 2], [1], [3]]  # 3 would fit row 1 more tightly, were it open


@pytest.mark.parametrize("lengths", [[3, 11], [0, 3]])
def test_impossible_lengths(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must lie in 1\.\.10"):
        pack(lengths, 10)


def test_documents_of_mixed_length_fill_their_rows() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.2, 0.5, 5000), 8, 540).astype(int)
    assert fill_share(lengths, len(pack(lengths, 2048)), 2048) > 0.98
    assert fill_share([], 0, 2048) == 0.0
    assert fill_share([3, 5], 2, 8) == 0.5
