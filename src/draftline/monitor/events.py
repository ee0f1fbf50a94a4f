"""The event log of a run: an append-only JSONL file, the one source for curves, reports and status.

One line is one event: {"v": 2, "t": unix seconds, "rank": 0, "kind": "step", ...the event's own fields}. A value that
is not finite is written as Python's json writes it (NaN, Infinity): a diverged loss is evidence, not an error here.
Every rank writes a file of its own (`log_path`); docs/EVENTS.md says what each kind holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from draftline.errors import InputError, RunError
from draftline.records import EvalReport, StepReport, Verdict

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event of every attempt; a resumed one names the step of its checkpoint."""

    recipe: dict[str, Any]
    fingerprint: dict[str, str]
    total_steps: int
    resumed_from_step: int | None = None
    best_tokens_per_s: float | None = None  # of this recipe's earlier runs on this kind of device


@dataclass(frozen=True, slots=True)
class Derived:
    """What the recipe left open and the target decided."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preflight:
    """The gates passed before the first step, each with the figure that proves it, and how long they took."""

    gates: dict[str, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    report: StepReport


@dataclass(frozen=True, slots=True)
class Evaluation:
    report: EvalReport


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    step: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something a person should see: what was noticed, the numbers that show it, and what to do."""

    name: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    status: Literal["completed", "failed", "interrupted"]
    reason: str = ""


Role = Literal["colocated", "target", "drafter"]


@dataclass(frozen=True, slots=True)
class Phases:
    """Where one step's time went on one rank; a target rank's step is what it captured for one optimizer step."""

    step: int
    role: Role
    seconds: float  # from the end of this rank's step before it to the end of this one
    phases: dict[str, float]  # seconds by name (phases.PHASES); what they leave of `seconds` is the loop's own
    tokens: int  # target tokens that this rank took in the step, padding not counted
    queue_used_bytes: int  # features waiting in this rank's channel when the step ended
    queue_limit_bytes: int  # 0 where this rank has no queue
    graphs: int  # compiled graphs of this process so far


@dataclass(frozen=True, slots=True)
class GpuSample:
    utilisation: float  # 0..1, NVML's: share of the last moments in which a kernel ran
    memory_used_bytes: int  # of the whole GPU, whoever holds it
    memory_total_bytes: int
    clock_mhz: int
    max_clock_mhz: int
    power_w: float
    throttle_reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """One look at a rank from a thread beside its work: also the sign that its process lives."""

    device: str
    step: int
    phase: str
    phase_since_s: float  # unix time
    busy_share: float  # share of the time in which the busiest thread ran or waited for a core
    cpu_wait_share: float  # the part of it that waited: other processes had the cores
    rss_bytes: int
    allocated_bytes: int  # held by torch on the GPU; 0 on a CPU
    gpu: GpuSample | None


@dataclass(frozen=True, slots=True)
class Health:
    """The verdicts of one window, written when they change."""

    verdicts: tuple[Verdict, ...]


Event = (
    RunStarted | Derived | Preflight | Step | Phases | Resources | Health | Evaluation | CheckpointWritten | Alarm
    | RunEnded
)  # fmt: skip

KIND_OF: dict[type[Event], str] = {
    RunStarted: "run_started",
    Derived: "derived",
    Preflight: "preflight",
    Step: "step",
    Phases: "phases",
    Resources: "resources",
    Health: "health",
    Evaluation: "evaluation",
    CheckpointWritten: "checkpoint_written",
    Alarm: "alarm",
    RunEnded: "run_ended",
}
EVENT_OF = {kind: event for event, kind in KIND_OF.items()}
RECORD_OF: dict[str, type[Any]] = EVENT_OF | {"step": StepReport, "evaluation": EvalReport}  # what a line's body holds


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    time_s: float  # unix time
    rank: int
    event: Event


@dataclass(frozen=True, slots=True)
class EventHistory:
    """What a log file holds. `torn` is the text of a last line whose writer died before it was whole, else None."""

    events: tuple[LoggedEvent, ...]
    torn: str | None


def log_path(run: Path, rank: int) -> Path:
    """events.jsonl for rank 0, events-rank3.jsonl for rank 3."""
    return run / ("events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl")


