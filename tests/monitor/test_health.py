"""The watchman of real runs: it tells when verdicts change; a severe one ends the run where the recipe wants that."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from builders import save_target
from command import draftline_here
from draftline.config import load_recipe
from draftline.environment.fingerprint import fingerprint
from draftline.monitor.events import Alarm, EventLog, Health, LoggedEvent, Phases, Resources, RunEnded, Step, log_path
from draftline.monitor.health import Ears, Watchman
from draftline.monitor.history import device_kind, history_path, key_of, past_run, read_history, record_run
from draftline.monitor.limits import Limits
from draftline.monitor.tail import RunTail
from draftline.records import Verdict
from runs import checkpoint_names, write_recipe


def steps(log: EventLog, count: int, data_s: float) -> None:
    for step in range(count):
        log.write(Phases(step, "colocated", 0.1, {"data": data_s, "forward": 0.05}, 100, 0, 0, 0))


def test_alarms_come_when_a_verdict_is_new_and_not_again(tmp_path: Path) -> None:
    said: list[Verdict] = []
    heard: list[LoggedEvent] = []
    with EventLog(log_path(tmp_path, 0)) as log, EventLog(log_path(tmp_path, 1), rank=1) as other:
        watchman = Watchman(log, None, Ears(said.append, (heard.append,)))
        steps(log, 20, 0.0)
        steps(other, 20, 0.04)
        other.write(Resources("cpu", 19, "loop", time.time(), 1.0, 0.0, 2**30, 0, None))
        assert [verdict.name for verdict in watchman.look()] == ["data-bound"]
        watchman.look()
        watchman.look()
    events = [logged.event for logged in RunTail(tmp_path).poll() if isinstance(logged.event, Alarm | Health)]
    assert [type(event) for event in events] == [Health, Alarm]
    assert [(verdict.name, verdict.ranks) for verdict in said] == [("data-bound", (1,))]
    assert {logged.rank for logged in heard} == {1} and len(heard) == 21
    assert watchman.severe is None


def test_an_earlier_attempts_events_are_not_judged(tmp_path: Path) -> None:
    with EventLog(log_path(tmp_path, 0)) as log:
        steps(log, 20, 0.04)
        watchman = Watchman(log, None, Ears(lambda verdict: None))
        assert [verdict.name for verdict in watchman.look()] == ["warming up"]


def test_it_looks_by_itself(tmp_path: Path) -> None:
    with EventLog(log_path(tmp_path, 0)) as log:
        patient = Limits(silent_s=0.2)
        with Watchman(log, None, Ears(lambda verdict: None), every_s=0.05, limits=patient) as watchman:
            steps(log, 20, 0.0)
            end = time.monotonic() + 20
            while watchman.severe is None and time.monotonic() < end:
                time.sleep(0.05)
    assert watchman.severe is not None and watchman.severe.name == "stalled"


SHAPES = {
    "as it is": {},
    "micro-batches of one row": {"train": {"rows_per_micro_batch": 1}},
    "kept features": {"target": {"keep_features_gib": 1.0}},
    "exponential weights, wide": {"loss": {"kind": "ce", "weights": "exponential"}, "train": {"anchors": 20}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_clean_runs_of_any_shape_raise_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Two runs, so that the second is also held against the first. That one run was slower is no false alarm where the
    alarm itself says that other processes had its cores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_target(tmp_path / "target")
    sections = {name: dict(values) for name, values in SHAPES[shape].items()}
    if "target" in sections:
        sections["target"]["path"] = str(tmp_path / "target")
    recipe = write_recipe(tmp_path, **sections)
    for name in ("one", "two"):
        done = draftline_here(
            "train", recipe, f"train.out={tmp_path / name}", "train.epochs=60", "train.max_steps=60",
            "train.checkpoint_every=30",
        )  # fmt: skip
        assert done.code == 0, done.err
        events = [logged.event for logged in RunTail(tmp_path / name).poll()]
        alarms = [event for event in events if isinstance(event, Alarm)]
        assert [alarm for alarm in alarms if "other processes had its cores" not in alarm.evidence] == []
        assert sum(isinstance(event, Phases) for event in events) == sum(isinstance(e, Step) for e in events) == 60
    kept = read_history(history_path(tmp_path / "cache"))
    assert [entry.run for entry in kept] == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert len({entry.key for entry in kept}) == 1


@pytest.mark.slow
def test_a_severe_verdict_saves_and_ends_the_run_where_the_recipe_says_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is said to have reached a million times its rate once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_recipe(tmp_path, train={"out": str(tmp_path / "run"), "on_alarm": "stop", "log_every": 500})
    words = ["train.epochs=9000", "train.max_steps=20000", "train.checkpoint_every=20000"]
    recipe, now = load_recipe(path, words), fingerprint()
    key = key_of(recipe.model_dump(mode="json"), device_kind(now, on_gpu=False), ranks=1)
    record_run(history_path(tmp_path / "cache"), past_run(key, 1e9, "runs/good", now | {"torch": "1.0"}))
    done = draftline_here("train", path, *words)
    assert done.code == 1
    assert ": below its own best: " in done.err and "of the 1G of runs/good" in done.err
    assert "torch 1.0 -> " in done.err
    assert "error: stopped at step " in done.err and "a checkpoint is saved" in done.err
    assert "warning: below its own best" in done.out
    events = [logged.event for logged in RunTail(tmp_path / "run").poll()]
    assert isinstance(events[-1], RunEnded) and events[-1].status == "failed"
    last = [event.report.step for event in events if isinstance(event, Step)][-1]
    assert checkpoint_names(tmp_path / "run") == [f"step-{last + 1:07d}"]
    assert "below its own best" in (tmp_path / "run" / "report.html").read_text()
