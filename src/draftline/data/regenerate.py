"""Regeneration: the target itself writes the answers on which its drafter will be trained.

While it runs, answers are appended to `<out>.partial`, whose first line says which prompts and settings it belongs to;
a later call continues there. When every prompt is answered, `out` appears whole, in the order of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftline.data.chat import ChatRenderer
from draftline.data.template import Unusable
from draftline.errors import InputError, RunError
from draftline.records import Conversation

Generate = Callable[[list[list[int]]], Iterable[tuple[int, list[int], bool]]]


@dataclass(slots=True)
class RegenerateReport:
    out: Path
    prompts: int
    resumed: int = 0  # answers found in the partial file of an earlier call
    written: int = 0  # answers that this call generated
    cut: int = 0  # of all answers, those that ran into the token limit
    answer_tokens: int = 0  # of all answers, stop tokens included
    unusable: Counter[str] = field(default_factory=Counter)  # prompts left out, by reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer's line lies in the partial file, and what the report says about it."""

    offset_bytes: int
    length_bytes: int
    tokens: int
    finished: bool


def regenerate(
    prompts: Sequence[Conversation],
    renderer: ChatRenderer,
    decode_text: Callable[[list[int]], str],
    generate: Generate,
    out: Path,
    header: Mapping[str, Any],
) -> RegenerateReport:
    """Have the target answer every prompt and write conversations with `answer_ids` and `finished` to `out`.

    Only the last answer is the target's; assistant turns that a prompt already holds stay as they are.

    generate: prompts in tokens -> (number of the prompt in that list, answer ids with the stop token if it stopped,
    whether it stopped), in any order, one for each prompt; RunError where some prompt gets none.
    header: what else makes two runs the same (target, revision, sampling, limit), as JSON values.
    Raises InputError where `out` exists, the partial file belongs to other prompts or settings, or writing fails; what
    was written stays, and the same call continues it.
    """
    if out.exists():
        raise InputError(f"{out} already exists", "choose another file, or remove it to generate its answers again")
    report = RegenerateReport(out, len(prompts))
    ids = usable_prompts(prompts, renderer, report.unusable)
    if not ids:
        raise InputError(f"none of the {len(prompts)} prompts can be used: {dict(report.unusable)}", "mend the prompts")
    partial = PartialFile(out, {"prompts_sha256": prompts_hash(ids), **header})
    partial.open()
    report.resumed = len(partial.places)
    pending = [number for number in ids if number not in partial.places]
    for which, answer, finished in generate([ids[number] for number in pending]) if pending else ():
        number = pending[which]
        text = decode_text(answer[:-1] if answer and answer[-1] in renderer.stop_ids else answer)
        partial.append(number, answered(prompts[number], text, answer, finished))
        report.written += 1
    missing = len(ids) - len(partial.places)
    if missing:
        raise RunError(f"generate ended with {missing} of {len(pending)} prompts unanswered")
    report.cut = sum(not place.finished for place in partial.places.values())
    report.answer_tokens = sum(place.tokens for place in partial.places.values())
    partial.finish()
    return report


def usable_prompts(
    prompts: Sequence[Conversation], renderer: ChatRenderer, unusable: Counter[str]
) -> dict[int, list[int]]:
    """Number of the prompt -> its tokens, for those that the template takes and that leave room for an answer."""
    usable = {}
    for number, prompt in enumerate(prompts):
        try:
            ids = renderer.prompt_ids(prompt.messages)
        except Unusable as refused:
            unusable[refused.reason] += 1
            continue
        if len(ids) + 2 > renderer.max_length:  # the fewest answer tokens that can be trained on
            unusable["prompt leaves no room for an answer"] += 1
        else:
            usable[number] = ids
    return usable


def prompts_hash(ids: Mapping[int, list[int]]) -> str:
    """sha256 over the numbers and tokens of the prompts: another file, template or tokenizer gives another hash."""
    digest = hashlib.sha256()
    for number, tokens in ids.items():
        digest.update(np.array([number, len(tokens), *tokens], dtype="<i8").tobytes())
    return digest.hexdigest()


