"""Conversations and prompts from JSONL files.

A row is one of
- `messages`: [{"role": ..., "content": ...}, ...]
- `conversations` (ShareGPT): [{"from": "human" | "gpt" | ..., "value": ...}, ...], with an optional `system` text
- `prompt` and `completion`: two texts (one user turn, one assistant turn) or two lists of messages
and may carry `answer_ids` (the last answer's tokens as the target generated them), `finished` (false: cut at the token
limit) and `source`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.records import Conversation

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
SHAPES = "a row has `messages`, `conversations` (ShareGPT), or `prompt` and `completion`"


class ShapeError(ValueError):
    """A row that does not have the shape it should have; becomes an InputError with file and line."""


class UnusableRow(ValueError):
    """A well-formed row that cannot be trained on; its text is the bucket under which it is counted."""


def read_conversations(paths: Sequence[str]) -> tuple[list[Conversation], Counter[str]]:
    """Every conversation of the files, in order, and a count of the rows left out, by reason.

    Raises InputError with file, line and reason for anything that is not UTF-8 JSONL of a known shape, and for a
    file without rows: a broken file is never half read.
    """
    conversations: list[Conversation] = []
    unusable: Counter[str] = Counter()
    for path in paths:
        for row, where in read_rows(path):
            try:
                conversations.append(conversation_of(row, where))
            except UnusableRow as reason:
                unusable[str(reason)] += 1
            except ShapeError as error:
                raise InputError(f"{where}: {error}", "mend or remove that line") from error
    return conversations, unusable


def read_prompts(path: str, max_prompts: int | None = None) -> list[Conversation]:
    """Conversations that wait for an answer: trailing assistant turns are dropped, so that a user or tool turn is last.

    A row may also be `{"prompt": "..."}` alone. At most `max_prompts` rows are taken from the start of the file.
    Raises InputError with file and line, also where no turn is left to be answered.
    """
    prompts: list[Conversation] = []
    for row, where in read_rows(path):
        if max_prompts is not None and len(prompts) == max_prompts:
            break
        try:
            prompts.append(prompt_of(row, where))
        except (ShapeError, UnusableRow) as error:
            raise InputError(f"{where}: {error}", "mend or remove that line") from error
    return prompts


def read_rows(path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON objects of a JSONL file, each with its "file:line". Blank lines are allowed, an empty file is not."""
    number = 0
    rows = 0
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    rows += 1
                    yield json_object(line, f"{path}:{number}"), f"{path}:{number}"
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give the path of a readable JSONL file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 text ({error.reason})", "save the file as UTF-8 JSONL") from error
    if not rows:
        raise InputError(f"{path}: the file holds no rows", "give a JSONL file with one JSON object per line")


def json_object(line: str, where: str) -> dict[str, Any]:
    remedy = "the file must be JSONL: one complete JSON object per line"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg} at column {error.colno}", remedy) from error
    except RecursionError as error:
        raise InputError(f"{where}: JSON nested too deeply", remedy) from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row is a JSON object, not {type(row).__name__}", remedy)
    return row


def conversation_of(row: dict[str, Any], where: str) -> Conversation:
    if row.get("tools"):
        raise UnusableRow("the row declares its own `tools`, which are not rendered")
    messages = messages_of(row)
    refuse_lone_surrogates(messages)
    return Conversation(tuple(messages), where, answer_ids_of(row), flag_of(row, "finished", True), source_of(row))


def prompt_of(row: dict[str, Any], where: str) -> Conversation:
    lone_prompt = "prompt" in row and "messages" not in row and "conversations" not in row
    messages = turns_of(row["prompt"], "prompt", "user") if lone_prompt else messages_of(row)
    refuse_lone_surrogates(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system":
        raise ShapeError("no user or tool turn to be answered")
    return Conversation(tuple(messages), where, source=source_of(row))


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in row:
        return turns_of(row["messages"], "messages", None)
    if "conversations" in row:
        return sharegpt_turns(row)
    if "prompt" in row and "completion" in row:
        return turns_of(row["prompt"], "prompt", "user") + turns_of(row["completion"], "completion", "assistant")
    raise ShapeError(f"{SHAPES}; this one has {', '.join(sorted(row)) or 'no fields'}")


def turns_of(value: Any, name: str, role_of_text: str | None) -> list[dict[str, Any]]:
    """A list of messages as it stands, or one turn made of a plain text where `role_of_text` allows that."""
    if role_of_text is not None and isinstance(value, str):
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list):
        kinds = "a list of messages" if role_of_text is None else "a text or a list of messages"
        raise ShapeError(f"`{name}` is {kinds}, not {type(value).__name__}")
    for index, message in enumerate(value):
        check_message(message, f"{name}[{index}]")
    return list(value)


def check_message(message: Any, name: str) -> None:
    """Roles and extra keys are the template's business; only what every template relies on is checked."""
    if not isinstance(message, dict):
        raise ShapeError(f"`{name}` is an object with `role` and `content`, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ShapeError(f"`{name}.role` is a text that is not empty, not {role!r}")
    if not {"content", "tool_calls", "reasoning_content"} & message.keys():
        raise ShapeError(f"`{name}` has no `content`")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ShapeError(f"`{name}.content` is a text, not {type(content).__name__}")


def sharegpt_turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise ShapeError(f"`conversations` is a list of turns, not {type(turns).__name__}")
    messages = [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) else []
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
            raise ShapeError(f"`conversations[{index}]` is an object with the texts `from` and `value`")
        if turn["from"] not in SHAREGPT_ROLES:
            raise UnusableRow(f"unknown speaker {turn['from']!r}")
        messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return messages


def answer_ids_of(row: dict[str, Any]) -> tuple[int, ...] | None:
    ids = row.get("answer_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
        raise ShapeError("`answer_ids` is a list of token ids, whole numbers from 0")
    return tuple(ids)


def flag_of(row: dict[str, Any], name: str, default: bool) -> bool:
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise ShapeError(f"`{name}` is true or false, not {value!r}")
    return value


def source_of(row: dict[str, Any]) -> str | None:
    source = row.get("source")
    return source if isinstance(source, str) else None


def refuse_lone_surrogates(messages: list[dict[str, Any]]) -> None:
    """JSON can spell half a surrogate pair ("\\ud83d"): text cut inside a character, which no tokenizer takes."""
    try:
        for message in messages:
            content = message.get("content")
            (content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableRow("text cut inside a character (lone surrogate)") from error
