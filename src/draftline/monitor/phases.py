"""Where a step's time goes on one rank: phases marked as they begin and end, read one step late."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch

Phase = Literal[
    "data", "capture", "put", "get", "forward", "backward", "reduce", "optimizer", "settle", "checkpoint", "evaluation"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
CAPTURING: tuple[Phase, ...] = ("capture",)
DRAFTING: tuple[Phase, ...] = ("forward", "backward", "optimizer")
WORK: tuple[Phase, ...] = CAPTURING + DRAFTING
WAITING: tuple[Phase, ...] = ("put", "get", "reduce")  # for another rank; the rest is a rank's own doing
STARTING = "starting"  # what a rank is in before its first phase
BETWEEN = "loop"  # what it is in between two phases


@dataclass(frozen=True, slots=True)
class Mark:
    """From here on a rank is in `phase` (None: in no phase)."""

    phase: Phase | None
    host_s: float  # time.perf_counter
    event: torch.cuda.Event | None  # the same moment on the GPU's own timeline
    item: int | None = None  # the micro-batch it works on, where it is one


@dataclass(frozen=True, slots=True)
class Lap:
    """The marks of one step. On CUDA it can be read once the GPU has passed the last of them, which whoever waits for
    the step's own numbers has seen to: nothing here waits or makes the GPU wait."""

    step: int
    marks: tuple[Mark, ...]

    @property
    def seconds(self) -> float:
        """The whole lap, phases and what lies between them."""
        return between(self.marks[0], self.marks[-1])

    def wait(self) -> None:
        """Until the GPU has passed it, where nothing else has seen to that."""
        end = self.marks[-1].event
        if end is not None:
            end.synchronize()

    def phases(self) -> dict[str, float]:
        """Seconds by phase. On CUDA they are those of the GPU's timeline: host work behind queued kernels costs nothing
        there and shows as nothing; what leaves the GPU waiting shows in full, whoever is slow."""
        seconds: dict[str, float] = {}
        for mark, following in pairwise(self.marks):
            if mark.phase is not None:
                seconds[mark.phase] = seconds.get(mark.phase, 0.0) + between(mark, following)
        return seconds


class PhaseClock:
    """Marks the phases of one rank's steps.

        with clock.phase("capture"):
            ...
        lap = clock.lap()

    A phase entered inside another one interrupts it: every moment counts once. `current` can be read by another thread.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.step = 0
        self.current: tuple[str, float] = (STARTING, time.time())  # (phase, unix time since when)
        self._now = now
        self._marks: list[Mark] = [self._mark(None)]

    @contextmanager
    def phase(self, name: Phase, item: int | None = None) -> Iterator[None]:
        """item: the micro-batch that is worked on, for a trace."""
        outer = self._marks[-1]
        self._enter(name, item)
        try:
            yield
        finally:
            self._enter(outer.phase, outer.item)

    def lap(self) -> Lap:
        """End the current step. The next one begins where it ends, so that laps leave no time out."""
        end = self._mark(None)
        lap = Lap(self.step, (*self._marks, end))
        self._marks = [end]
        self.step += 1
        return lap

    def now(self) -> tuple[Mark, float]:
        """This moment as a mark and as unix time, once the GPU has done all that is queued."""
        mark = self._mark(None)
        if mark.event is not None:
            mark.event.synchronize()
            mark = self._mark(None)
            assert mark.event is not None
            mark.event.synchronize()
        return mark, time.time()

    def _enter(self, name: Phase | None, item: int | None) -> None:
        self._marks.append(self._mark(name, item))
        self.current = (name or BETWEEN, time.time())

    def _mark(self, name: Phase | None, item: int | None = None) -> Mark:
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(name, self._now(), event, item)


def between(start: Mark, end: Mark) -> float:
    if start.event is not None and end.event is not None:
        return start.event.elapsed_time(end.event) / 1e3
    return end.host_s - start.host_s


def compiled_graphs() -> int:
    """Graphs that torch's compiler has made in this process so far; 0 where nothing has loaded it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
