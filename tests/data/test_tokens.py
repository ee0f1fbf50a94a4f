"""Tokenising in pieces gives what the tokenizer itself gives for the whole text, or is not done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from chat_tokenizers import STOP, TRAILING_SPACE, byte_bpe, control_ids, dummy_prefix_tokenizer, tiny_tokenizer
from draftline.data.tokens import PieceTokenizer

FRAGMENTS = [
    "<|im_end|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end",
    "|>",
    " ",
    "\n",
    "\n\n",
    "the",
    " dog",
    "é",
    "猫",
    ":",
]


def in_pieces(keeps_line_breaks_together: bool) -> PieceTokenizer:
    tokenizer = byte_bpe(keeps_line_breaks_together=keeps_line_breaks_together)
    return PieceTokenizer(tokenizer, control_ids(tokenizer, "<|im_end|>", "<|eot|>"))


BY_SPLITTER = {together: in_pieces(together) for together in (True, False)}


@pytest.mark.parametrize("keeps_line_breaks_together", [True, False])
@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), max_size=4))
def test_pieces_equal_the_whole(keeps_line_breaks_together: bool, texts: list[str]) -> None:
    tokenise = BY_SPLITTER[keeps_line_breaks_together]
    tokenizer = tokenise.tokenizer
    assert set(tokenise.separators) == {"<|im_end|>", "<|eot|>"}
    assert tokenise(texts) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_each_distinct_piece_is_tokenised_once() -> None:
    seen: list[str] = []

    class Watched(PieceTokenizer):
        def whole(self, texts: list[str]) -> list[list[int]]:
            seen.extend(texts)
            return super().whole(texts)

    tokenise = Watched(tiny_tokenizer(), [STOP])
    seen.clear()  # the probes
    assert tokenise(["a b </s> c", "a b </s> c </s> d"]) == [[8, 9, 3, 10], [8, 9, 3, 10, 3, 11]]
    assert sorted(seen) == [" c", " c ", " d", "a b "]


def test_a_dummy_prefix_on_the_first_piece_forbids_pieces() -> None:
    tokenizer = dummy_prefix_tokenizer(TRAILING_SPACE)
    tokenise = PieceTokenizer(tokenizer, [tokenizer.eos_token_id])
    assert tokenise.separators == {}
    text = "the dog<|endoftext|>the cat"
    assert tokenise([text]) == [tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|stop|>", lstrip=True, normalized=False),
        AddedToken("<|stop|>", rstrip=True, normalized=False),
        AddedToken("<|stop|>", single_word=True, normalized=False),
        AddedToken("<|stop|>", normalized=True),
    ],
)
def test_a_token_that_looks_at_its_neighbours_is_no_separator(token: AddedToken) -> None:
    tokenizer = byte_bpe()
    tokenizer.add_tokens([token])
    assert PieceTokenizer(tokenizer, [tokenizer.get_vocab()["<|stop|>"]]).separators == {}


def test_ordinary_words_and_parts_of_other_tokens_are_no_separators() -> None:
    tokenizer = byte_bpe()
    the = tokenizer("the", add_special_tokens=False)["input_ids"][0]
    assert PieceTokenizer(tokenizer, [the]).separators == {}
    tokenizer.add_tokens([AddedToken("<|im_end|>word", normalized=False)])
    assert PieceTokenizer(tokenizer, control_ids(tokenizer, "<|im_end|>")).separators == {}
