"""Ranks that all wait for each other: none of them is late, and nothing will ever happen.

A collective that hangs in the network looks like this, and so does a fault in who waits for whom. Each rank writes on a
board that all can read what it waits for, once that one wait has outlasted the limit, and nothing when it has ended;
where all have written something, the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

SURE_S = 5.0  # in which a rank whose wait has just ended takes back what it wrote


class Board(Protocol):
    """A store of torch.distributed."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Wait:
    """What a rank waits for, and since when by time.monotonic."""

    text: str
    since_s: float


@dataclass
class Standoff:
    """One rank's look at the board. limit_s: how long all must have waited."""

    board: Board
    rank: int
    ranks: int
    limit_s: float
    written: str = ""
    all_wait_since_s: float | None = None

    def look(self, wait: Wait | None, now: float) -> str | None:
        """Called about once a second with what this rank waits for. On rank 0, once all have waited for longer than the
        limit and go on doing so: why the run ends, with what each waits for."""
        late = wait.text if wait is not None and now - wait.since_s > self.limit_s else ""
        if late != self.written:
            self.board.set(self.key(self.rank), late)
            self.written = late
        told = self.all_waits() if late and self.rank == 0 else []
        if not told:
            self.all_wait_since_s = None
            return None
        if self.all_wait_since_s is None:
            self.all_wait_since_s = now
        if now - self.all_wait_since_s < SURE_S:
            return None
        each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(told))
        return f"stalled: all ranks have waited for each other for {self.limit_s:.0f} s and more: {each}"

    def all_waits(self) -> list[str]:
        """What each rank waits for, by rank; empty where one does not."""
        keys = [self.key(rank) for rank in range(self.ranks)]
        texts = [self.board.get(key).decode() for key in keys] if self.board.check(keys) else []
        return texts if all(texts) else []

    def key(self, rank: int) -> str:
        return f"waits/{rank}"
