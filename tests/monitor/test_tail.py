"""The logs of a run followed while their writers write."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import InputError
from draftline.monitor.events import Alarm, EventLog, log_path
from draftline.monitor.tail import RunTail


def alarm(name: str) -> Alarm:
    return Alarm(name, "", "")


def test_all_ranks_are_read_in_the_order_of_time_and_each_event_once(tmp_path: Path) -> None:
    tail = RunTail(tmp_path)
    assert (tail.poll(), tail.has_begun()) == ([], False)
    with EventLog(log_path(tmp_path, 0)) as first, EventLog(log_path(tmp_path, 3), rank=3) as other:
        first.write(alarm("a"))
        other.write(alarm("b"))
        first.write(alarm("c"))
        assert [(logged.rank, logged.event) for logged in tail.poll()] == [
            (0, alarm("a")), (3, alarm("b")), (0, alarm("c")),
        ]  # fmt: skip
        assert tail.poll() == []
        other.write(alarm("d"))
        assert [logged.event for logged in tail.poll()] == [alarm("d")]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    tail, path = RunTail(tmp_path), log_path(tmp_path, 0)
    with EventLog(path) as log:
        log.write(alarm("a"))
    line = path.read_text()
    path.write_text(line + line[:30])
    assert len(tail.poll()) == 1
    path.write_text(line + line)
    assert len(tail.poll()) == 1


def test_an_unreadable_line_is_named_also_after_a_skip(tmp_path: Path) -> None:
    tail, path = RunTail(tmp_path), log_path(tmp_path, 0)
    with EventLog(path) as log:
        log.write(alarm("a"))
        log.write(alarm("b"))
    tail.skip()
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"events.jsonl:3: an event has the keys"):
        tail.poll()
