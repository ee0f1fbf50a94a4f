"""The watchman of a run: judges every few seconds, in rank 0, what all ranks have written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from draftline.errors import InputError, RunError
from draftline.monitor.events import Alarm, EventLog, Health, LoggedEvent
from draftline.monitor.history import KnownGood
from draftline.monitor.limits import LIMITS, Limits
from draftline.monitor.tail import RunTail
from draftline.monitor.verdict import judge
from draftline.monitor.window import Recent
from draftline.records import Verdict

LOOK_EVERY_S = 10.0
LOUD = ("warning", "severe")


@dataclass(frozen=True)
class Ears:
    """Who is told: `say` of each new verdict that asks for something, `listeners` of what other ranks have written."""

    say: Callable[[Verdict], None]
    listeners: Sequence[Callable[[LoggedEvent], None]] = ()


class Watchman:
    """Writes a Health event when the verdicts change, and an Alarm for each new one that asks for something.

    `severe` is the first verdict that may stop the run. In use as a context.
    """

    def __init__(
        self,
        log: EventLog,
        best: KnownGood | None,
        ears: Ears,
        every_s: float = LOOK_EVERY_S,
        limits: Limits = LIMITS,
    ) -> None:
        self.severe: Verdict | None = None
        self.best = best
        self._log = log
        self._ears = ears
        self._every_s = every_s
        self._limits = limits
        self._tail = RunTail(log.path.parent)
        self._tail.skip()
        self._recent = Recent()
        self._before: frozenset[tuple[str, str, tuple[int, ...]]] = frozenset()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchman", daemon=True)

    def look(self) -> tuple[Verdict, ...]:
        """Judge once, now."""
        events = self._tail.poll()
        self._recent.feed(events)
        for logged in events:
            if logged.rank != self._log.rank:
                for listener in self._ears.listeners:
                    listener(logged)
        verdicts = judge(self._recent.window(time.time()), self.best, self._limits)
        found = frozenset((verdict.name, verdict.severity, verdict.ranks) for verdict in verdicts)
        if found != self._before:
            self._log.write(Health(verdicts))
        for verdict in verdicts:
            if verdict.severity in LOUD and (verdict.name, verdict.severity, verdict.ranks) not in self._before:
                self._log.write(Alarm(verdict.name, verdict.evidence, verdict.remedy))
                self._ears.say(verdict)
            if verdict.severity == "severe" and self.severe is None:
                self.severe = verdict
        self._before = found
        return verdicts

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except InputError as error:
                self._log.write(Alarm("health-unreadable", error.what, "verdicts have stopped; the run goes on"))
                return
            except RunError:  # the disk is full: the loop's next event ends the run with the same words
                return

    def __enter__(self) -> Watchman:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