class EventLog:
    """Writes one rank's events; each line is handed to the system whole before `write` returns, so that two threads may
    write. What `listeners` are given is what was written.

    An existing file is continued. If its last line is torn, that line is cut off and recorded as an alarm, since a
    fragment in the middle would make the file unreadable.
    """

    def __init__(self, path: Path, rank: int = 0, listeners: Sequence[Callable[[LoggedEvent], None]] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rank = rank
        self.listeners = listeners
        torn = cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        if torn is not None:
            evidence = f"the log ended in a fragment, now cut off: {torn!r}"
            self.write(Alarm("torn-event", evidence, "the writer died in mid-line; at most one event is lost"))

    def write(self, event: Event) -> None:
        """Raises RunError where the disk refuses; what it took of the line is cut off when the log is next opened."""
        logged = LoggedEvent(time.time(), self.rank, event)
        line = encode(logged).encode() + b"\n"
        try:
            taken = self._file.write(line)
        except OSError as error:
            raise RunError(f"event log {self.path}: {error.strerror}", "free space and go on with --resume") from error
        if taken != len(line):
            raise RunError(f"event log {self.path}: the disk is full", "free space and go on with --resume")
        for listener in self.listeners:
            listener(logged)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_events(path: Path) -> EventHistory:
    """Read a log, oldest event first.

    Raises InputError with file and line for anything this schema does not say: another version, an unknown kind, a
    missing, unknown or mistyped field. Only a last line without its line break is tolerated, and returned as `torn`.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"event log {path}: {error.strerror}", "give the events.jsonl of a run folder") from error
    *lines, tail = text.split("\n")
    events = tuple(decode(line, f"{path}:{number}") for number, line in enumerate(lines, start=1))
    return EventHistory(events, tail or None)


def encode(logged: LoggedEvent) -> str:
    event = logged.event
    body = asdict(event.report) if isinstance(event, Step | Evaluation) else asdict(event)
    head = {"v": SCHEMA_VERSION, "t": logged.time_s, "rank": logged.rank, "kind": KIND_OF[type(event)]}
    return json.dumps(head | body)


def decode(line: str, where: str) -> LoggedEvent:
    try:
        tree = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}", "an event log is only ever appended to") from error
    head = ("v", "t", "rank", "kind")
    if not isinstance(tree, dict) or any(key not in tree for key in head):
        raise InputError(f"{where}: an event has the keys {', '.join(head)}")
    version, time_s, rank, kind = (tree.pop(key) for key in head)
    if version != SCHEMA_VERSION:
        raise InputError(f"{where}: event schema {version!r}; this draftline reads {SCHEMA_VERSION}")
    if not isinstance(kind, str) or kind not in EVENT_OF:
        raise InputError(f"{where}: unknown event kind {kind!r}; known: {', '.join(EVENT_OF)}")
    if type(rank) is not int or not isinstance(time_s, int | float):
        raise InputError(f"{where}: t {time_s!r} must be a number and rank {rank!r} a whole one")
    return LoggedEvent(time_s, rank, decode_body(kind, tree, where))


def decode_body(kind: str, body: dict[str, Any], where: str) -> Event:
    record = parse(kind, body, where)
    if isinstance(record, StepReport):
        return Step(record)
    event: Event = Evaluation(record) if isinstance(record, EvalReport) else record
    return event


def parse(kind: str, body: dict[str, Any], where: str) -> Any:
    """Build a kind's record from JSON values with their types checked; no field may be left over."""
    unknown = sorted(set(body) - {field.name for field in fields(RECORD_OF[kind])})
    if unknown:
        raise InputError(f"{where}: unknown field {', '.join(unknown)}")
    try:
        return adapter(kind).validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{where}: field {field}: {problem['msg']}, got {problem['input']!r}") from error


@cache
def adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(RECORD_OF[kind])


def cut_torn_line(path: Path) -> str | None:
    """Drop what follows the last line break of a file and return it; None where the file is whole or absent."""
    if not path.exists():
        return None
    whole, line_break, tail = path.read_bytes().rpartition(b"\n")
    if not tail:
        return None
    with path.open("r+b") as file:
        file.truncate(len(whole) + len(line_break))
    return tail.decode(errors="replace")
