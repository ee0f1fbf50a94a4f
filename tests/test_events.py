"""The event log: what is written is read back equal, and nothing that the schema does not say gets through."""

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline.errors import InputError, RunError
from draftline.monitor.events import (
    Alarm,
    CheckpointWritten,
    Derived,
    Evaluation,
    Event,
    EventLog,
    GpuSample,
    Health,
    LoggedEvent,
    Phases,
    Resources,
    RunEnded,
    RunStarted,
    Step,
    log_path,
    read_events,
)
from draftline.records import EvalReport, StepReport, Verdict

STEP = StepReport(
    step=7, loss=1.5, proxy_tau=2.25, slot_accuracy=(0.5, 0.25, 0.0), blocks=64, tokens=4096, supervised_tokens=2048,
    grad_norm=0.75, lr=6e-4, seconds=0.125,
)  # fmt: skip
EVALUATION = EvalReport(
    benchmark="quickstart", engine="draftline", tau=2.5, slot_acceptance=(0.75, 0.5), prompts=8, verify_steps=40,
    tokens=100, temperature=0.0, thinking=None, block_size=4, max_new_tokens=32, tokens_per_s=80.5,
    plain_tokens_per_s=40.25, same_text_share=1.0, environment={"torch": "2.13.0"},
)  # fmt: skip
GPU = GpuSample(0.75, 1 << 34, 1 << 37, 1410, 1980, 512.5, ("power cap", "thermal, hardware"))
EVENTS: list[Event] = [
    RunStarted({"train": {"seed": 0}}, {"torch": "2.13.0"}, 900, resumed_from_step=500, best_tokens_per_s=1e4),
    Derived({"taps": [1, 9], "mask_token_id": 31}),
    Step(STEP),
    Phases(7, "drafter", 0.5, {"get": 0.125, "forward": 0.25}, 4096, 1 << 20, 1 << 30, 3),
    Resources("cuda:1", 7, "get", 1.5, 0.75, 0.25, 1 << 30, 1 << 34, GPU),
    Resources("cpu", 7, "get", 1.5, 0.75, 0.25, 1 << 30, 0, None),
    Health((Verdict("straggler", "warning", "rank 3 works 2.0 times as long", "look at it", (3,)),)),
    Evaluation(EVALUATION),
    CheckpointWritten(step=7, path="runs/a/step-7", size_bytes=12345, seconds=0.5),
    Alarm("tau differs", "proxy tau 3.0, tau 2.5", "look at the template"),
    RunEnded("completed", "all steps done"),
]


def test_every_event_comes_back_equal_in_order_with_time_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    before_s = time.time()
    with EventLog(path, rank=3) as log:
        for event in EVENTS:
            log.write(event)
    history = read_events(path)
    assert [logged.event for logged in history.events] == EVENTS
    assert {logged.rank for logged in history.events} == {3}
    assert all(before_s <= logged.time_s <= time.time() for logged in history.events)
    assert history.torn is None


