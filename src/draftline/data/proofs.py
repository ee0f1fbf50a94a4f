"""Proofs about rows: the template is this tokenizer's, and what is trained is what the assistant said.

Each returns the figure that proves it, or raises InputError with what was expected, what was found, the likely cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from draftline.data.stream import RowStream
from draftline.errors import InputError
from draftline.records import Conversation, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What the templates of known families write as control tokens. A piece of text of that look must be one token.
CONTROL_LOOK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>")
LEAST_FOREIGN_CHARS = 12  # shorter texts of others ("yes") turn up in answers by chance


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation and the number of one of its documents in the stream."""

    conversation: Conversation
    document: int


def row_of(stream: RowStream, document: int) -> TokenRow:
    """A document as it is trained on."""
    here = slice(int(stream.starts[document]), int(stream.starts[document] + stream.lengths[document]))
    return TokenRow(stream.ids[here], stream.loss_mask[here], stream.where[document])


def prove_supervision(stream: RowStream) -> str:
    """Every document has two supervised tokens that follow each other: an anchor and its first label (SPEC 4)."""
    pairs = stream.loss_mask[:-1] & stream.loss_mask[1:]
    border = stream.starts[1:-1] - 1  # a pair across two documents is none
    pairs = np.append(pairs, False)
    pairs[border] = False
    counts = np.add.reduceat(pairs, stream.starts[:-1], dtype=np.int64)
    if bare := np.flatnonzero(counts == 0).tolist():
        raise InputError(
            f"expected two supervised tokens in each of {len(counts):,} rows, found none in {len(bare):,}, the first "
            f"of them {stream.where[bare[0]]}",
            "likely rows that are all prompt: the loss mask of whoever made them is empty or shifted off the answer",
        )
    share = float(stream.loss_mask.mean())
    return f"{int(stream.loss_mask.sum()):,} of {len(stream.ids):,} tokens trained ({share:.0%}), in every row"


def prove_template(
    tokenizer: PreTrainedTokenizerBase, stream: RowStream, examples: Sequence[Example], stop_ids: frozenset[int]
) -> str:
    """Control tokens that the template writes are tokens of this tokenizer, and finished answers end with a stop
    token."""
    unknown = set(CONTROL_LOOK.findall(str(tokenizer.chat_template))) - set(tokenizer.get_vocab())
    finished, ended = 0, 0
    for example in examples:
        row = row_of(stream, example.document)
        refuse_spelt_controls(tokenizer, row, unknown)
        if example.conversation.finished and len(row.ids) < stream.row_length:  # neither of the two cuts
            finished += 1
            ended += any(int(row.ids[run.stop - 1]) in stop_ids for run in trained_runs(row))
    if finished and not ended:
        raise InputError(
            f"expected finished answers to end with one of the target's stop tokens {sorted(stop_ids)}, found none of "
            f"{finished} that does",
            "likely the chat template of another model: put the target's own beside its tokenizer",
        )
    return f"control tokens are single tokens; {ended} of {finished} finished answers end with a stop token"


def refuse_spelt_controls(tokenizer: PreTrainedTokenizerBase, row: TokenRow, unknown: set[str]) -> None:
    """unknown: what the template writes like control tokens, and the tokenizer does not know as such."""
    if not unknown:
        return
    prompt = row.ids[: int(np.flatnonzero(row.loss_mask)[0])] if row.loss_mask.any() else row.ids
    spelt = unknown & set(CONTROL_LOOK.findall(spell(tokenizer, prompt)))
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in prompt:
        spelt |= unknown
    if spelt:
        raise InputError(
            f"{row.where}: expected the template's {', '.join(sorted(spelt))} to be tokens of this tokenizer, found "
            "ordinary text",
            "likely the chat template of another model: put the target's own beside its tokenizer",
        )


def trained_runs(row: TokenRow) -> Iterator[slice]:
    """Each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield slice(int(start), int(stop))


def prove_loss_mask(tokenizer: PreTrainedTokenizerBase, stream: RowStream, examples: Sequence[Example]) -> str:
    """Trained tokens, decoded, are the assistant's own text, whole or cut at its end; where the row carries generated
    ids they are those."""
    tokens = 0
    for example in examples:
        row = row_of(stream, example.document)
        for run in trained_runs(row):
            check_run(tokenizer, row, run, example.conversation)
            tokens += run.stop - run.start
    return f"{tokens:,} trained tokens of {len(examples)} rows spell the assistant's own text"


def check_run(tokenizer: PreTrainedTokenizerBase, row: TokenRow, run: slice, conversation: Conversation) -> None:
    ids = row.ids[run].tolist()
    generated = list(conversation.answer_ids or ())
    if generated and ids == generated[: len(ids)]:
        return
    said = squeezed(spell(tokenizer, row.ids[run], skip_special_tokens=True))
    answers = [squeezed(text) for text in texts(conversation, own=True)]
    whole = run.stop < len(row.ids)  # else the row may have been cut inside the answer
    own = any(said == text or (not whole and text.startswith(said)) for text in answers)
    if own or not answers:
        return
    within = [text for text in answers if text and text in said]  # a template may add to an answer: <think></think>
    foreign = [
        text for text in map(squeezed, texts(conversation, own=False)) if len(text) >= LEAST_FOREIGN_CHARS
    ]  # fmt: skip
    if within and not any(text in said and not any(text in answer for answer in answers) for text in foreign):
        return
    raise InputError(
        f"{row.where}: expected the trained tokens to spell {answers[-1][:80]!r}, found {said[:80]!r}",
        "likely a loss mask that is shifted or covers the prompt, or generated ids of another tokenizer",
    )


def texts(conversation: Conversation, own: bool) -> Iterator[str]:
    """What the assistant said (with its reasoning), or what everyone else did."""
    for message in conversation.messages:
        if (message["role"] == "assistant") == own and not (own and message.get("tool_calls")):
            content: Any = message.get("content")
            if isinstance(content, str) and content.strip():
                yield content


def squeezed(text: str) -> str:
    """Without white space: templates trim and pad it, and tokenizers of words put it between tokens."""
    return "".join(text.split())


def spell(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, skip_special_tokens: bool = False) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens, clean_up_tokenization_spaces=False))
