"""Reading JSONL: three shapes, and every way in which a file can be broken (case 19)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import read_conversations, read_prompts
from draftline.errors import InputError
from draftline.records import Conversation

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
GOOD = json.dumps({"messages": [USER, ASSISTANT]})


def file_of(folder: Path, *lines: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"prompt": [USER], "completion": [ASSISTANT]},
    ],
)
def test_shapes(tmp_path: Path, row: dict[str, Any]) -> None:
    path = file_of(tmp_path, row)
    assert read_conversations([path]) == ([Conversation((USER, ASSISTANT), f"{path}:1")], {})


def test_extra_fields_and_extra_message_keys(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = file_of(tmp_path, {"messages": [USER, call], "answer_ids": [3, 2], "finished": False, "source": "math"})
    [conversation], _ = read_conversations([path])
    assert conversation == Conversation((USER, call), f"{path}:1", (3, 2), False, "math")


def test_sharegpt_speakers(tmp_path: Path) -> None:
    turns = [{"from": name, "value": name} for name in ("system", "user", "assistant", "tool", "observation")]
    path = file_of(tmp_path, {"conversations": turns}, {"conversations": [{"from": "narrator", "value": "x"}]})
    [conversation], unusable = read_conversations([path])
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert unusable == {"unknown speaker 'narrator'": 1}


def test_rows_that_cannot_be_rendered_are_counted(tmp_path: Path) -> None:
    tools = {"messages": [USER, ASSISTANT], "tools": [{"name": "f"}]}
    torn = '{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    conversations, unusable = read_conversations([file_of(tmp_path, tools, torn, GOOD)])
    assert len(conversations) == 1
    assert unusable == {
        "the row declares its own `tools`, which are not rendered": 1,
        "text cut inside a character (lone surrogate)": 1,
    }


def test_blank_lines_keep_the_line_numbers(tmp_path: Path) -> None:
    path = file_of(tmp_path, "", GOOD, "  ", GOOD)
    conversations, _ = read_conversations([path, path])
    assert [conversation.where for conversation in conversations] == [f"{path}:2", f"{path}:4"] * 2


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n")
    assert len(read_conversations([str(path)])[0]) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not valid JSON: Expecting value at column 15"),
        ("[1]", "a row is a JSON object, not list"),
        ("{}", "this one has no fields"),
        ('{"text": "a", "id": 1}', "this one has id, text"),
        ('{"prompt": "a"}', "this one has prompt"),
        ('{"messages": "a"}', "`messages` is a list of messages, not str"),
        ('{"messages": ["a"]}', "`messages[0]` is an object with `role` and `content`, not str"),
        ('{"messages": [{"content": "a"}]}', "`messages[0].role` is a text that is not empty, not None"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` has no `content`"),
        ('{"messages": [{"role": "user", "content": 3}]}', "`messages[0].content` is a text, not int"),
        ('{"conversations": [{"from": "gpt"}]}', "`conversations[0]` is an object with the texts `from` and `value`"),
        ('{"prompt": 1, "completion": "b"}', "`prompt` is a text or a list of messages, not int"),
        ('{"messages": [], "answer_ids": [1, true]}', "`answer_ids` is a list of token ids, whole numbers from 0"),
        ('{"messages": [], "answer_ids": [-1]}', "`answer_ids` is a list of token ids, whole numbers from 0"),
        ('{"messages": [], "finished": "no"}', "`finished` is true or false, not 'no'"),
        ("[" * 100_000, "JSON nested too deeply"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = file_of(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(InputError) as caught:
        read_conversations([path])
    assert caught.value.what.startswith(f"{path}:3: ")
    assert reason in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.jsonl", None, "No such file or directory"),
        (".", None, "Is a directory"),
        ("empty.jsonl", b"", "the file holds no rows"),
        ("blank.jsonl", b"\n \n", "the file holds no rows"),
        ("latin.jsonl", GOOD.encode() + b'\n{"messages": "\xe9"}\n', "not UTF-8 text"),
        ("packed.jsonl", b"\x1f\x8b\x08\x00", "not UTF-8 text"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_conversations([str(path)])
    line = ":2" if name == "latin.jsonl" else ":1" if name == "packed.jsonl" else ""
    assert caught.value.what.startswith(f"{path}{line}: {reason}")


def test_prompts_end_with_a_turn_to_be_answered(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "c"}
    path = file_of(
        tmp_path,
        {"prompt": "a", "source": "math"},
        {"messages": [USER, ASSISTANT, tool, ASSISTANT, ASSISTANT], "answer_ids": [1]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    )
    prompts = read_prompts(path, None)
    assert [prompt.messages for prompt in prompts] == [(USER,), (USER, ASSISTANT, tool), (USER,)]
    assert [prompt.source for prompt in prompts] == ["math", None, None]
    assert all(prompt.answer_ids is None and prompt.finished for prompt in prompts)
    assert [prompt.where for prompt in read_prompts(path, 2)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize("messages", [[], [ASSISTANT], [{"role": "system", "content": "s"}, ASSISTANT]])
def test_a_prompt_without_question_is_refused(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    path = file_of(tmp_path, {"messages": [USER]}, {"messages": messages})
    with pytest.raises(InputError, match=":2: no user or tool turn to be answered"):
        read_prompts(path)
