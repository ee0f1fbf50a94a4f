"""Signs of life: each rank says what it does and how long it may take; another rank of its host ends it if it takes
longer.

A rank's page is a small file mapped by both sides. While a rank waits for another one its time stands still: the cause
lies there, and that rank has a limit of its own. On a GPU it waits where its device does (`device_line.py`). That it
waits is said anew each second, so a process frozen while it waits is found as well. What is done for the first time
compiles, and has a longer limit: see `Limits`.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch.distributed import DistError

from draftline.monitor.device_line import DeviceLine, Queued
from draftline.monitor.standoff import Standoff, Wait

TEXT_BYTES = 512
NUMBERS = 6
PAGE_BYTES = 8 * NUMBERS + 3 * TEXT_BYTES
GRACE_S = 2.0  # to print its stack, before SIGKILL
PATIENCE = 15.0  # times `stall_s` that all ranks may wait for each other: NCCL takes a minute to find many hosts
SLOWER = 5.0  # times its slowest so far that a phase may take where that is more than `stall_s`


@dataclass(frozen=True)
class Limits:
    """How long a phase may take: the first time of its kind `start_up_s` (it compiles), later `stall_s`, or five times
    the longest it has taken."""

    stall_s: float
    start_up_s: float


@dataclass(frozen=True)
class Doing:
    kind: str
    text: str
    limit_s: float
    waits: bool = False  # for another rank
    since_s: float = 0.0  # by time.monotonic, once it is shown


class Heart:
    """One rank's page. `phase` and `waiting` are entered around every piece of work of a step, `between` around the
    loop that takes the steps; `poll` is called once a second by another thread."""

    def __init__(
        self, limits: Limits, path: Path | None, error_file: Path | None, line: DeviceLine | None = None
    ) -> None:
        """path None: nobody watches. error_file: where torch's launcher looks for the reason of a rank's end. line: of
        the rank's GPU."""
        self.limits = limits
        self.line = line
        self.longest_s: dict[str, float] = {}
        self.waited_s = 0.0  # in `waiting`, and
        self.held_s = 0.0  # outside of it while the device waited
        self.polled_s = time.monotonic()
        self.doing = Doing("", "starting", np.inf)
        self.wait: Wait | None = None  # for another rank, as of the last `poll`
        self.path = path
        self.page: Page | None = None
        if path is not None:
            with path.open("wb") as file:
                file.truncate(PAGE_BYTES)
            self.page = Page(path)
            self.page.introduce(os.getpid(), str(error_file or ""))
            self.show(self.doing)
            faulthandler.enable()  # SIGABRT from the watching rank prints every thread's stack

    @contextmanager
    def phase(self, kind: str, detail: str = "") -> Iterator[None]:
        """Work of this rank's own, limited by what its kind has taken before."""
        text = f"{kind} {detail}".strip()
        started, waited_s, before = time.monotonic(), self.waited_s + self.held_s, self.doing
        self.show(Doing(kind, text, self.limit_s(kind, self.longest_s)))
        try:
            yield
        finally:
            self.show(before)
        own_s = time.monotonic() - started - (self.waited_s + self.held_s - waited_s)
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), own_s)
        self.mark(kind, text)

    @contextmanager
    def between(self, text: str) -> Iterator[None]:
        """What is done between the phases within: it has `stall_s`."""
        before = self.doing
        self.show(Doing("", text, self.limits.stall_s))
        try:
            yield
        finally:
            self.show(before)

    @contextmanager
    def waiting(self, what: str, on_device: bool = False) -> Iterator[None]:
        """Waiting for another rank; on_device: the GPU does, once it gets there, and the host goes on."""
        before, started = self.doing, time.monotonic()
        if on_device:
            self.mark(before.kind, before.text)
        self.show(Doing("", f"waiting for {what}", self.limits.stall_s, waits=True))
        try:
            yield
        finally:
            self.show(before)
        self.waited_s += time.monotonic() - started
        if on_device:
            self.mark("", f"waiting for {what}", waits=True)

    def mark(self, kind: str, text: str, waits: bool = False) -> None:
        if self.line is not None:
            self.line.mark(kind, text, waits)

    def limit_s(self, kind: str, longest_s: dict[str, float]) -> float:
        longest = longest_s.get(kind)
        return self.limits.start_up_s if longest is None else max(self.limits.stall_s, SLOWER * longest)

    def show(self, doing: Doing) -> None:
        """Its time begins anew."""
        self.doing = replace(doing, since_s=time.monotonic())
        if self.page is not None:
            self.page.host.show(doing.text, self.doing.since_s, doing.limit_s)

    def poll(self) -> None:
        """Say whether this rank waits for another one now, and what its device is at."""
        if self.page is None:
            return
        head = None if self.line is None else self.line.head()
        now = time.monotonic()
        if self.doing.waits or (head is not None and head.waits):
            self.page.waited_until(now)
            if not self.doing.waits:
                self.held_s += now - self.polled_s
        self.wait = self.waits_for(head)
        if self.line is None or head is None or head.waits:
            self.page.device.show("", now, np.inf)
        else:
            limit_s = self.limit_s(head.kind, self.line.longest_s)
            self.page.device.show(f"{head.text}, on the device", self.line.began_s(head), limit_s)
        self.polled_s = now

    def waits_for(self, head: Queued | None) -> Wait | None:
        """head: what the device is at. One wait for as long as it lasts: another one begins at another time."""
        doing = self.doing
        if doing.waits:
            return Wait(doing.text, doing.since_s)
        if self.line is not None and head is not None and head.waits:
            return Wait(f"{head.text}, on the device", self.line.began_s(head))
        return None


