"""The last minute of a run, rank by rank: what verdicts are taken from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from draftline.monitor.events import LoggedEvent, Phases, Resources, Role, RunEnded, RunStarted
from draftline.monitor.phases import STARTING, Phase

WINDOW_S = 60.0
FEWEST_STEPS = 8  # of long steps more than the window's are taken, so that there is something to compare
WARM_UP_STEPS = 5  # the first steps of a process compile, fill caches and allocate: they are no sample of its rate
KEPT_STEPS = 4096
KEPT_SAMPLES = 300  # ten minutes: a leak is slower than a window
KEPT_SAVES = 20


@dataclass(frozen=True, slots=True)
class RankWindow:
    """What one rank did lately. Steps are those after its warm-up, oldest first."""

    rank: int
    role: Role
    steps: tuple[Phases, ...]
    samples: tuple[Resources, ...]  # those of the window
    past_samples: tuple[tuple[float, Resources], ...]  # (unix time, sample), up to ten minutes, warm-up left out
    steps_done: int  # since this attempt began, warm-up included
    heard_s: float  # when the last event of this rank was written
    saves: tuple[tuple[float, float], ...]  # (unix time, seconds) of the last steps that a checkpoint held up

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def share(self, *phases: Phase) -> float:
        """Share of the steps' time that these phases took."""
        total = sum(step.phases.get(phase, 0.0) for step in self.steps for phase in phases)
        return total / self.seconds if self.seconds > 0 else 0.0

    def median_seconds(self, *phases: Phase) -> float:
        """Seconds that these phases take in the median step; of the whole step where none is named."""
        if not self.steps:
            return 0.0
        if not phases:
            return median(step.seconds for step in self.steps)
        return median(sum(step.phases.get(phase, 0.0) for phase in phases) for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.steps) / self.seconds if self.seconds > 0 else 0.0

    @property
    def queue_fill(self) -> float | None:
        """Mean fill of this rank's channel at the ends of its steps; None without one."""
        fills = [step.queue_used_bytes / step.queue_limit_bytes for step in self.steps if step.queue_limit_bytes]
        return sum(fills) / len(fills) if fills else None

    @property
    def utilisation(self) -> float | None:
        """Median of the GPU's utilisation, or of what stands in for it on a CPU, while steps are taken: decoding and
        saving leave a device idle that does nothing wrong."""
        values = [utilisation_of(sample) for sample in self.samples if sample.phase not in NO_STEP]
        return median(values) if values else None

    @property
    def memory_bytes(self) -> float | None:
        values = [memory_of(sample) for sample in self.samples]
        return median(values) if values else None

    @property
    def newest(self) -> Resources | None:
        return self.past_samples[-1][1] if self.past_samples else None


@dataclass(frozen=True, slots=True)
class Window:
    end_s: float
    ranks: tuple[RankWindow, ...]  # ascending
    ended: bool

    def of(self, *roles: Role) -> tuple[RankWindow, ...]:
        return tuple(rank for rank in self.ranks if rank.role in roles)

    @property
    def drafting(self) -> tuple[RankWindow, ...]:
        return self.of("colocated", "drafter")

    @property
    def tokens_per_s(self) -> float:
        """Target tokens consumed per second by the whole job (SPEC 7)."""
        return sum(rank.tokens_per_s for rank in self.drafting)


NO_STEP = ("evaluation", "checkpoint", STARTING)


def utilisation_of(sample: Resources) -> float:
    return sample.busy_share if sample.gpu is None else sample.gpu.utilisation


def memory_of(sample: Resources) -> int:
    """Of the GPU as a whole where NVML shows it, else what torch holds there; on a CPU the process's."""
    if sample.gpu is not None:
        return sample.gpu.memory_used_bytes
    return sample.allocated_bytes or sample.rss_bytes


@dataclass
class RankRecord:
    """The newest events of one rank."""

    role: Role = "colocated"
    steps: deque[tuple[float, Phases]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    samples: deque[tuple[float, Resources]] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    saves: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_SAVES))
    newest: tuple[float, Resources] | None = None
    steps_done: int = 0
    heard_s: float = 0.0

    def add(self, logged: LoggedEvent) -> None:
        self.heard_s = max(self.heard_s, logged.time_s)
        if isinstance(logged.event, Phases):
            self.role = logged.event.role
            self.steps_done += 1
            if logged.event.phases.get("checkpoint", 0.0) > 0:
                self.saves.append((logged.time_s, logged.event.phases["checkpoint"]))
            if self.steps_done > WARM_UP_STEPS:
                self.steps.append((logged.time_s, logged.event))
        elif isinstance(logged.event, Resources):
            self.newest = (logged.time_s, logged.event)
            if self.steps_done > WARM_UP_STEPS:
                self.samples.append(self.newest)

    def window(self, rank: int, start_s: float) -> RankWindow:
        within = [step for time_s, step in self.steps if time_s >= start_s]
        if len(within) < FEWEST_STEPS:
            within = [step for _, step in self.steps][-FEWEST_STEPS:]
        past = tuple(self.samples) or ((self.newest,) if self.newest is not None else ())
        return RankWindow(
            rank=rank,
            role=self.role,
            steps=tuple(within),
            samples=tuple(sample for time_s, sample in self.samples if time_s >= start_s),
            past_samples=past,
            steps_done=self.steps_done,
            heard_s=self.heard_s,
            saves=tuple(self.saves),
        )


class Recent:
    """Takes a run's events as they come, those of all ranks in the order of time; an attempt's start forgets what was
    before it."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankRecord] = {}
        self._ended = False

    def feed(self, events: Iterable[LoggedEvent]) -> None:
        for logged in events:
            if isinstance(logged.event, RunStarted):
                self._ranks.clear()
                self._ended = False
            elif isinstance(logged.event, RunEnded):
                self._ended = True
            elif isinstance(logged.event, Phases | Resources):
                self._ranks.setdefault(logged.rank, RankRecord()).add(logged)

    def window(self, end_s: float, length_s: float = WINDOW_S) -> Window:
        """The `length_s` before `end_s` (unix time)."""
        start_s = end_s - length_s
        ranks = tuple(record.window(rank, start_s) for rank, record in sorted(self._ranks.items()))
        return Window(end_s, ranks, self._ended)
