"""The live view: on a terminal while a run goes on, once where there is none, and as narrow as a terminal may be."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from command import draftline_here
from draftline.monitor.events import EventLog, Phases, Resources, RunEnded, RunStarted, Step
from draftline.monitor.panels import screen
from draftline.monitor.state import RunState, read_run
from draftline.monitor.tail import RunTail
from draftline.records import StepReport

INCIDENT = Path(__file__).resolve().parents[1] / "data" / "incident"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown(state: RunState, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(screen(state, state.newest_s, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def write_steps(log: EventLog, steps: range) -> None:
    for step in steps:
        log.write(Step(StepReport(step, 10 / (1 + step), 1 + step / 10, (0.5,), 8, 100, 50, 1.0, 1e-3, 0.1)))
        log.write(Phases(step, "colocated", 0.1, {"capture": 0.02, "forward": 0.03, "backward": 0.04}, 100, 0, 0, 0))
        log.write(Resources("cpu", step, "backward", time.time(), 0.9, 0.0, 2**30, 0, None))


@pytest.mark.parametrize("width", [80, 120])
def test_the_incident_on_a_screen(width: int) -> None:
    state = RunState(INCIDENT)
    state.feed(RunTail(INCIDENT).poll())
    text = shown(state, width)
    assert max(len(line) for line in text.splitlines()) <= width
    first, *lines = text.splitlines()
    assert first.startswith("incident  step 0/800,200  4.6K tokens/s (36% of its best)  ETA 37d 1h")
    assert any("waits 70% → 100% full → drafter 3×" in line for line in lines)
    rows = {line.split()[0]: line.split() for line in lines if line[:4].strip().isdigit()}
    assert rows["7"][:6] == ["7", "drafter", "cuda:7", "backward", "1%", "31"]
    assert [name for line in lines for name in re.findall(r"^● (.+?)  ", line)] == [
        "degraded kernels", "replica unlike its peers", "below its own best",
    ]  # fmt: skip


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(RunStarted({}, {}, 40))
        write_steps(log, range(40))
        log.write(RunEnded("completed"))
    done = draftline_here("watch", tmp_path)
    assert done.code == 0, done.err
    assert not CONTROL.search(done.out)
    assert "step 40/40  1K tokens/s" in done.out
    assert "completed after" in done.out
    assert "loss 0.25 █" in done.out
    assert "proxy tau 4.90 ▁" in done.out
    assert "● drafter-bound" in done.out


def test_a_run_that_was_killed_is_seen_to_stand_still(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(RunStarted({}, {}, 100))
        write_steps(log, range(20))
    state = read_run(tmp_path)
    console = Console(file=io.StringIO(), width=120)
    console.print(screen(state, state.newest_s + 90, 120))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "● stalled  rank 0 has been silent for 1m30s, last seen in backward of step 19" in text


def test_a_live_run_is_followed_to_its_end_on_a_terminal(tmp_path: Path) -> None:
    """The view starts before the first event and ends by itself with the run."""
    ours, theirs = pty.openpty()
    view = subprocess.Popen(
        [sys.executable, "-m", "draftline", "watch", tmp_path], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    seen = read_until(ours, "loading, no event yet")
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(RunStarted({}, {}, 40))
        write_steps(log, range(20))
        seen += read_until(ours, "step 20/40")
        write_steps(log, range(20, 40))
        log.write(RunEnded("completed"))
    seen += read_until(ours, "completed after")
    assert view.wait(timeout=20) == 0
    assert "ETA" in seen


def read_until(terminal: int, words: str, limit_s: float = 60.0) -> str:
    text, end = "", time.monotonic() + limit_s
    while words not in CONTROL.sub("", text):
        assert time.monotonic() < end, text
        text += os.read(terminal, 65536).decode(errors="replace")
    return CONTROL.sub("", text)


def test_a_folder_that_is_no_run_is_bad_input(tmp_path: Path) -> None:
    done = draftline_here("watch", tmp_path / "none")
    assert done.code == 2
    assert "holds no events.jsonl" in done.err