class Entry:
    """A text and its time in a mapped file: float64 `since` on the host's monotonic clock, and seconds from there."""

    def __init__(self, page: mmap.mmap, numbers_at: int, text_at: int) -> None:
        self.map, self.text_at = page, text_at
        self.numbers = np.frombuffer(page, np.float64, 2, offset=numbers_at)

    def show(self, text: str, since_s: float, limit_s: float) -> None:
        self.numbers[1] = np.inf  # so that no reader takes the new text with the old time
        write_text(self.map, self.text_at, text)
        self.numbers[0] = since_s
        self.numbers[1] = limit_s

    def late_s(self, now: float, waited_until: float = 0.0) -> float:
        since, limit = self.numbers
        return float(now - max(since, waited_until) - limit)

    @property
    def text(self) -> str:
        return read_text(self.map, self.text_at)


class Page:
    """The mapped file: what the host does, what its device does, when the rank last waited for another one (float64),
    pid (int64), error file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), PAGE_BYTES)
        texts = 8 * NUMBERS
        self.host = Entry(self.map, 0, texts)
        self.device = Entry(self.map, 16, texts + TEXT_BYTES)
        self.error_at = texts + 2 * TEXT_BYTES
        self._waited = np.frombuffer(self.map, np.float64, 1, offset=32)
        self._pid = np.frombuffer(self.map, np.int64, 1, offset=40)

    def introduce(self, pid: int, error_file: str) -> None:
        self._pid[0] = pid
        write_text(self.map, self.error_at, error_file)
        self.device.show("", 0.0, np.inf)

    def waited_until(self, now: float) -> None:
        self._waited[0] = now

    def overdue(self, now: float) -> tuple[str, float] | None:
        """(what, seconds past its limit) where there is such."""
        for text, late_s in (
            (self.device.text, self.device.late_s(now)),
            (self.host.text, self.host.late_s(now, float(self._waited[0]))),
        ):
            if late_s > 0:
                return text, late_s
        return None

    @property
    def pid(self) -> int:
        return int(self._pid[0])

    @property
    def error_file(self) -> str:
        return read_text(self.map, self.error_at)


def write_text(page: mmap.mmap, at: int, text: str) -> None:
    data = text.encode()[: TEXT_BYTES - 1]
    page[at : at + len(data) + 1] = data + b"\0"


def read_text(page: mmap.mmap, at: int) -> str:
    return page[at : at + TEXT_BYTES].split(b"\0", 1)[0].decode(errors="replace")


class Watch(threading.Thread):
    """Once a second: poll the `own` heart, end the rank behind `page` when its time is over, and this one where all
    ranks wait for each other: its stack on its stderr, the reason where torch's launcher looks for it, then SIGKILL."""

    def __init__(self, page: Page, own: Heart, standoff: Standoff | None, interval_s: float = 1.0) -> None:
        super().__init__(name="draftline-watch", daemon=True)
        self.page = page
        self.own = own
        self.standoff = standoff
        self.interval_s = interval_s
        self.ended = threading.Event()
        self.launcher = os.getppid()

    def run(self) -> None:
        alive = True
        while not self.ended.wait(self.interval_s):
            if os.getppid() != self.launcher:  # nobody is left to report to: no rank outlives its launcher
                os.kill(os.getpid(), signal.SIGKILL)
            self.own.poll()
            self.look_at_all()
            overdue = self.page.overdue(time.monotonic()) if alive else None
            if overdue is not None:
                what, late_s = overdue
                end_rank(self.page, f"stalled: no progress in '{what}', {late_s:.0f} s past its limit")
                alive = False

    def look_at_all(self) -> None:
        if self.standoff is None:
            return
        try:
            reason = self.standoff.look(self.own.wait, time.monotonic())
        except DistError:  # whoever held the board is gone, which ends the attempt by itself
            self.standoff = None
            return
        if reason is not None and self.own.page is not None:
            end_rank(self.own.page, reason)

    def stop(self) -> None:
        self.ended.set()


def end_rank(page: Page, reason: str) -> None:
    if page.error_file:
        stamp = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        Path(page.error_file).write_text(json.dumps({"message": {"message": reason, "extraInfo": stamp}}))
    for number in (signal.SIGABRT, signal.SIGKILL):
        try:
            os.kill(page.pid, number)
        except ProcessLookupError:
            return
        time.sleep(GRACE_S)