def answered(prompt: Conversation, text: str, answer: list[int], finished: bool) -> dict[str, Any]:
    source = {} if prompt.source is None else {"source": prompt.source}
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    return {**source, "finished": finished, "answer_ids": answer, "messages": messages}


class PartialFile:
    """The answers so far, one line each after a header line; only complete lines count.

    Lines are written unbuffered, so a killed process or a full disk costs at most the line being written; the next line
    is written over what there is of it.
    """

    def __init__(self, out: Path, header: Mapping[str, Any]) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self.header = json.loads(json.dumps(dict(header)))  # as it will be read back
        self.places: dict[int, Place] = {}
        self.end_bytes = 0

    def open(self) -> None:
        """Take up an earlier call's file, or start a new one. Raises InputError where it belongs to another run."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("r+b") as file:
                for line in file:
                    self.take_up(line)
        except OSError as error:
            raise self.cannot_write(error) from error
        if self.end_bytes == 0:
            self.write(encode(self.header))

    def take_up(self, line: bytes) -> None:
        """One line of an earlier call; a line torn at the file's end is left to be written over."""
        torn_header = not self.end_bytes and encode(self.header).startswith(line)
        if not line.endswith(b"\n") and (self.end_bytes or torn_header):
            return
        try:
            entry = json.loads(line)
            if self.end_bytes:
                self.places[entry["prompt"]] = self.place(len(line), entry["row"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path}: byte {self.end_bytes}: not a line of an unfinished regeneration",
                "move that file away, or choose another output file",
            ) from error
        if not self.end_bytes:
            self.refuse_other(entry)
        self.end_bytes += len(line)

    def place(self, length_bytes: int, row: Mapping[str, Any]) -> Place:
        return Place(self.end_bytes, length_bytes, len(row["answer_ids"]), bool(row["finished"]))

    def refuse_other(self, found: Any) -> None:
        found = found if isinstance(found, dict) else {}
        keys = sorted(key for key in self.header.keys() | found.keys() if self.header.get(key) != found.get(key))
        if keys:
            differences = ", ".join(f"{key}: {found.get(key)!r} there, {self.header.get(key)!r} now" for key in keys)
            raise InputError(
                f"{self.path} is an unfinished regeneration with other prompts or settings ({differences})",
                "finish that one with its own settings, move it away, or choose another output file",
            )

    def append(self, number: int, row: Mapping[str, Any]) -> None:
        line = encode({"prompt": number, "row": row})
        place = self.place(len(line), row)
        self.write(line)
        self.places[number] = place

    def write(self, line: bytes) -> None:
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.seek(self.end_bytes)
                write_all(file.fileno(), line)
        except OSError as error:
            raise self.cannot_write(error) from error
        self.end_bytes += len(line)

    def finish(self) -> None:
        """Write the rows in the order of their prompts beside `out`, make them durable, and rename."""
        ready = self.out.with_name(self.out.name + ".ready")
        try:
            with self.path.open("rb") as answers, ready.open("wb", buffering=0) as file:
                for _, place in sorted(self.places.items()):
                    answers.seek(place.offset_bytes)
                    write_all(file.fileno(), encode(json.loads(answers.read(place.length_bytes))["row"]))
                os.fsync(file.fileno())
            ready.replace(self.out)
            self.path.unlink()
        except OSError as error:
            ready.unlink(missing_ok=True)
            raise self.cannot_write(error) from error

    def cannot_write(self, error: OSError) -> InputError:
        kept = f"; the {len(self.places)} answers in {self.path} are kept" if self.places else ""
        return InputError(
            f"{self.out}: cannot be written: {error.strerror}{kept}",
            "make room or choose a writable folder, then run the same command again: it continues where it stopped",
        )


def encode(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8")


def write_all(descriptor: int, data: bytes) -> None:
    """os.write may write a part only, as on a disk that is about to be full."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
