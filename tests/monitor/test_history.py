"""What a recipe has reached before: kept bounded, whole under several writers, and only for the same recipe."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from draftline.config import Recipe
from draftline.monitor.history import (
    KEPT_PER_KEY,
    PastRun,
    differences,
    key_of,
    known_good,
    read_history,
    record_run,
)

OVERRIDE = {"switch": "NCCL_P2P_DISABLE", "value": 1, "reason": "broken bridge", "until": "2099-12-31"}


def run(key: str, rate: float, at: float = 0.0) -> PastRun:
    return PastRun(key, at, rate, f"runs/{rate:g}", {"torch": "2.11.0"})


def test_the_best_of_a_key_is_the_known_good(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "history.jsonl"
    assert known_good(path, "a", {}) is None
    for at, (key, rate) in enumerate([("a", 100.0), ("a", 300.0), ("b", 900.0), ("a", 200.0)]):
        record_run(path, run(key, rate, at))
    best = known_good(path, "a", {"torch": "2.12.0"})
    assert best is not None
    assert (best.tokens_per_s, best.run) == (300.0, "runs/300")
    assert differences(best.fingerprint, best.now) == "torch 2.11.0 -> 2.12.0"


def test_a_commit_is_named_by_its_first_digits() -> None:
    before, now = {"commit": "c2a9b75491c09fde0f81bbb062873b6b5fd945de (modified)"}, {"os": "Linux"}
    assert differences(before, before | now) == "os unknown -> Linux"
    assert differences(before, {}) == "commit c2a9b75491 (modified) -> unknown"


def test_the_file_stays_small_and_keeps_the_best(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for at in range(KEPT_PER_KEY + 30):
        record_run(path, run("a", 500.0 if at == 3 else 100.0 + at, at))
    kept = read_history(path)
    assert len(kept) == KEPT_PER_KEY
    assert (kept[0].tokens_per_s, kept[-1].tokens_per_s) == (500.0, 100.0 + KEPT_PER_KEY + 29)


def record_many(path: Path, key: str) -> None:
    for at in range(10):
        record_run(path, run(key, 100.0 + at, at))


def test_runs_that_end_at_once_do_not_lose_each_other(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=record_many, args=(path, key)) for key in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(entry.key for entry in read_history(path)) == sorted("abcd" * 10)


def test_what_another_version_wrote_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    record_run(path, run("a", 100.0))
    path.write_text('{"version": 9}\nnot json\n' + path.read_text())
    assert [entry.tokens_per_s for entry in read_history(path)] == [100.0]


def test_a_key_is_of_what_decides_the_rate(tmp_path: Path) -> None:
    def key(kind: str = "NVIDIA H200", ranks: int = 1, **sections: object) -> str:
        tree = {"target": {"path": "t"}, "data": {"train": "a.jsonl"}} | sections
        return key_of(Recipe.model_validate(tree).model_dump(mode="json"), kind, ranks)

    same = [
        key(train={"out": "runs/b"}), key(train={"seed": 3}), key(train={"max_steps": 9}), key(optim={"lr": 0.1}),
        key(data={"train": "b.jsonl"}), key(monitor={"sinks": ["prometheus"]}), key(eval={"max_prompts": 1}),
        key(overrides=[OVERRIDE]),
    ]  # fmt: skip
    other = [
        key("cpu, 2 cores"), key(ranks=8), key(train={"anchors": 64}), key(data={"train": "a", "sequence_length": 512}),
        key(drafter={"layers": 2}), key(target={"path": "u"}), key(loss={"kind": "ce"}),
    ]  # fmt: skip
    assert set(same) == {key()}
    assert len({key(), *other}) == 8
