"""The small batch that proofs run on: whole beginnings of documents, and the features that belong to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftline.data.excerpt import KEPT_ANSWER_TOKENS, excerpt, excerpt_of
from draftline.data.stream import RowStream
from draftline.records import FeatureBatch, PackedBatch, TokenRow

LENGTHS, PROMPTS = (50, 9, 70, 12, 30, 9), (10, 4, 5, 6, 25, 4)


def stream_of(rows_per_batch: int = 3) -> RowStream:
    """Documents of distinct tokens: token t of the data is 100 + t."""
    rows, first = [], 100
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        ids = np.arange(first, first + length, dtype=np.int32)
        rows.append(TokenRow(ids, np.arange(length) >= prompt, f"data:{len(rows)}"))
        first += length
    return RowStream(rows, row_length=96, rows_per_batch=rows_per_batch, seed=0, epochs=1)


def featured(packed: PackedBatch) -> FeatureBatch:
    """Features that say which token they are of; nonsense on padding."""
    token = torch.from_numpy(np.where(packed.document < 0, 10**6, packed.token)).float()
    return FeatureBatch(packed, torch.stack([token, -token], -1), token[..., None] + 0.5)


def test_a_batch_is_cut_to_its_shortest_documents_with_their_own_features() -> None:
    batch = featured(stream_of().batch(0))
    assert int((batch.packed.document >= 0).sum()) == sum(LENGTHS)  # all of the data, so that the choice is known
    cut = excerpt_of(batch)
    kept = [min(length, prompt + KEPT_ANSWER_TOKENS) for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    assert sorted(kept) == [9, 9, 12, 30, 37, 42]
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    expected = [(1, 5), (3,), (4,), (2,)]  # documents that may stand there: two have 9 tokens
    packed = cut.packed
    found = []
    for row, order in ((0, 0), (0, 1), (1, 0), (1, 1)):
        here = packed.document[row] == order
        token = packed.token[row][here]
        number = int(np.searchsorted(starts, token[0], "right")) - 1
        found.append(number)
        assert token.tolist() == list(range(starts[number], starts[number] + kept[number]))
        assert packed.ids[row][here].tolist() == (100 + token).tolist()
        assert packed.position[row][here].tolist() == list(range(kept[number]))
        assert packed.loss_mask[row][here].tolist() == [p >= PROMPTS[number] for p in range(kept[number])]
        assert cut.taps[row][torch.from_numpy(here)].tolist() == [[t, -t] for t in token.tolist()]
        assert cut.final is not None
        assert cut.final[row][torch.from_numpy(here)].flatten().tolist() == (token + 0.5).tolist()
    assert all(number in allowed for number, allowed in zip(found, expected, strict=True))
    assert cut.packed.ids.shape == (2, kept[4] + kept[2])  # row 0 has 21 tokens and is padded
    assert cut.taps[0, 21:].abs().sum() == 0 and (packed.document[0, 21:] == -1).all()
    assert not packed.loss_mask[0, 21:].any()


def test_a_batch_and_the_stream_it_came_from_give_the_same_documents() -> None:
    stream = stream_of()
    from_stream, from_batch = excerpt(stream), excerpt_of(featured(stream.batch(0))).packed
    for field in ("ids", "loss_mask", "document", "position", "token"):
        one, other = getattr(from_stream, field), getattr(from_batch, field)
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[0, 9:], other[0, 9:])  # row 0 begins with either of the two of 9 tokens


def test_data_without_a_supervised_token_is_refused() -> None:
    rows = [TokenRow(np.arange(5, dtype=np.int32), np.zeros(5, dtype=bool), "data:0")]
    stream = RowStream(rows, row_length=8, rows_per_batch=1, seed=0, epochs=1)
    with pytest.raises(ValueError, match="no document of the data has a supervised token"):
        excerpt_of(featured(stream.batch(0)))
