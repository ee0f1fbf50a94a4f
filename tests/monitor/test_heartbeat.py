"""When a rank's time runs, and when it stands still."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftline.monitor.device_line import DeviceLine
from draftline.monitor.heartbeat import Heart, Limits, Page

STALL_S = 0.2


@dataclass
class End:
    """An event that the test's GPU passes when it is told to."""

    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass
class Pair:
    heart: Heart
    page: Page

    def overdue(self) -> str | None:
        self.heart.poll()
        found = self.page.overdue(time.monotonic())
        return None if found is None else found[0]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    heart = Heart(Limits(STALL_S, 1.0), tmp_path / "page", None)
    with heart.phase("step"):
        pass  # the first, which may take start_up_s
    return Pair(heart, Page(tmp_path / "page"))


def queue(pair: Pair, kind: str, waits: bool) -> End:
    assert pair.heart.line is not None
    pair.heart.line.mark(kind, kind, waits)
    end = pair.heart.line.queue[-1].end
    assert isinstance(end, End)
    return end


def test_own_work_is_late_and_waiting_is_not(pair: Pair) -> None:
    with pair.heart.phase("step", "7"):
        assert pair.overdue() is None
        time.sleep(1.5 * STALL_S)
        assert pair.overdue() == "step 7"
        with pair.heart.waiting("the others"):
            for _ in range(4):
                time.sleep(0.5 * STALL_S)
                assert pair.overdue() is None
        assert pair.overdue() is None  # its time begins anew
        time.sleep(1.5 * STALL_S)
        assert pair.overdue() == "step 7"
    time.sleep(1.5 * STALL_S)
    assert pair.overdue() is None  # "starting" has no limit
    with pair.heart.between("two phases"):
        time.sleep(1.5 * STALL_S)
        assert pair.overdue() == "two phases"


def test_a_process_that_says_nothing_while_it_waits_is_frozen(pair: Pair) -> None:
    with pair.heart.waiting("the others"):
        time.sleep(1.5 * STALL_S)
        found = pair.page.overdue(time.monotonic())
        assert found is not None and found[0] == "waiting for the others"


def test_waiting_is_no_measure_of_what_a_phase_takes(pair: Pair) -> None:
    with pair.heart.phase("step"), pair.heart.waiting("the others"):
        time.sleep(2 * STALL_S)
    with pair.heart.phase("step"):
        time.sleep(1.5 * STALL_S)
        assert pair.overdue() == "step"


def test_a_device_names_its_own_kernel_and_not_the_collective_behind_anothers(pair: Pair) -> None:
    """Both ranks' hosts wait for their devices: one is in the hung kernel, the other in the sum after it."""
    pair.heart.line = DeviceLine(End, longest_s={"forward": 0.0})
    work, total = queue(pair, "forward", False), queue(pair, "sums", True)
    with pair.heart.phase("step"):
        work.passed = True
        for _ in range(4):
            time.sleep(0.5 * STALL_S)
            assert pair.overdue() is None
        total.passed = True
        assert pair.overdue() is None
        time.sleep(1.5 * STALL_S)
        assert pair.overdue() == "step"  # the device is idle: it is the host that stands still
    pair.heart.line = DeviceLine(End, longest_s={"forward": 0.0})
    queue(pair, "forward", False)
    time.sleep(1.5 * STALL_S)
    assert pair.overdue() == "forward, on the device"


def test_the_devices_wait_is_no_measure_of_what_a_phase_takes(pair: Pair) -> None:
    pair.heart.line = DeviceLine(End)
    total = queue(pair, "sums", True)
    with pair.heart.phase("step"):
        for _ in range(8):
            time.sleep(0.5 * STALL_S)
            pair.heart.poll()
        total.passed = True
    pair.heart.line = None
    with pair.heart.phase("step"):
        time.sleep(2 * STALL_S)
        assert pair.overdue() == "step"
