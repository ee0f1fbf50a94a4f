"""What this process should not have: undeclared switches and late kernels, told to a person and to the run's events."""

from __future__ import annotations

from draftline.environment.compile_guard import CompileGuard
from draftline.environment.switch_watch import SwitchWatch
from draftline.monitor.events import Alarm, EventLog
from draftline.monitor.notices import Notices


class ProcessAlarms:
    """Looks when asked, and tells what it finds at once; what was found before the run had a log is written when it
    gets one."""

    def __init__(self, watch: SwitchWatch, guard: CompileGuard, notices: Notices) -> None:
        self.watch = watch
        self.guard = guard
        self.notices = notices
        self.log: EventLog | None = None
        self.unwritten: list[Alarm] = []

    def look(self, moment: str) -> None:
        """At the process-wide switches; `moment` says when: "at step 500"."""
        for switch in self.watch.look(moment):
            self.tell(Alarm("undeclared-switch", switch.evidence, switch.remedy))

    def look_at_kernels(self, moment: str) -> None:
        """At what Triton compiled since the last look, though the run was warm."""
        late, self.guard.late_kernels = self.guard.late_kernels, []
        if late:
            evidence = f"{len(late)} kernels compiled {moment}, after the warm-up: {'; '.join(late)}"
            self.tell(
                Alarm("late-kernels", evidence, "each paused the run; report it: the warm-up should have them all")
            )

    def tell(self, alarm: Alarm) -> None:
        self.notices.warn(alarm.name, alarm.evidence, alarm.remedy)
        self.unwritten.append(alarm)
        if self.log is not None:
            self.record_in(self.log)

    def record_in(self, log: EventLog) -> None:
        self.log = log
        for alarm in self.unwritten:
            log.write(alarm)
        self.unwritten = []
