"""Undeclared process-wide switches, as warnings for a person and alarms in the run's events."""

from __future__ import annotations

from draftline.environment.switch_watch import SwitchWatch
from draftline.monitor.events import Alarm, EventLog
from draftline.monitor.notices import Notices

NAME = "undeclared-switch"


class SwitchAlarms:
    """Looks at the switches when asked, and tells what it finds at once; what was found before the run had a log is
    written when it gets one."""

    def __init__(self, watch: SwitchWatch, notices: Notices) -> None:
        self.watch = watch
        self.notices = notices
        self.log: EventLog | None = None
        self.unwritten: list[Alarm] = []

    def look(self, moment: str) -> None:
        for switch in self.watch.look(moment):
            self.notices.warn(NAME, switch.evidence, switch.remedy)
            self.unwritten.append(Alarm(NAME, switch.evidence, switch.remedy))
        if self.log is not None:
            self.record_in(self.log)

    def record_in(self, log: EventLog) -> None:
        self.log = log
        for alarm in self.unwritten:
            log.write(alarm)
        self.unwritten = []
