"""Tokenising many texts that begin alike, as the prompts of one conversation's turns do, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (
    "",
    "x",
    " x",
    "x ",
    "\nx",
    "x\n\n",
    "  ",
)  # around a separator: where joined and separate tokens could differ


class PieceTokenizer:
    """Token ids of rendered texts, equal to the tokenizer's own. The template writes all special tokens: none is added.

    The prompt of turn i holds the whole history, so tokenising every prompt costs the square of the number of turns.
    Texts are therefore cut at the stop tokens and each distinct piece of a batch is tokenised once. This is exact where
    the tokenizer takes a stop token out of the text before all else, which its flags say and probes confirm (a dummy
    prefix on the first piece only, for one, fails them); elsewhere whole texts are tokenised.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.separators = {text: token for text, token in self.plain_tokens(stop_ids) if self.separates(text, token)}
        longest_first = sorted(self.separators, key=len, reverse=True)
        self.cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def __call__(self, texts: list[str]) -> list[list[int]]:
        if self.cut is None:
            return self.whole(texts)
        cut_texts = [self.cut.split(text) for text in texts]  # every second part is a separator
        pieces = list(dict.fromkeys(piece for parts in cut_texts for piece in parts[::2]))
        ids = dict(zip(pieces, self.whole(pieces), strict=True))
        ids.update({text: [token] for text, token in self.separators.items()})
        return [[token for part in parts for token in ids[part]] for parts in cut_texts]

    def whole(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])

    def plain_tokens(self, ids: Iterable[int]) -> list[tuple[str, int]]:
        """Those of the tokens that are cut out of raw text as they are, and that no other such token contains."""
        added = self.tokenizer.added_tokens_decoder
        texts = [token.content for token in added.values()]
        return [
            (added[token].content, token)
            for token in ids
            if token in added
            and not (added[token].normalized or added[token].lstrip or added[token].rstrip or added[token].single_word)
            and sum(added[token].content in text for text in texts) == 1
        ]

    def separates(self, text: str, token: int) -> bool:
        pairs = [(left, right) for left in PROBES for right in PROBES]
        joined = self.whole([left + text + right for left, right in pairs])
        alone = dict(zip(PROBES, self.whole(list(PROBES)), strict=True))
        return joined == [[*alone[left], token, *alone[right]] for left, right in pairs]
