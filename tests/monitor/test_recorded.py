"""Recorded clean runs raise no alarm, whenever one looks. Logs of the runs themselves, their own verdicts taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.monitor.events import read_events
from draftline.monitor.verdict import judge
from draftline.monitor.window import Recent

DATA = Path(__file__).parents[1] / "data"
LOOK_EVERY_S = 0.2


@pytest.mark.parametrize("run", ["h200_quickstart", "cpu_quickstart"])
def test_no_window_of_a_clean_run_holds_an_alarm(run: str) -> None:
    """The quickstart's recipe: 150 steps on an H200, 20 ms each and bound by their launches, then decoding; and a whole
    quickstart on two CPU cores."""
    recent, looked_s, looks = Recent(), 0.0, 0
    for logged in read_events(DATA / run / "events.jsonl").events:
        recent.feed([logged])
        if logged.time_s - looked_s < LOOK_EVERY_S:
            continue
        looked_s, looks = logged.time_s, looks + 1
        found = judge(recent.window(logged.time_s), None)
        assert {verdict.severity for verdict in found} <= {"ok", "note"}, [v.evidence for v in found]
    assert looks > 20
