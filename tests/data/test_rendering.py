"""A data set as a whole: counts by reason, the limit, and the warning about thinking (case 20)."""

from __future__ import annotations

import pytest

from chat_tokenizers import CHATML, QWEN3, STOP, byte_bpe, control_ids, tiny_tokenizer
from draftline.data.chat import RETOKENISED, ChatRenderer
from draftline.data.inspection import show_row, thinking_warning
from draftline.data.rendering import BATCH_CONVERSATIONS, render_conversations
from draftline.errors import InputError
from draftline.records import Conversation


def asked(answer: str, question: str = "a", ids: tuple[int, ...] | None = None) -> Conversation:
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return Conversation(messages, "t.jsonl:1", ids)


def tiny(max_length: int = 64) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(), frozenset({STOP}), {}, max_length)


def test_counts_by_reason() -> None:
    conversations = [asked("b"), asked(""), asked("b", "a a a a a a a a a"), asked("b", ids=(9, 8, 3))]
    data = render_conversations(conversations, tiny(12), 0.6, {"unknown speaker 'x'": 1})
    assert len(data.rows) == 2
    assert data.conversations == 5
    assert data.unusable == {"unknown speaker 'x'": 1, "empty answer": 1, "answer truncated away": 1}
    assert data.notes[RETOKENISED] == 1
    assert data.supervised_tokens == 5
    assert "        1 unusable: empty answer" in data.table().splitlines()


def test_too_many_unusable_conversations_end_the_run() -> None:
    conversations = [asked("b"), asked("b"), asked("b"), asked("")]
    assert len(render_conversations(conversations, tiny(), 0.25).rows) == 3
    with pytest.raises(InputError) as caught:
        render_conversations(conversations, tiny(), 0.24)
    assert caught.value.what.splitlines() == [
        "1 of 4 conversations (25.0%) cannot be trained on, the limit data.max_unusable_share is 24.0%:",
        "        1 unusable: empty answer",
    ]


@pytest.mark.parametrize("conversations", [[], [asked("")]])
def test_nothing_left_ends_the_run_at_any_limit(conversations: list[Conversation]) -> None:
    with pytest.raises(InputError, match="nothing is left to train on"):
        render_conversations(conversations, tiny(), 1.0)


def test_batches_do_not_change_the_rows() -> None:
    letters = "abcdefghijk"
    conversations = [
        asked(letters[number % 11], letters[number // 11 % 11]) for number in range(BATCH_CONVERSATIONS + 9)
    ]
    progress: list[int] = []
    data = render_conversations(conversations, tiny(), 0.0, on_progress=progress.append)
    assert progress == [BATCH_CONVERSATIONS, BATCH_CONVERSATIONS + 9]
    assert [row.ids.tolist() for row in data.rows] == [
        [2, 5, 8 + number // 11 % 11, 3, 2, 6, 8 + number % 11, 3] for number in range(len(conversations))
    ]


def test_a_row_shown_with_its_trained_tokens() -> None:
    tokenizer = byte_bpe(CHATML)
    renderer = ChatRenderer(tokenizer, control_ids(tokenizer, "<|im_end|>"), {}, 64)
    [row] = renderer.rows(asked("the dog", "what"))
    assert show_row(renderer.tokenizer, row) == (
        "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n⟦the dog<|im_end|>⟧"
    )


def qwen(**kwargs: bool) -> ChatRenderer:
    tokenizer = byte_bpe(QWEN3)
    return ChatRenderer(tokenizer, control_ids(tokenizer, "<|im_end|>"), kwargs, 64)


def test_a_thinking_template_on_answers_without_thinking_warns() -> None:
    warning = thinking_warning([asked(""), asked("the dog", "what")], qwen())
    assert warning is not None
    assert "1 of 2 answers" not in warning and "2 of 2 answers have no <think> part" in warning
    assert warning.endswith(
        "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nthe dog<|im_end|>⟧"
    )


@pytest.mark.parametrize(
    ("renderer", "answer"),
    [
        (qwen(enable_thinking=False), "the dog"),
        (qwen(enable_thinking=True), "the dog"),
        (qwen(), "<think>\nthe cat\n</think>\n\nthe dog"),
        (tiny(), "b"),
    ],
)
def test_no_warning_where_thinking_is_settled(renderer: ChatRenderer, answer: str) -> None:
    assert thinking_warning([asked(answer)], renderer) is None
