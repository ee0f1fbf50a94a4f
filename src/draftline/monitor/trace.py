"""Spans of a rank's work with their times on its device, for a picture of what overlaps (`train.trace`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Span:
    kind: str  # as the heartbeat names phases: "capture", "forward and backward", ...
    detail: str
    start_s: float  # unix time
    end_s: float


class Tracer:
    """On a GPU a span is two events on the current stream, read when the run is over: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[Span] = []
        self.queued: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        if self.on_gpu:
            torch.cuda.synchronize(device)
            self.zero = self.event()
            torch.cuda.synchronize(device)
        self.zero_s = time.time()

    @contextmanager
    def span(self, kind: str, detail: str) -> Iterator[None]:
        started = time.time()
        begin = self.event() if self.on_gpu else None
        yield
        if begin is None:
            self.spans.append(Span(kind, detail, started, time.time()))
        else:
            self.queued.append((kind, detail, begin, self.event()))

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def write(self, path: Path) -> None:
        """One JSON line for each span; on a GPU it waits for all work that has been queued."""
        for kind, detail, begin, end in self.queued:
            end.synchronize()
            start_s, end_s = (self.zero_s + self.zero.elapsed_time(event) / 1000 for event in (begin, end))
            self.spans.append(Span(kind, detail, start_s, end_s))
        path.write_text("".join(json.dumps(asdict(span)) + "\n" for span in self.spans), encoding="utf-8")


def read_spans(path: Path) -> list[Span]:
    return [Span(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
