"""A curve that stays small however long a run is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LIMIT = 1200  # points: more than a chart has pixels


@dataclass
class Series:
    """Points (x, y) in the order they came. Past twice the limit, neighbours become their mean, two by two."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    weight: int = 1  # raw points in each kept one
    _x: list[float] = field(default_factory=list)  # of the point that is still being gathered
    _y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        self._x.append(x)
        self._y.append(y)
        if len(self._x) == self.weight:
            self.x.append(mean(self._x))
            self.y.append(mean(self._y))
            self._x, self._y = [], []
        if len(self.x) >= 2 * LIMIT:
            self.x, self.y = halved(self.x), halved(self.y)
            self.weight *= 2

    def thinned(self, points: int) -> Series:
        """At most about `points` means of neighbours, the last raw points included."""
        x, y = [*self.x, *([mean(self._x)] if self._x else [])], [*self.y, *([mean(self._y)] if self._y else [])]
        size = max(1, -(-len(x) // points))
        return Series(
            [mean(x[start : start + size]) for start in range(0, len(x), size)],
            [mean(y[start : start + size]) for start in range(0, len(y), size)],
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def halved(values: Sequence[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]
