"""The event logs of a run folder followed as they grow, those of all ranks together."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import InputError
from draftline.monitor.events import LoggedEvent, decode


class RunTail:
    """`poll` gives what has been written since the last call, in the order of time. A last line without its line break
    waits for the rest of it. Raises InputError where a line is not readable."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._read_bytes: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}

    def has_begun(self) -> bool:
        return (self.run / "events.jsonl").is_file()

    def require_run(self) -> None:
        """Raises InputError where the folder has no event log."""
        if not self.has_begun():
            raise InputError(f"run {self.run}: holds no events.jsonl", "name a run folder, such as runs/mine")

    def skip(self) -> None:
        """Leave out what is there already: an earlier attempt's events."""
        for path in self.run.glob("events*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            self._read_bytes[path] = len(whole) + 1 if whole else 0
            self._lines[path] = whole.count(b"\n") + 1 if whole else 0

    def poll(self) -> list[LoggedEvent]:
        events = [event for path in sorted(self.run.glob("events*.jsonl")) for event in self._new(path)]
        return sorted(events, key=lambda logged: logged.time_s)

    def _new(self, path: Path) -> list[LoggedEvent]:
        start = self._read_bytes.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            whole, line_break, _ = file.read().rpartition(b"\n")
        if not line_break:
            return []
        self._read_bytes[path] = start + len(whole) + 1
        first = self._lines.get(path, 0) + 1
        lines = whole.decode(errors="surrogateescape").split("\n")
        self._lines[path] = first + len(lines) - 1
        return [decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=first)]
