"""Signs of life: each rank says what it does and by when it will be done; another rank of its host ends it if not.

A rank's page is a small file mapped by both sides. Waiting for another rank has no limit: the cause lies there, and
that rank has a limit of its own. What is done for the first time compiles, and has a longer one: see `Limits`.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TEXT_BYTES = 512
PAGE_BYTES = 8 + 8 + 2 * TEXT_BYTES  # deadline, pid, what it does, its error file
GRACE_S = 2.0  # to print its stack, before SIGKILL
SLOWER = 5.0  # times its slowest so far that a phase may take where that is more than `stall_s`


@dataclass(frozen=True)
class Limits:
    """How long a phase may take: the first time of its kind `start_up_s` (it compiles), later `stall_s`, or five times
    the longest it has taken."""

    stall_s: float
    start_up_s: float


class Heart:
    """One rank's page. `phase` and `waiting` are entered around every piece of work of a step."""

    def __init__(self, limits: Limits, path: Path | None, error_file: Path | None) -> None:
        """path None: nobody watches. error_file: where torch's launcher looks for the reason of a rank's end."""
        self.limits = limits
        self.longest_s: dict[str, float] = {}
        self.path = path
        self.page: Page | None = None
        if path is not None:
            with path.open("wb") as file:
                file.truncate(PAGE_BYTES)
            self.page = Page(path)
            self.page.introduce(os.getpid(), str(error_file or ""))
            faulthandler.enable()  # SIGABRT from the watching rank prints every thread's stack

    @contextmanager
    def phase(self, kind: str, detail: str = "", patience: float = 1.0) -> Iterator[None]:
        """Work of this rank's own, limited by `patience` times what its kind has taken before."""
        started = time.monotonic()
        before = self.say(f"{kind} {detail}".strip(), started + patience * self.limit_s(kind))
        try:
            yield
        finally:
            self.resume(before)
        self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), time.monotonic() - started)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Waiting for another rank."""
        before = self.say(f"waiting for {what}", np.inf)
        try:
            yield
        finally:
            self.resume(before)

    def limit_s(self, kind: str) -> float:
        longest = self.longest_s.get(kind)
        return self.limits.start_up_s if longest is None else max(self.limits.stall_s, SLOWER * longest)

    def say(self, text: str, deadline: float) -> tuple[str, float]:
        """Show what is being done; returns what was shown before."""
        if self.page is None:
            return "", np.inf
        before = self.page.text, self.page.deadline
        self.page.show(text, deadline)
        return before

    def resume(self, before: tuple[str, float]) -> None:
        if self.page is not None:
            self.page.show(*before)


class Page:
    """The mapped file: float64 deadline on the host's monotonic clock, int64 pid, two texts."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._deadline = np.frombuffer(self.map, np.float64, 1)
        self._pid = np.frombuffer(self.map, np.int64, 1, offset=8)

    def introduce(self, pid: int, error_file: str) -> None:
        self._pid[0] = pid
        self.write_text(16 + TEXT_BYTES, error_file)
        self.show("starting", np.inf)

    def show(self, text: str, deadline: float) -> None:
        self._deadline[0] = np.inf  # so that no reader takes the new text with the old deadline
        self.write_text(16, text)
        self._deadline[0] = deadline

    @property
    def deadline(self) -> float:
        return float(self._deadline[0])

    @property
    def pid(self) -> int:
        return int(self._pid[0])

    @property
    def text(self) -> str:
        return self.read_text(16)

    @property
    def error_file(self) -> str:
        return self.read_text(16 + TEXT_BYTES)

    def write_text(self, at: int, text: str) -> None:
        data = text.encode()[: TEXT_BYTES - 1]
        self.map[at : at + len(data) + 1] = data + b"\0"

    def read_text(self, at: int) -> str:
        return self.map[at : at + TEXT_BYTES].split(b"\0", 1)[0].decode(errors="replace")


class Watch(threading.Thread):
    """Ends the rank behind `page` when its deadline has passed: its stack on its stderr, the reason where torch's
    launcher looks for it, then SIGKILL."""

    def __init__(self, page: Page, interval_s: float = 1.0) -> None:
        super().__init__(name="draftline-watch", daemon=True)
        self.page = page
        self.interval_s = interval_s
        self.ended = threading.Event()
        self.launcher = os.getppid()

    def run(self) -> None:
        while not self.ended.wait(self.interval_s):
            if os.getppid() != self.launcher:  # nobody is left to report to: no rank outlives its launcher
                os.kill(os.getpid(), signal.SIGKILL)
            late_s = time.monotonic() - self.page.deadline
            if late_s > 0:
                self.end_it(late_s)
                return

    def end_it(self, late_s: float) -> None:
        reason = f"stalled: no progress in '{self.page.text}', {late_s:.0f} s past its limit"
        if self.page.error_file:
            stamp = {"py_callstack": reason, "timestamp": str(int(time.time()))}
            Path(self.page.error_file).write_text(json.dumps({"message": {"message": reason, "extraInfo": stamp}}))
        for number in (signal.SIGABRT, signal.SIGKILL):
            try:
                os.kill(self.page.pid, number)
            except ProcessLookupError:
                return
            time.sleep(GRACE_S)

    def stop(self) -> None:
        self.ended.set()
