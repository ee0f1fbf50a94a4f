"""Token rows from conversations: the tokens that the target sees when it is served, with a mask on its own words.

An engine tokenises the prompt P_i of a turn and the target generates the answer token by token. So a row is always
`prompt_ids(messages before the turn)` followed by answer tokens; tokenising the whole text at once may put one token
across the start of the answer, which no engine ever does. Several turns share one row exactly where the later turn's
prompt begins with the earlier turn's tokens; a turn of which the template later shows something else (a thinking
template that strips earlier reasoning) becomes a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from draftline.data.template import ChatTemplate, Turn, Unusable
from draftline.data.tokens import PieceTokenizer
from draftline.records import Conversation, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETOKENISED = "answer text tokenised again gives other ids than were generated"
OTHER_TEXT = "generated ids do not spell the answer's text"
APART = "answer tokenised apart from its prompt, since a token would cross the border"
NO_STOP = "answer without a stop token at its end"
SPELT_STOP = "answer text spells out a stop token, cut there"
OWN_ROW = "assistant turn rendered as a row of its own"
CUT = "row cut at the maximum length"


@dataclass(slots=True)
class Rendered:
    """One conversation's rows, or the reason why there are none, and what is worth counting about it."""

    rows: list[TokenRow] = field(default_factory=list)
    unusable: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Span:
    """A turn in tokens: the target reads `prompt` and generates `answer`."""

    prompt: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


