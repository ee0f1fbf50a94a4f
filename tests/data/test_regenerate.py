"""Regeneration: exact ids out, whole files only, and an interrupted run is continued, not redone."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizers import STOP, A, B, C, D, E, tiny_tokenizer
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_conversations
from draftline.data.regenerate import regenerate
from draftline.errors import InputError, RunError
from draftline.records import Conversation

HEADER = {"target": "tiny", "temperature": 0.0}


class Killed(Exception):
    """Stands for whatever ends a run."""


class Target:
    """Answers a prompt that ends in word w with "w w </s>", or cut after "w w"; prompts last to first."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.asked: list[list[int]] = []
        self.dies_after = dies_after

    def __call__(self, prompts: list[list[int]]) -> Iterator[tuple[int, list[int], bool]]:
        for which in reversed(range(len(prompts))):
            if len(self.asked) == self.dies_after:
                raise Killed
            self.asked.append(prompts[which])
            word = prompts[which][-4]
            finished = word != E
            yield which, [word, word] + [STOP] * finished, finished


def renderer(max_length: int = 64) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(), frozenset({STOP}), {}, max_length)


def asking(*words: str) -> list[Conversation]:
    return [
        Conversation(({"role": "user", "content": word},), f"p:{n}", source="math") for n, word in enumerate(words, 1)
    ]


def run(out: Path, target: Target, prompts: list[Conversation], **header: Any) -> Any:
    chat = renderer()
    return regenerate(prompts, chat, chat.spell, target, out, {**HEADER, **header})


def test_answers_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    out = tmp_path / "new" / "answers.jsonl"
    report = run(out, Target(), asking("a", "b", "e"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0] == {
        "source": "math",
        "finished": True,
        "answer_ids": [A, A, STOP],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a a"}],
    }
    assert [row["answer_ids"] for row in rows] == [[A, A, STOP], [B, B, STOP], [E, E]]
    assert [row["finished"] for row in rows] == [True, True, False]
    assert [path.name for path in out.parent.iterdir()] == ["answers.jsonl"]
    assert (report.prompts, report.written, report.resumed, report.cut, report.answer_tokens) == (3, 3, 0, 1, 8)


def test_what_is_written_renders_as_prompt_and_answer_ids(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl", Target(), asking("a", "e"))
    conversations, _ = read_conversations([str(tmp_path / "a.jsonl")])
    for conversation in conversations:
        [row] = renderer().rows(conversation)
        prompt = renderer().prompt_ids(conversation.messages[:-1])
        assert row.ids.tolist() == prompt + list(conversation.answer_ids or ())


def test_no_source_where_the_prompt_has_none(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl", Target(), [Conversation(({"role": "user", "content": "a"},), "p:1")])
    assert "source" not in json.loads((tmp_path / "a.jsonl").read_text())


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    out, prompts = tmp_path / "a.jsonl", asking("a", "b", "c", "d")
    with pytest.raises(Killed):
        run(out, Target(dies_after=2), prompts)
    assert not out.exists()
    with (tmp_path / "a.jsonl.partial").open("a") as file:
        file.write('{"prompt": 1, "row": {"answer_ids": [')  # the line being written when the process was killed
    target = Target()
    report = run(out, target, prompts)
    assert [prompt[-4] for prompt in target.asked] == [B, A]
    assert (report.resumed, report.written, report.answer_tokens) == (2, 2, 12)
    run(tmp_path / "at_once.jsonl", Target(), prompts)
    assert out.read_bytes() == (tmp_path / "at_once.jsonl").read_bytes()


def test_a_run_killed_before_the_rename_asks_nothing_again(tmp_path: Path) -> None:
    out, target = tmp_path / "a.jsonl", Target()
    with pytest.raises(Killed):
        run(out, Target(dies_after=1), asking("a", "b"))
    run(out, Target(), asking("a", "b"))
    assert len(out.read_text().splitlines()) == 2
    with pytest.raises(InputError, match="already exists"):
        run(out, target, asking("a", "b"))
    assert target.asked == []


@pytest.mark.parametrize(
    ("prompts", "header", "difference"),
    [
        (asking("a", "c"), {}, "prompts_sha256"),
        (asking("a"), {}, "prompts_sha256"),
        (asking("a", "b"), {"temperature": 0.7}, "temperature: 0.0 there, 0.7 now"),
    ],
)
def test_another_run_s_partial_file_is_refused(
    tmp_path: Path, prompts: list[Conversation], header: dict[str, float], difference: str
) -> None:
    out = tmp_path / "a.jsonl"
    with pytest.raises(Killed):
        run(out, Target(dies_after=1), asking("a", "b"))
    before = (tmp_path / "a.jsonl.partial").read_bytes()
    with pytest.raises(InputError, match="unfinished regeneration with other prompts or settings") as caught:
        run(out, Target(), prompts, **header)
    assert difference in caught.value.what
    assert (tmp_path / "a.jsonl.partial").read_bytes() == before


@pytest.mark.parametrize("content", ["something else", "something else\n", "[1]\n", '{"prompt": 0}\n'])
def test_a_foreign_file_is_not_touched(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl.partial").write_text(content)
    with pytest.raises(InputError):
        run(tmp_path / "a.jsonl", Target(), asking("a"))
    assert (tmp_path / "a.jsonl.partial").read_text() == content


def test_a_full_disk_keeps_what_is_written(tmp_path: Path) -> None:
    """A limit on file sizes ends writing as a full disk does: in the middle of a line."""
    out, prompts = tmp_path / "a.jsonl", asking("a", "b", "c", "d")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (420, hard))
    try:
        with pytest.raises(InputError) as caught:
            run(out, Target(), prompts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(out) in caught.value.what and "the 1 answers in" in caught.value.what
    assert "run the same command again" in caught.value.remedy
    target = Target()
    assert run(out, target, prompts).resumed == 1
    assert [prompt[-4] for prompt in target.asked] == [C, B, A]
    assert len(out.read_text().splitlines()) == 4


def test_an_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    target = Target()
    with pytest.raises(InputError, match="cannot be written"):
        run(tmp_path / "file" / "a.jsonl", target, asking("a"))
    assert target.asked == []


def test_prompts_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    out, chat = tmp_path / "a.jsonl", renderer(8)
    prompts = asking("a", "b b b b b b b", "d")
    report = regenerate(prompts, chat, chat.spell, Target(), out, HEADER)
    assert report.unusable == {"prompt leaves no room for an answer": 1}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["answer_ids"][0] for row in rows] == [A, D]
    assert [row["messages"][0]["content"] for row in rows] == ["a", "d"]
    with pytest.raises(InputError, match="none of the 1 prompts can be used"):
        regenerate(prompts[1:2], chat, chat.spell, Target(), tmp_path / "b.jsonl", HEADER)


def test_a_generator_that_ends_early_makes_no_file(tmp_path: Path) -> None:
    chat, out = renderer(), tmp_path / "a.jsonl"
    with pytest.raises(RunError, match="2 of 2 prompts unanswered"):
        regenerate(asking("a", "b"), chat, chat.spell, lambda prompts: [], out, HEADER)
    assert not out.exists()
