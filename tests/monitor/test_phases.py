"""The phase clock counts every moment once, in the phase that it belongs to."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch

from draftline.monitor.phases import PhaseClock

CPU = torch.device("cpu")


def ticking() -> PhaseClock:
    """A clock whose time goes on by one second each time that it is looked at."""
    seconds = count()
    return PhaseClock(CPU, now=lambda: float(next(seconds)))


def test_a_lap_holds_its_phases_and_what_lies_between_them() -> None:
    clock = ticking()  # 0
    with clock.phase("data"):  # 1
        pass  # 2
    with clock.phase("capture"):  # 3
        pass  # 4
    with clock.phase("data"):  # 5
        pass  # 6
    lap = clock.lap()  # 7
    assert (lap.step, lap.seconds, lap.phases()) == (0, 7.0, {"data": 2.0, "capture": 1.0})


def test_a_phase_inside_another_interrupts_it() -> None:
    clock = ticking()
    with clock.phase("get"):  # 1
        with clock.phase("data"):  # 2
            pass  # 3
        assert clock.current[0] == "get"
    lap = clock.lap()  # 4 is the end of get
    assert lap.phases() == {"get": 2.0, "data": 1.0}
    assert lap.seconds == 5.0


def test_laps_leave_no_time_out_and_count_up() -> None:
    clock = ticking()
    clock.lap()  # 1
    clock.step = 40
    with clock.phase("forward"):
        pass
    first, second = clock.lap(), clock.lap()
    assert [first.step, second.step] == [40, 41]
    assert (first.seconds, second.seconds, second.phases()) == (3.0, 1.0, {})


def test_an_exception_ends_its_phase() -> None:
    clock = ticking()
    with pytest.raises(ValueError, match="mine"), clock.phase("backward"):
        raise ValueError("mine")
    assert clock.current[0] == "loop"
    assert clock.lap().phases() == {"backward": 1.0}


def test_real_seconds() -> None:
    clock = PhaseClock(CPU)
    with clock.phase("checkpoint"):
        time.sleep(0.05)
        assert clock.current[0] == "checkpoint"
        assert abs(clock.current[1] - time.time()) < 10
    assert 0.05 <= clock.lap().phases()["checkpoint"] < 1.0


def test_marking_a_phase_costs_microseconds() -> None:
    """A step marks about ten phases: 0.2 ms of a step that takes 20 ms or more is the 1% that monitoring may cost."""
    clock = PhaseClock(CPU)
    started = time.process_time()
    for _ in range(1000):
        with clock.phase("forward"):
            pass
    assert (time.process_time() - started) / 1000 < 20e-6
    clock.lap().phases()
