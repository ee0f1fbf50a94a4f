"""The incident's figures, replayed: named within one window of a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from draftline.monitor.history import KnownGood
from draftline.monitor.tail import RunTail
from draftline.monitor.verdict import judge
from draftline.monitor.window import WINDOW_S, Recent

INCIDENT = Path(__file__).resolve().parents[1] / "data" / "incident"
KNOWN_GOOD = KnownGood(12_800, "runs/good", {"torch": "2.11.0+cu130"}, {"torch": "2.11.0+cu128"})


def test_the_incident_is_named() -> None:
    events = RunTail(INCIDENT).poll()
    assert events[-1].time_s - events[0].time_s <= WINDOW_S + 1
    recent = Recent()
    recent.feed(events)
    verdicts = judge(recent.window(events[-1].time_s), KNOWN_GOOD)
    assert [(verdict.name, verdict.severity, verdict.ranks) for verdict in verdicts] == [
        ("degraded kernels", "severe", (5, 6, 7)),
        ("replica unlike its peers", "severe", (7,)),
        ("below its own best", "severe", ()),
    ]
    kernels, replica, rate = (verdict.evidence for verdict in verdicts)
    assert "drafter ranks 5, 6, 7 limit the run (the targets wait 70% of their time" in kernels
    assert "their queues 100% full), yet the devices are 0%, 3%, 1% busy" in kernels
    assert replica == "drafter rank 7 holds 31 GiB, its peers 86, 96 GiB"
    assert rate.startswith("4.6K tokens/s, 36% of the 12.8K of runs/good")
    assert rate.endswith("since then: torch 2.11.0+cu130 -> 2.11.0+cu128")


def test_half_a_window_is_enough() -> None:
    events = [logged for logged in RunTail(INCIDENT).poll() if logged.time_s <= 1_790_000_000 + 45]
    recent = Recent()
    recent.feed(events)
    assert judge(recent.window(events[-1].time_s), None)[0].name == "degraded kernels"


def test_the_logs_are_what_their_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, INCIDENT / "reconstruct.py", tmp_path], check=True)
    names = sorted(path.name for path in INCIDENT.glob("*.jsonl"))
    assert names == ["events-rank1.jsonl", *(f"events-rank{n}.jsonl" for n in range(2, 8)), "events.jsonl"]
    assert all((tmp_path / name).read_bytes() == (INCIDENT / name).read_bytes() for name in names)
    assert "Not a recording" in (INCIDENT / "events.jsonl").read_text().splitlines()[1]
