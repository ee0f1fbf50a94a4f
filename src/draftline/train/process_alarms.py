"""What this process should not have: undeclared switches, and kernels that are compiled in a warm run."""

from __future__ import annotations

from collections.abc import Callable

from draftline.environment.compile_guard import CompileGuard
from draftline.environment.switch_watch import SwitchWatch
from draftline.monitor.events import Alarm


class ProcessAlarms:
    """Looks when asked. What it finds goes to `raise_all` as soon as there is one: a run has no events before its
    start, and its switches are looked at before that."""

    def __init__(self, watch: SwitchWatch, guard: CompileGuard) -> None:
        self.watch = watch
        self.guard = guard
        self.raise_all: Callable[[list[Alarm]], None] | None = None
        self.waiting: list[Alarm] = []

    def look(self, moment: str) -> None:
        """At the process-wide switches; `moment` says when: "at step 500"."""
        found = self.watch.look(moment)
        self.hand_over([Alarm("undeclared-switch", switch.evidence, switch.remedy) for switch in found])

    def look_at_kernels(self, moment: str) -> None:
        """At what Triton compiled since the last look, though the run was warm."""
        late, self.guard.late_kernels = self.guard.late_kernels, []
        if late:
            evidence = f"{len(late)} kernels compiled {moment}, after the warm-up: {'; '.join(late)}"
            remedy = "each paused the run: report it, the warm-up should have them"
            self.hand_over([Alarm("late-kernels", evidence, remedy)])

    def hand_over(self, found: list[Alarm]) -> None:
        self.waiting += found
        if self.raise_all is not None and self.waiting:
            self.waiting, told = [], self.waiting
            self.raise_all(told)

    def start(self, raise_all: Callable[[list[Alarm]], None]) -> None:
        """From now on alarms can be raised; those that wait are raised at once."""
        self.raise_all = raise_all
        self.hand_over([])
