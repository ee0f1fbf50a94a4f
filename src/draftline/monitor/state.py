"""A run as its event logs tell it: one state for the live view and the report, fed event by event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftline.monitor.events import (
    Alarm,
    CheckpointWritten,
    Derived,
    Evaluation,
    Health,
    LoggedEvent,
    Phases,
    Preflight,
    Resources,
    Role,
    RunEnded,
    RunStarted,
    Step,
)
from draftline.monitor.history import KnownGood
from draftline.monitor.series import Series
from draftline.monitor.tail import RunTail
from draftline.monitor.verdict import judge
from draftline.monitor.window import WARM_UP_STEPS, Recent, Window, memory_of, utilisation_of
from draftline.records import EvalReport, StepReport, Verdict


@dataclass
class RankState:
    """One rank over the whole attempt."""

    role: Role = "colocated"
    device: str = ""
    steps_done: int = 0
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    rate_tokens: int = 0  # of the steps after the warm-up
    rate_seconds: float = 0.0
    newest: Resources | None = None
    utilisation: Series = field(default_factory=Series)  # over unix time
    memory_bytes: Series = field(default_factory=Series)

    def add_phases(self, event: Phases) -> None:
        self.role = event.role
        self.steps_done += 1
        self.seconds += event.seconds
        for name, seconds in event.phases.items():
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        if self.steps_done > WARM_UP_STEPS:
            self.rate_tokens += event.tokens
            self.rate_seconds += event.seconds

    def add_resources(self, time_s: float, event: Resources) -> None:
        self.device = event.device
        self.newest = event
        self.utilisation.add(time_s, utilisation_of(event))
        self.memory_bytes.add(time_s, memory_of(event))


@dataclass
class RunState:
    """The newest attempt of a run, with the curves of all attempts."""

    root: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    gates_by_rank: dict[int, dict[str, str]] = field(default_factory=dict)  # passed before the first step, with figures
    total_steps: int = 0
    best_tokens_per_s: float | None = None
    first_s: float = 0.0  # unix time of the first event of all
    started_s: float = 0.0  # of this attempt
    newest_s: float = 0.0
    attempts: int = 0
    loss: Series = field(default_factory=Series)  # over steps, repeated ones of later attempts included
    proxy_tau: Series = field(default_factory=Series)
    tokens_seen: Series = field(default_factory=Series)  # over unix time, of all attempts
    tokens: int = 0
    last: StepReport | None = None
    evaluations: list[EvalReport] = field(default_factory=list)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    alarms: list[tuple[float, Alarm]] = field(default_factory=list)
    health: list[tuple[float, tuple[Verdict, ...]]] = field(default_factory=list)
    ended: RunEnded | None = None
    ranks: dict[int, RankState] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)

    def feed(self, events: Iterable[LoggedEvent]) -> None:
        for logged in events:
            self.first_s = self.first_s or logged.time_s
            self.newest_s = max(self.newest_s, logged.time_s)
            self.recent.feed((logged,))
            self._take(logged)

    def _take(self, logged: LoggedEvent) -> None:
        event, time_s = logged.event, logged.time_s
        if isinstance(event, Phases):
            self._rank(logged.rank).add_phases(event)
        elif isinstance(event, Resources):
            self._rank(logged.rank).add_resources(time_s, event)
        elif isinstance(event, Step):
            self._add_step(time_s, event.report)
        elif isinstance(event, RunStarted | RunEnded) and logged.rank:
            pass  # the run starts and ends with rank 0; others join it and leave
        elif isinstance(event, RunStarted):
            self._start(time_s, event)
        elif isinstance(event, Evaluation):
            self.evaluations.append(event.report)
        elif isinstance(event, Preflight):
            self.gates_by_rank[logged.rank] = event.gates
        else:
            self._note(time_s, event)

    def _note(self, time_s: float, event: Derived | CheckpointWritten | Alarm | Health | RunEnded) -> None:
        if isinstance(event, Derived):
            self.derived = event.values
        elif isinstance(event, CheckpointWritten):
            self.checkpoints.append(event)
        elif isinstance(event, Alarm):
            self.alarms.append((time_s, event))
        elif isinstance(event, Health):
            self.health.append((time_s, event.verdicts))
        else:
            self.ended = event

    def _start(self, time_s: float, event: RunStarted) -> None:
        self.recipe, self.fingerprint = event.recipe, event.fingerprint
        self.total_steps, self.best_tokens_per_s = event.total_steps, event.best_tokens_per_s
        self.started_s, self.ended = time_s, None
        self.attempts += 1
        self.ranks.clear()

    def _add_step(self, time_s: float, report: StepReport) -> None:
        self.last = report
        self.loss.add(report.step, report.loss)
        self.proxy_tau.add(report.step, report.proxy_tau)
        self.tokens += report.tokens
        self.tokens_seen.add(time_s, self.tokens)

    @property
    def gates(self) -> dict[str, str]:
        """Of rank 0, and what only others passed: in a split, those of the target's layers."""
        passed: dict[str, str] = {}
        for _, gates in sorted(self.gates_by_rank.items()):
            passed = gates | passed
        return passed

    @property
    def newest_evaluations(self) -> list[EvalReport]:
        """One for each benchmark."""
        return list({report.benchmark: report for report in self.evaluations}.values())

    def verdicts(self, window: Window) -> tuple[Verdict, ...]:
        best = self.best_tokens_per_s
        known = None if best is None else KnownGood(best, "its best run so far", self.fingerprint, self.fingerprint)
        return judge(window, known)

    @property
    def last_verdicts(self) -> tuple[Verdict, ...]:
        """What the watchman found last; judged now where the run has ended, or was recorded, without one."""
        return self.health[-1][1] if self.health else self.verdicts(self.recent.window(self.newest_s))

    def _rank(self, number: int) -> RankState:
        return self.ranks.setdefault(number, RankState())

    @property
    def drafting(self) -> list[RankState]:
        return [rank for rank in self.ranks.values() if rank.role != "target" and rank.rate_seconds > 0]

    @property
    def tokens_per_s(self) -> float:
        """Of the whole attempt after its warm-up, checkpoints included; 0 before there is something to measure."""
        return sum(rank.rate_tokens / rank.rate_seconds for rank in self.drafting)

    @property
    def measured_steps(self) -> int:
        return min((rank.steps_done - WARM_UP_STEPS for rank in self.drafting), default=0)

    @property
    def steps_done(self) -> int:
        return 0 if self.last is None else self.last.step + 1


def read_run(root: Path) -> RunState:
    """The whole run. Raises InputError where the folder is no run."""
    tail, state = RunTail(root), RunState(root)
    tail.require_run()
    state.feed(tail.poll())
    return state
