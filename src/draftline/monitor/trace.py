"""What a rank did when, for a picture of what overlaps (`train.trace`): the phases of its steps, one JSON line each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from draftline.monitor.phases import Lap, PhaseClock, between


@dataclass(frozen=True)
class Span:
    """A phase that a rank was in. On CUDA both times are the GPU's own: when it came to this work, not the host."""

    phase: str
    item: int | None  # the micro-batch worked on, where it is one
    step: int
    start_s: float  # unix time
    end_s: float


class Trace:
    """Writes laps as they are read, so that a run that is killed leaves what it has done; nothing waits for it."""

    def __init__(self, path: Path, clock: PhaseClock) -> None:
        self.path = path
        self.zero, self.zero_s = clock.now()

    def write(self, lap: Lap) -> None:
        """Append a lap that the GPU has passed."""
        lines = [json.dumps(asdict(span)) + "\n" for span in self.spans(lap)]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def spans(self, lap: Lap) -> list[Span]:
        at = [self.zero_s + between(self.zero, mark) for mark in lap.marks]
        return [
            Span(mark.phase, mark.item, lap.step, start_s, end_s)
            for mark, (start_s, end_s) in zip(lap.marks, pairwise(at), strict=False)
            if mark.phase is not None
        ]


def trace_path(run: Path, rank: int) -> Path:
    return run / f"trace-rank{rank}.jsonl"


def read_spans(path: Path) -> list[Span]:
    """Oldest first. A last line that its writer could not finish is left out."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [Span(**json.loads(line)) for line in whole.splitlines()]


def read_traces(run: Path) -> dict[int, list[Span]]:
    """By rank; none where the run had no trace."""
    paths = {int(path.stem.removeprefix("trace-rank")): path for path in run.glob("trace-rank*.jsonl")}
    return {rank: read_spans(path) for rank, path in sorted(paths.items())}
