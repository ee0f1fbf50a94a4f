"""What a GPU has done of the work that its rank has queued: the rank's own, or waiting for others in a collective.

A rank's host runs ahead of its GPU. Where a kernel hangs, every host ends up waiting for a device, and each device but
one waits in a collective: only the devices' own order of work tells which rank the cause is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch


class End(Protocol):
    def query(self) -> bool:
        """Whether the device has passed it."""


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True)
class Queued:
    """A piece of queued work, up to an event on the current stream."""

    kind: str
    text: str
    waits: bool  # for other ranks
    end: End
    since_s: float  # time.monotonic when all of it was queued


@dataclass
class DeviceLine:
    """`mark` is called by the thread that queues work, `head` by one other."""

    record: Callable[[], End] = recorded
    queue: deque[Queued] = field(default_factory=deque)
    passed_s: float = 0.0  # when `head` saw the last end behind it
    longest_s: dict[str, float] = field(default_factory=dict)  # own work by kind, to the interval between two looks

    def mark(self, kind: str, text: str, waits: bool = False) -> None:
        """What has been queued since the last mark was `kind`."""
        self.queue.append(Queued(kind, text, waits, self.record(), time.monotonic()))

    def head(self) -> Queued | None:
        """What the device is at; None where it has done all that is marked."""
        while self.queue and self.queue[0].end.query():
            done, now = self.queue.popleft(), time.monotonic()
            if not done.waits:
                self.longest_s[done.kind] = max(self.longest_s.get(done.kind, 0.0), now - self.began_s(done))
            self.passed_s = now
        return self.queue[0] if self.queue else None

    def began_s(self, queued: Queued) -> float:
        return max(self.passed_s, queued.since_s)
