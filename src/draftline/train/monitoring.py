"""What watches a run while it trains, put together: event log, sinks, sampler, watchman, history and report."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from draftline.environment import variables
from draftline.monitor.events import EventLog, Phases, Role, RunStarted, log_path
from draftline.monitor.health import Ears, Watchman
from draftline.monitor.history import KnownGood, device_kind, history_path, key_of, known_good, past_run, record_run
from draftline.monitor.notices import Notices
from draftline.monitor.phases import Lap, compiled_graphs
from draftline.monitor.report import write_report
from draftline.monitor.resources import ResourceSampler
from draftline.monitor.sinks import Sinks
from draftline.monitor.state import read_run
from draftline.records import Verdict
from draftline.train.folder import RunFolder
from draftline.train.job import Setting

FEWEST_STEPS_KEPT = 50  # a shorter run is no measure of what a recipe reaches


def timed(lap: Lap, role: Role, tokens: int, queue_used_bytes: int = 0, queue_limit_bytes: int = 0) -> Phases:
    """A rank's finished step as its event."""
    return Phases(
        step=lap.step,
        role=role,
        seconds=lap.seconds,
        phases=lap.phases(),
        tokens=tokens,
        queue_used_bytes=queue_used_bytes,
        queue_limit_bytes=queue_limit_bytes,
        graphs=compiled_graphs(),
    )


class Monitoring:
    """In use as a context around the whole run of a rank. At the end of rank 0, however that came, report.html is
    written; a run that completed is remembered with its rate."""

    def __init__(self, setting: Setting, folder: RunFolder, fingerprint: dict[str, str]) -> None:
        self.recipe = setting.recipe
        self.rank = setting.ranks.role.rank
        self.total_steps = setting.total_steps
        self.folder = folder
        self.clock = setting.clock
        self.fingerprint = fingerprint
        kind = device_kind(fingerprint, self.clock.device.type == "cuda")
        self.key = key_of(self.recipe.model_dump(mode="json"), kind, ranks=len(setting.ranks.plan.roles))
        self.history = history_path(variables.cache_home())
        self.best: KnownGood | None = known_good(self.history, self.key, fingerprint)
        self._stack = ExitStack()

    def enter(self, notices: Notices) -> tuple[EventLog, Watchman | None]:
        """Start everything that runs beside the loop; the watchman and the sinks are rank 0's."""
        if self.rank:
            log = self._stack.enter_context(EventLog(log_path(self.folder.root, self.rank), self.rank))
            self._stack.enter_context(ResourceSampler(log, self.clock))
            return log, None
        sinks = Sinks(self.recipe.monitor, self.folder.root, self.recipe.model_dump(mode="json"))
        self._stack.callback(sinks.close)
        log = self._stack.enter_context(EventLog(self.folder.events, listeners=(sinks,)))

        def say(verdict: Verdict) -> None:
            notices.warn(verdict.name, verdict.evidence, verdict.remedy)

        watchman = Watchman(log, self.best, Ears(say, (sinks,)))
        for name, place in sinks.places().items():
            notices.facts({name: place})
        self._stack.enter_context(ResourceSampler(log, self.clock))
        self._stack.enter_context(watchman)
        return log, watchman

    def started(self, resumed_from: int | None) -> RunStarted:
        best = None if self.best is None else self.best.tokens_per_s
        recipe = self.recipe.model_dump(mode="json")
        return RunStarted(recipe, self.fingerprint, self.total_steps, resumed_from, best)

    def __enter__(self) -> Monitoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
        if self.rank or not self.folder.events.is_file():  # a sink was refused before there was a log
            return
        state = read_run(self.folder.root)
        write_report(state, self.folder.root / "report.html")
        if error is None and state.measured_steps >= FEWEST_STEPS_KEPT:
            name = str(self.folder.root.absolute())
            record_run(self.history, past_run(self.key, state.tokens_per_s, name, self.fingerprint))
