"""Rows for people's eyes: decoded, with the trained tokens marked, and the warning that needs such a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from draftline.data.chat import ChatRenderer
from draftline.data.template import Unusable
from draftline.records import Conversation, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED_OPEN, TRAINED_CLOSE = "⟦", "⟧"  # brackets that chat data hardly ever contains
SHOWN_CHARS = 400  # of a run of tokens; the middle of a longer one is left out


def show_row(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> str:
    """The row's text with special tokens, each run of trained tokens between ⟦ and ⟧."""
    runs = decoded_runs(tokenizer, row)
    return "".join(f"{TRAINED_OPEN}{text}{TRAINED_CLOSE}" if trained else text for trained, text in runs)


def marked_row(tokenizer: PreTrainedTokenizerBase, row: TokenRow, styled: bool) -> Text:
    """The row for a console: trained tokens green where that can be seen, else between ⟦ and ⟧; long runs shortened."""
    shown = Text()
    for trained, text in decoded_runs(tokenizer, row):
        if len(text) > SHOWN_CHARS:
            left_out = len(text) - SHOWN_CHARS
            text = f"{text[: SHOWN_CHARS // 2]} [... {left_out:,} characters ...] {text[-SHOWN_CHARS // 2 :]}"
        marked = f"{TRAINED_OPEN}{text}{TRAINED_CLOSE}" if trained and not styled else text
        shown.append(marked, style="green" if trained else "dim")
    return shown


def decoded_runs(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> Iterator[tuple[bool, str]]:
    """(whether it is trained, its text) for each run of tokens that are all trained, or all not."""
    for trained, run in groupby(zip(row.ids.tolist(), row.loss_mask.tolist(), strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        yield trained, str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def thinking_warning(conversations: Sequence[Conversation], renderer: ChatRenderer) -> str | None:
    """A warning with one decoded row where the data were made without thinking and the template may think (CASES 20).

    That is when the template has an `enable_thinking` switch, the recipe leaves it at the template's own default, and
    most answers have no <think> part. The drafter would then learn text that the served target does not write.
    """
    template = renderer.template
    if not template.has_thinking_switch or "enable_thinking" in template.kwargs:
        return None
    answered = [conversation for conversation in conversations if last_answer(conversation) is not None]
    unthinking = [conversation for conversation in answered if not thinks(conversation)]
    if 2 * len(unthinking) <= len(answered):
        return None
    return (
        f"The chat template has a thinking switch that data.template_kwargs does not set, and {len(unthinking):,} of "
        f"{len(answered):,} answers have no <think> part. Set data.template_kwargs.enable_thinking to what the answers "
        f"were generated with. One row, trained tokens between {TRAINED_OPEN} and {TRAINED_CLOSE}:\n"
        f"{first_row(unthinking, renderer)}"
    )


def last_answer(conversation: Conversation) -> dict[str, object] | None:
    return next((message for message in reversed(conversation.messages) if message["role"] == "assistant"), None)


def thinks(conversation: Conversation) -> bool:
    answer = last_answer(conversation)
    return answer is not None and (bool(answer.get("reasoning_content")) or "</think>" in str(answer.get("content")))


def first_row(conversations: Sequence[Conversation], renderer: ChatRenderer) -> str:
    for conversation in conversations:
        try:
            return show_row(renderer.tokenizer, renderer.rows(conversation)[-1])
        except Unusable:
            continue
    return "(no row can be rendered)"