class ChatRenderer:
    """Renders conversations with the target's tokenizer and chat template.

    stop_ids: the tokens at which the target's generation ends; the first of them in an answer is its end of turn.
    max_length: rows are cut on the right at this many tokens.
    Raises InputError where the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        template_kwargs: Mapping[str, Any],
        max_length: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.max_length = max_length
        stop_texts = [str(tokenizer.convert_ids_to_tokens(stop)) for stop in sorted(stop_ids)]
        self.template = ChatTemplate(tokenizer, template_kwargs, stop_texts)
        self.tokenise = PieceTokenizer(tokenizer, sorted(stop_ids))
        self.control_ids = frozenset(tokenizer.get_added_vocab().values()) | stop_ids
        self.vocabulary = len(tokenizer)
        self.blank: dict[int, bool] = {}  # token -> whether it is white space only, as asked for

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Tokens of the prompt for the next answer, as an engine makes them; Unusable where the template refuses."""
        return self.tokenise([self.template.render(messages, True)])[0]

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """The conversation's rows; raises Unusable with the reason where there are none."""
        rendered = self.render([conversation])[0]
        if rendered.unusable is not None:
            raise Unusable(rendered.unusable)
        return rendered.rows

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """Many conversations at once: their texts go to the tokenizer in one batch."""
        turns = [self.turns(conversation) for conversation in conversations]
        wanted = [turn for found in turns if isinstance(found, list) for turn in found]
        ids = self.tokenise([text for turn in wanted for text in (turn.prompt, turn.prompt + turn.answer)])
        pairs = iter(zip(ids[::2], ids[1::2], strict=True))
        return [
            Rendered(unusable=found.reason)
            if isinstance(found, Unusable)
            else self.assemble(conversation, [(turn, *next(pairs)) for turn in found])
            for conversation, found in zip(conversations, turns, strict=True)
        ]

    def turns(self, conversation: Conversation) -> list[Turn] | Unusable:
        try:
            return self.template.turns(conversation.messages)
        except Unusable as unusable:
            return unusable

    def assemble(self, conversation: Conversation, turns: list[tuple[Turn, list[int], list[int]]]) -> Rendered:
        rendered = Rendered()
        spans, reasons = [], []
        for turn, prompt, full in turns:
            last = turn is turns[-1][0]
            try:
                answer = self.answer(conversation, turn, prompt, full, last, rendered.notes)
                spans.append(Span(prompt, answer))
            except Unusable as unusable:
                reasons.append(unusable.reason)
        for row in merge(spans):
            try:
                rendered.rows.append(self.token_row(row, conversation.where, rendered.notes))
            except Unusable as unusable:
                reasons.append(unusable.reason)
        if not rendered.rows:
            return Rendered(unusable=reasons[0])
        rendered.rows.reverse()  # merged from the last turn backwards
        rendered.notes += [OWN_ROW] * (len(rendered.rows) - 1)
        rendered.notes += [f"assistant turn skipped: {reason}" for reason in reasons]
        return rendered

    def answer(
        self, conversation: Conversation, turn: Turn, prompt: list[int], full: list[int], last: bool, notes: list[str]
    ) -> list[int]:
        """The turn's answer in tokens, end of turn included; raises Unusable where there is nothing to learn from."""
        generated = conversation.answer_ids if last else None
        finished = conversation.finished or not last
        if turn.unusable is not None and (generated is None or not turn.prompt):
            raise Unusable(turn.unusable)
        content, end = self.split(turn, prompt, full, notes) if turn.unusable is None else ([], [])
        if generated is not None:
            self.compare(conversation, turn, generated, content, notes)
            content, end = self.split_generated(generated)
        if not content:
            raise Unusable("empty answer")
        if finished and self.stop_ids.isdisjoint(end):
            notes.append(NO_STOP)
        return content + end if finished else content

    def split(self, turn: Turn, prompt: list[int], full: list[int], notes: list[str]) -> tuple[list[int], list[int]]:
        """Answer tokens and end-of-turn token (none or one) of the template's text."""
        if starts(full, prompt):
            answer = full[len(prompt) :]
        else:
            answer = self.continuation(prompt, turn.answer)
            notes.append(APART)
        stop = next((at for at, token in enumerate(answer) if token in self.stop_ids), None)
        if stop is None:
            return self.split_unstopped(answer)
        if not all(self.is_filler(token) for token in answer[stop + 1 :]):
            notes.append(SPELT_STOP)  # generation ends at the first stop token, whatever the text says after it
        return answer[:stop], answer[stop : stop + 1]

    def split_unstopped(self, answer: list[int]) -> tuple[list[int], list[int]]:
        """Without a stop token the template's ending is the first control token of the run that closes the answer."""
        start = len(answer)
        while start and self.is_filler(answer[start - 1]):
            start -= 1
        closing = next((at for at in range(start, len(answer)) if answer[at] in self.control_ids), None)
        return (answer, []) if closing is None else (answer[:closing], answer[closing : closing + 1])

    def split_generated(self, generated: tuple[int, ...]) -> tuple[list[int], list[int]]:
        if max(generated, default=0) >= self.vocabulary:
            raise Unusable("answer ids outside the vocabulary")
        ends = bool(generated) and generated[-1] in self.stop_ids
        return (list(generated[:-1]), [generated[-1]]) if ends else (list(generated), [])

    def compare(
        self, conversation: Conversation, turn: Turn, generated: tuple[int, ...], content: list[int], notes: list[str]
    ) -> None:
        """Note where the answer's text and the generated ids part (CASES 22): the ids are used in any case."""
        spoken = list(generated[:-1] if generated and generated[-1] in self.stop_ids else generated)
        if turn.unusable is not None or content == spoken or max(generated, default=0) >= self.vocabulary:
            return
        notes.append(RETOKENISED)
        text = conversation.messages[turn.index].get("content")
        if isinstance(text, str) and self.spell(spoken, skip_special_tokens=True).strip() != text.strip():
            notes.append(OTHER_TEXT)

    def continuation(self, prompt: list[int], text: str) -> list[int]:
        """Tokens of a text that follows a prompt, tokenised apart from it.

        Tokenizers of the sentencepiece kind put a dummy prefix before a text, which would spell " Hello" for "Hello";
        so the text is also tokenised behind an anchor, and the tokens taken are those that spell it where it stands.
        """
        anchors = ["", "\n", *self.template.stop_texts[:1]]
        ids = self.tokenise([anchor + follower for anchor in anchors for follower in ("", text)])
        behind = [both[len(anchor) :] for anchor, both in zip(ids[::2], ids[1::2], strict=True) if starts(both, anchor)]
        tail = prompt[-8:]
        wanted = self.spell(tail) + text
        return next((answer for answer in behind if self.spell(tail + answer) == wanted), behind[0])

    def spell(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens, clean_up_tokenization_spaces=False))

    def is_filler(self, token: int) -> bool:
        """A control token or white space: what templates write around answers."""
        if token in self.control_ids:
            return True
        if token not in self.blank:
            self.blank[token] = not self.spell([token]).strip()
        return self.blank[token]

    def token_row(self, spans: list[Span], where: str, notes: list[str]) -> TokenRow:
        """One row from the spans that share it, the last turn's first; raises Unusable where no anchor is eligible."""
        ids = np.array(spans[0].ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=bool)
        for span in spans:
            mask[len(span.prompt) : len(span.prompt) + len(span.answer)] = True
        kept = mask[: self.max_length]
        if not kept.any():
            raise Unusable("answer truncated away")
        if not (kept[:-1] & kept[1:]).any():  # an anchor needs M_a = M_{a+1} = 1 (SPEC 4)
            raise Unusable("fewer than two supervised tokens")
        if len(ids) > self.max_length:
            notes.append(CUT)
        return TokenRow(ids[: self.max_length].copy(), kept.copy(), where)


def starts(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def merge(spans: list[Span]) -> list[list[Span]]:
    """Group turns into rows, last turn first: a turn joins the first row whose tokens begin with its own."""
    rows: list[tuple[list[int], list[Span]]] = []
    for span in reversed(spans):
        ids = span.ids
        for row_ids, members in rows:
            if starts(row_ids, ids):
                members.append(span)
                break
        else:
            rows.append((ids, [span]))
    return [members for _, members in rows]
