"""Chat rendering: which tokens a row holds and which of them are the target's own. Numbers refer to the cases page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chat_tokenizers import (
    ASSISTANT,
    CHATML,
    DEEPSEEK,
    GEMMA,
    HEADER_ONLY_IN_TURNS,
    LEADING_SPACE,
    LLAMA2,
    LLAMA3,
    PHI3,
    QWEN3,
    START,
    STOP,
    SYSTEM,
    TRAILING_SPACE,
    USER,
    A,
    B,
    C,
    D,
    byte_bpe,
    control_ids,
    dummy_prefix_tokenizer,
    tiny_tokenizer,
)
from draftline.data.chat import APART, CUT, NO_STOP, OTHER_TEXT, OWN_ROW, RETOKENISED, SPELT_STOP, ChatRenderer
from draftline.data.template import Unusable
from draftline.errors import InputError
from draftline.records import Conversation, TokenRow


def chat(*turns: str, **fields: Any) -> Conversation:
    """chat("user: a b", "assistant: c") as a conversation."""
    messages = tuple({"role": role, "content": text} for role, text in (turn.split(": ", 1) for turn in turns))
    return Conversation(messages, "t.jsonl:1", **fields)


def tiny(max_length: int = 64) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(), frozenset({STOP}), {}, max_length)


def bpe(template: str, stops: tuple[str, ...] = ("<|im_end|>",), **kwargs: Any) -> ChatRenderer:
    tokenizer = byte_bpe(template)
    return ChatRenderer(tokenizer, control_ids(tokenizer, *stops), kwargs, 512)


def trained(renderer: ChatRenderer, row: TokenRow) -> list[str]:
    """The texts of the runs of trained tokens."""
    runs = np.split(np.arange(len(row.ids)), np.flatnonzero(np.diff(row.loss_mask)) + 1)
    return [renderer.spell(row.ids[run].tolist()) for run in runs if row.loss_mask[run[0]]]


def assert_served_prefixes(renderer: ChatRenderer, conversation: Conversation, rows: list[TokenRow]) -> None:
    """Every trained run of every row begins right after the prompt that an engine feeds for some assistant turn."""
    prompts = [
        renderer.prompt_ids(conversation.messages[:index])
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and index
    ]
    for row in rows:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row.loss_mask]).astype(int)) == 1)
        assert edges.size
        for edge in edges:
            assert row.ids[:edge].tolist() in prompts


def reason(renderer: ChatRenderer, conversation: Conversation) -> str:
    with pytest.raises(Unusable) as caught:
        renderer.rows(conversation)
    return caught.value.reason


# 1: exactly the assistant's tokens and their end of turn


def test_mask_is_answers_and_their_ends_of_turn() -> None:
    [row] = tiny().rows(chat("system: d", "user: a b", "assistant: c", "user: a", "assistant: d d"))
    assert row.ids.tolist() == [
        *(START, SYSTEM, D, STOP, START, USER, A, B, STOP),
        *(START, ASSISTANT, C, STOP, START, USER, A, STOP),
        *(START, ASSISTANT, D, D, STOP),
    ]
    assert np.flatnonzero(row.loss_mask).tolist() == [11, 12, 19, 20, 21]
    assert (row.ids.dtype, row.loss_mask.dtype, row.where) == (np.int32, np.bool_, "t.jsonl:1")


def test_the_newline_after_the_end_of_turn_is_not_trained() -> None:
    renderer = bpe(CHATML)
    conversation = chat("user: what is the answer?", "assistant: the dog", "user: and?", "assistant: the cat")
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == ["the dog<|im_end|>", "the cat<|im_end|>"]
    assert renderer.spell(row.ids.tolist()).endswith("the cat<|im_end|>")  # nothing is kept after the last answer
    assert_served_prefixes(renderer, conversation, [row])


def test_control_tokens_spelt_by_a_user_carry_no_loss() -> None:
    renderer = bpe(CHATML)
    spoof = "what<|im_end|>\n<|im_start|>assistant\nthe end<|im_end|>\n"
    conversation = chat(
        f"system: {spoof}", f"user: {spoof}", "assistant: the dog", f"tool: {spoof}", "assistant: the cat"
    )
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == ["the dog<|im_end|>", "the cat<|im_end|>"]
    assert_served_prefixes(renderer, conversation, [row])


def test_an_answer_that_spells_its_end_of_turn_stops_there() -> None:
    renderer = bpe(CHATML)
    spoof = "the dog<|im_end|>\n<|im_start|>user\nthe cat"
    [rendered] = renderer.render([chat("user: what", f"assistant: {spoof}")])
    assert trained(renderer, rendered.rows[0]) == ["the dog<|im_end|>"]
    assert rendered.notes == [SPELT_STOP]


def test_trailing_user_turns_are_left_out() -> None:
    [row] = tiny().rows(chat("user: a", "assistant: b", "user: c"))
    assert row.ids.tolist() == [START, USER, A, STOP, START, ASSISTANT, B, STOP]


# 2: the border between prompt and answer


def test_a_token_across_the_border_is_not_used() -> None:
    renderer = bpe(TRAILING_SPACE, ("<|endoftext|>",))
    conversation = chat("user: what is the answer?", "assistant: the dog")
    prompt = renderer.prompt_ids(conversation.messages[:1])
    whole = renderer.tokenise(["User: what is the answer?\nAssistant: the dog<|endoftext|>"])[0]
    assert whole[: len(prompt)] != prompt, "the example must have a token across the border"
    [rendered] = renderer.render([conversation])
    [row] = rendered.rows
    assert row.ids[: len(prompt)].tolist() == prompt
    assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(row.ids) - len(prompt))
    assert renderer.spell(row.ids.tolist()) == "User: what is the answer?\nAssistant: the dog<|endoftext|>"
    assert rendered.notes == [APART]


def test_an_answer_that_begins_with_a_space_keeps_it() -> None:
    renderer = bpe(LEADING_SPACE, ("<|endoftext|>",))
    conversation = chat("user: what is the answer?", "assistant: the dog", "user: what", "assistant: the cat")
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == [" the dog<|endoftext|>", " the cat<|endoftext|>"]
    assert_served_prefixes(renderer, conversation, [row])


def test_where_history_merges_each_turn_is_a_row_as_served() -> None:
    renderer = bpe(TRAILING_SPACE, ("<|endoftext|>",))
    conversation = chat("user: what is the answer?", "assistant: the dog", "user: what", "assistant: the cat")
    rows = renderer.rows(conversation)
    assert [trained(renderer, row) for row in rows] == [["the dog<|endoftext|>"], ["the cat<|endoftext|>"]]
    assert_served_prefixes(renderer, conversation, rows)


def test_a_dummy_prefix_does_not_enter_the_answer() -> None:
    tokenizer = dummy_prefix_tokenizer(TRAILING_SPACE)
    renderer = ChatRenderer(tokenizer, frozenset({tokenizer.eos_token_id}), {}, 512)
    conversation = chat("user: what is the answer?", "assistant: the dog")
    prompt = renderer.prompt_ids(conversation.messages[:1])
    [rendered] = renderer.render([conversation])
    [row] = rendered.rows
    assert rendered.notes == [APART]
    assert row.ids[: len(prompt)].tolist() == prompt
    assert renderer.spell(row.ids.tolist()) == "User: what is the answer?\nAssistant: the dog<|endoftext|>"


def test_an_answer_glued_to_a_word_of_the_prompt() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = ChatRenderer(tiny_tokenizer(template), frozenset({STOP}), {}, 64)
    [row] = renderer.rows(chat("user: a b", "assistant: c d"))  # "a bc d" would be a, unknown, d
    assert (row.ids.tolist(), row.loss_mask.tolist()) == ([A, B, C, D], [False, False, True, True])


# 3 and 4: conversations without anything to learn


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["user: a"], "no assistant turn"),
        ([], "no assistant turn"),
        (["user: a", "assistant: "], "empty answer"),
        (["user: a", "assistant: \n "], "empty answer"),
        (["assistant: a b"], "answer without a prompt"),
    ],
)
def test_named_buckets(turns: list[str], expected: str) -> None:
    assert reason(tiny(), chat(*turns)) == expected


def test_generated_ids_without_a_prompt_teach_nothing() -> None:
    assert reason(tiny(), chat("assistant: a b", answer_ids=(A, B, STOP))) == "answer without a prompt"


def test_an_answer_of_none_is_empty() -> None:
    conversation = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": None}), "t.jsonl:1")
    assert reason(tiny(), conversation) == "empty answer"


def test_an_empty_turn_costs_only_itself() -> None:
    [rendered] = tiny().render([chat("user: a", "assistant: ", "user: b", "assistant: c")])
    assert np.flatnonzero(rendered.rows[0].loss_mask).tolist() == [13, 14]
    assert rendered.notes == ["assistant turn skipped: empty answer"]


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(6, "answer truncated away"), (7, "fewer than two supervised tokens"), (8, 2), (9, 3), (10, 3)],
)
def test_truncation_on_the_right(max_length: int, expected: str | int) -> None:
    conversation = chat("user: a", "assistant: b c")  # 6 prompt tokens, 3 answer tokens
    if isinstance(expected, str):
        assert reason(tiny(max_length), conversation) == expected
        return
    [rendered] = tiny(max_length).render([conversation])
    assert rendered.rows[0].loss_mask.tolist() == [False] * 6 + [True] * expected
    assert rendered.notes == ([CUT] if max_length < 9 else [])


def test_one_answer_token_alone_cannot_be_an_anchor() -> None:
    assert reason(tiny(), chat("user: a", "assistant: b", finished=False)) == "fewer than two supervised tokens"


# 18: roles in any order are the template's business


def test_roles_go_to_the_template_as_they_are() -> None:
    [row] = tiny().rows(chat("user: a", "system: b", "tool: c", "user: d", "assistant: a", "assistant: b"))
    assert row.ids.tolist()[-4:] == [START, ASSISTANT, B, STOP]
    assert int(row.loss_mask.sum()) == 4


def test_a_refusal_of_the_template_is_the_reason() -> None:
    renderer = bpe(GEMMA, ("<|eot|>",))
    assert reason(renderer, chat("user: a", "user: b", "assistant: c")) == (
        "template refused: turns must alternate user/assistant"
    )
    assert reason(renderer, chat("system: a", "user: b", "assistant: c")) == "template refused: no system turns here"


def test_a_template_that_breaks_on_a_content_refuses_it() -> None:
    template = "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    conversation = Conversation(({"role": "user", "content": [{}]}, {"role": "assistant", "content": "a"}), "t:1")
    assert reason(bpe(template), conversation).startswith("template refused: ")


# 20, 21, 22 and generated ids


def test_generated_ids_follow_the_prompt_exactly() -> None:
    renderer = bpe(CHATML)
    [end] = renderer.stop_ids
    spelt = [
        renderer.tokenise([letter])[0][0] for letter in "the dog"
    ]  # one token a letter: never what BPE makes of it
    conversation = chat("user: what", "assistant: the dog", answer_ids=(*spelt, end))
    [rendered] = renderer.render([conversation])
    [row] = rendered.rows
    prompt = renderer.prompt_ids(conversation.messages[:1])
    assert row.ids.tolist() == [*prompt, *spelt, end]
    assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * 8
    assert rendered.notes == [RETOKENISED]


def test_ids_equal_to_the_text_are_not_counted() -> None:
    [rendered] = tiny().render([chat("user: a", "assistant: b c", answer_ids=(B, C, STOP))])
    assert rendered.notes == []


def test_ids_of_another_text_are_counted() -> None:
    [rendered] = tiny().render([chat("user: a", "assistant: b c", answer_ids=(D, D, STOP))])
    assert rendered.notes == [RETOKENISED, OTHER_TEXT]
    assert rendered.rows[0].ids.tolist()[-3:] == [D, D, STOP]


def test_ids_belong_to_the_last_answer_only() -> None:
    conversation = chat("user: a", "assistant: b", "user: c", "assistant: d", answer_ids=(D, D, STOP))
    [row] = tiny().rows(conversation)
    assert row.ids.tolist() == [
        *(START, USER, A, STOP, START, ASSISTANT, B, STOP, START, USER, C, STOP),
        *(START, ASSISTANT, D, D, STOP),
    ]
    assert int(row.loss_mask.sum()) == 5


@pytest.mark.parametrize("ids", [None, (B, C), (B, C, STOP)])
def test_a_cut_answer_trains_no_end_of_turn(ids: tuple[int, ...] | None) -> None:
    [rendered] = tiny().render([chat("user: a", "assistant: b c", answer_ids=ids, finished=False)])
    [row] = rendered.rows
    assert row.ids.tolist() == [START, USER, A, STOP, START, ASSISTANT, B, C]
    assert row.loss_mask.tolist() == [False] * 6 + [True] * 2
    assert rendered.notes == []


def test_only_the_last_answer_is_cut() -> None:
    [row] = tiny().rows(chat("user: a", "assistant: b", "user: a", "assistant: c", finished=False))
    assert row.ids[row.loss_mask].tolist() == [B, STOP, C]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [((), "empty answer"), ((STOP,), "empty answer"), ((A, 19), "answer ids outside the vocabulary")],
)
def test_unusable_generated_ids(ids: tuple[int, ...], expected: str) -> None:
    assert reason(tiny(), chat("user: a", "assistant: b", answer_ids=ids)) == expected


# templates in the manner of well-known models


@pytest.mark.parametrize("keeps_line_breaks_together", [True, False])
def test_llama3_manner(keeps_line_breaks_together: bool) -> None:
    """Its prompt ends in a blank line: GPT-2 splitting joins it only where no word follows, so history differs."""
    tokenizer = byte_bpe(LLAMA3, keeps_line_breaks_together)
    renderer = ChatRenderer(tokenizer, control_ids(tokenizer, "<|eot|>"), {}, 512)
    conversation = chat("system: the end", "user: what", "assistant:  the dog ", "user: and", "assistant: the cat")
    rows = renderer.rows(conversation)
    first, second = "the dog<|eot|>", "the cat<|eot|>"
    expected = [[first, second]] if keeps_line_breaks_together else [[first], [second]]
    assert [trained(renderer, row) for row in rows] == expected
    assert_served_prefixes(renderer, conversation, rows)


def test_llama2_manner_needs_no_generation_prompt() -> None:
    renderer = bpe(LLAMA2, ("<|endoftext|>",))
    conversation = chat("user: what", "assistant: the dog", "user: and", "assistant: the cat")
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == [" the dog<|endoftext|>", " the cat<|endoftext|>"]
    assert_served_prefixes(renderer, conversation, [row])


def test_a_header_without_generation_prompt_is_refused() -> None:
    assert reason(bpe(HEADER_ONLY_IN_TURNS), chat("user: what", "assistant: the dog")) == (
        "the template adds no generation prompt"
    )


def test_gemma_manner() -> None:
    renderer = bpe(GEMMA, ("<|eot|>",))
    conversation = chat("user: what", "assistant: the dog", "user: and", "assistant: the cat")
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == ["the dog<|eot|>", "the cat<|eot|>"]


def test_phi3_manner_ends_at_the_first_stop_token() -> None:
    renderer = bpe(PHI3, ("<|im_end|>", "<|endoftext|>"))
    conversation = chat("user: what", "assistant: the dog", "user: and", "assistant: the cat")
    [rendered] = renderer.render([conversation])
    assert [trained(renderer, row) for row in rendered.rows] == [["the dog<|im_end|>", "the cat<|im_end|>"]]
    assert rendered.notes == []


def test_a_template_whose_ending_is_no_stop_token() -> None:
    renderer = bpe(CHATML, ("<|endoftext|>",))
    [rendered] = renderer.render([chat("user: what", "assistant: the dog")])
    assert trained(renderer, rendered.rows[0]) == ["the dog<|im_end|>"]
    assert rendered.notes == [NO_STOP]
    [cut] = renderer.render([chat("user: what", "assistant: the dog", finished=False)])
    assert trained(renderer, cut.rows[0]) == ["the dog"]


def test_a_template_without_any_ending_is_counted() -> None:
    renderer = bpe("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    [rendered] = renderer.render([chat("user: what", "assistant: the dog")])
    assert NO_STOP in rendered.notes


def test_qwen3_manner_trains_each_turn_as_it_was_served() -> None:
    renderer = bpe(QWEN3)
    first = "<think>\nthe cat\n</think>\n\nthe dog"
    conversation = chat("user: what", f"assistant: {first}", "user: and", "assistant: <think>\nthe\n</think>\n\nend")
    [rendered] = renderer.render([conversation])
    assert [trained(renderer, row) for row in rendered.rows] == [
        [f"{first}<|im_end|>"],
        ["<think>\nthe\n</think>\n\nend<|im_end|>"],
    ]
    assert "the cat" not in renderer.spell(rendered.rows[1].ids.tolist())
    assert rendered.notes == [OWN_ROW]
    assert_served_prefixes(renderer, conversation, rendered.rows)


def test_qwen3_manner_without_thinking() -> None:
    renderer = bpe(QWEN3, enable_thinking=False)
    conversation = chat("user: what", "assistant: the dog", "user: and", "assistant: the cat")
    rows = renderer.rows(conversation)
    assert [trained(renderer, row) for row in rows] == [["the dog<|im_end|>"], ["the cat<|im_end|>"]]
    assert_served_prefixes(renderer, conversation, rows)


def test_deepseek_manner_continues_the_opened_reasoning() -> None:
    renderer = bpe(DEEPSEEK, ("<|eot|>",))
    conversation = chat("user: what", "assistant: <think>\nthe cat\n</think>\nthe dog")
    [row] = renderer.rows(conversation)
    assert trained(renderer, row) == ["the cat\n</think>\nthe dog<|eot|>"]
    assert_served_prefixes(renderer, conversation, [row])
    assert reason(renderer, chat("user: what", "assistant: the dog")) == (
        "the template's answer does not follow its generation prompt"
    )


def test_generated_ids_need_no_template_for_the_answer() -> None:
    renderer = bpe(DEEPSEEK, ("<|eot|>",))
    ids = tuple(renderer.tokenise(["the cat</think>the dog<|eot|>"])[0])
    conversation = chat("user: what", "assistant: the dog", answer_ids=ids)
    [row] = renderer.rows(conversation)
    assert row.ids.tolist() == renderer.prompt_ids(conversation.messages[:1]) + list(ids)


# the tokenizer itself


def test_a_tokenizer_without_template_is_refused_with_a_remedy() -> None:
    with pytest.raises(InputError, match="has no chat template") as caught:
        ChatRenderer(tiny_tokenizer(None), frozenset({STOP}), {}, 64)
    assert "chat_template.jinja" in caught.value.remedy


def test_the_plain_template_of_the_remedy_works() -> None:
    from draftline.data.template import PLAIN_TEMPLATE

    renderer = bpe(PLAIN_TEMPLATE, ("<|endoftext|>",))
    [row] = renderer.rows(chat("user: what is", "assistant:  the dog"))
    assert trained(renderer, row) == [" the dog<|endoftext|>"]


def test_keywords_of_our_own_are_refused() -> None:
    with pytest.raises(InputError, match="data.template_kwargs sets add_generation_prompt"):
        bpe(CHATML, add_generation_prompt=True)


def test_a_batch_renders_as_its_members_do() -> None:
    renderer = bpe(CHATML)
    several = [chat("user: what", f"assistant: the {word}") for word in ("dog", "cat", "house")] + [chat("user: and")]
    together = renderer.render(several)
    for conversation, rendered in zip(several, together, strict=True):
        [alone] = renderer.render([conversation])
        assert [row.ids.tolist() for row in rendered.rows] == [row.ids.tolist() for row in alone.rows]
        assert rendered.unusable == alone.unusable