def test_a_line_is_flat_json_of_version_2(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(Step(STEP))
    line = json.loads(path.read_text())
    assert line.pop("t") > 1.7e9
    assert line == {
        "v": 2, "rank": 0, "kind": "step", "step": 7, "loss": 1.5, "proxy_tau": 2.25, "slot_accuracy": [0.5, 0.25, 0.0],
        "blocks": 64, "tokens": 4096, "supervised_tokens": 2048, "grad_norm": 0.75, "lr": 6e-4, "seconds": 0.125,
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(Step(StepReport(1, math.nan, 1.0, (0.0,), 1, 1, 1, math.inf, 0.1, 0.1)))
    (logged,) = read_events(path).events
    assert isinstance(logged.event, Step)
    assert math.isnan(logged.event.report.loss)
    assert logged.event.report.grad_norm == math.inf


def test_a_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for event in EVENTS[:3]:
        with EventLog(path) as log:
            log.write(event)
    assert [logged.event for logged in read_events(path).events] == EVENTS[:3]


def test_a_written_event_survives_the_sudden_death_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import os, signal; from pathlib import Path; from draftline.monitor.events import EventLog, RunEnded\n"
        f"log = EventLog(Path({str(path)!r})); log.write(RunEnded('failed', 'x')); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [logged.event for logged in read_events(path).events] == [RunEnded("failed", "x")]


def test_a_torn_last_line_is_reported_and_on_resume_cut_off_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(EVENTS[0])
    with path.open("a") as file:
        file.write('{"v": 2, "t": 17')
    history = read_events(path)
    assert ([logged.event for logged in history.events], history.torn) == (EVENTS[:1], '{"v": 2, "t": 17')
    with EventLog(path) as log:
        log.write(EVENTS[-1])
    first, alarm, last = (logged.event for logged in read_events(path).events)
    assert (first, last) == (EVENTS[0], EVENTS[-1])
    assert isinstance(alarm, Alarm)
    assert alarm.name == "torn-event"
    assert '"t": 17' in alarm.evidence
    assert read_events(path).torn is None


HEAD = '"v": 2, "t": 1.0, "rank": 0'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"v": 2', "not JSON"),
        ("[]", "an event has the keys v, t, rank, kind"),
        ('{"v": 2, "t": 1.0, "kind": "run_ended", "status": "failed", "reason": ""}', "an event has the keys"),
        ('{"v": 1, "t": 1.0, "rank": 0, "kind": "run_ended"}', "event schema 1"),
        ('{"v": 2, "t": "now", "rank": 0, "kind": "run_ended"}', "t 'now' must be a number"),
        ('{"v": 2, "t": 1.0, "rank": true, "kind": "run_ended"}', "rank True"),
        (f'{{{HEAD}, "kind": "party"}}', "unknown event kind 'party'"),
        (f'{{{HEAD}, "kind": [1]}}', "unknown event kind [1]"),
        (f'{{{HEAD}, "kind": "run_ended", "status": "fine", "reason": ""}}', "field status"),
        (f'{{{HEAD}, "kind": "checkpoint_written", "step": 1, "path": "a", "seconds": 1.0}}', "field size_bytes"),
        (
            f'{{{HEAD}, "kind": "checkpoint_written", "step": "1", "path": "a", "size_bytes": 1, "seconds": 1.0}}',
            "step",
        ),
        (f'{{{HEAD}, "kind": "alarm", "name": "a", "evidence": 3, "remedy": ""}}', "field evidence"),
        (f'{{{HEAD}, "kind": "run_ended", "status": "failed", "reason": "", "more": 1}}', "unknown field more"),
        ("", "not JSON"),
    ],
)
def test_what_the_schema_does_not_say_is_refused_with_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(EVENTS[0])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError) as caught:
        read_events(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)


def test_listeners_are_given_what_was_written(tmp_path: Path) -> None:
    heard: list[LoggedEvent] = []
    with EventLog(log_path(tmp_path, 3), rank=3, listeners=(heard.append,)) as log:
        log.write(EVENTS[0])
    assert heard == list(read_events(tmp_path / "events-rank3.jsonl").events)
    assert log_path(tmp_path, 0).name == "events.jsonl"


def test_a_missing_log_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_events(tmp_path / "none.jsonl")


def test_a_full_disk_ends_the_log_and_the_fragment_is_cut_off_later(tmp_path: Path) -> None:
    """Files may not grow past 200 bytes: the first event that does not fit leaves a fragment."""
    path = tmp_path / "events.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with EventLog(path) as log:
            log.write(RunEnded("completed"))
            with pytest.raises(RunError, match=f"event log {path}: the disk is full\n  free space and go on"):
                log.write(RunEnded("failed", "x" * 200))
            with pytest.raises(RunError, match=f"event log {path}: File too large"):
                log.write(RunEnded("failed"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == 200
    with EventLog(path):
        pass
    assert [type(logged.event) for logged in read_events(path).events] == [RunEnded, Alarm]
