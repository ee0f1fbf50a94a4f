"""Gates: what is proven before a step is taken or a drafter trusted, each with the figure that proves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from draftline.errors import InputError
from draftline.monitor.notices import Notices

NAME_WIDTH = 16
SLOW_S = 1.0  # a gate that takes longer says how long

T = TypeVar("T")


@dataclass(frozen=True)
class Gate(Generic[T]):
    """`prove` returns what the gate establishes, or raises InputError: what was expected, found and likely wrong."""

    name: str
    prove: Callable[[], T]
    figure: Callable[[T], str] = str


@dataclass
class Gates:
    """Passes gates one after another, says each in a line, and remembers their figures. The first that fails ends
    it."""

    notices: Notices
    figures: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def through(self, gate: Gate[T]) -> T:
        """Raises the InputError of a gate that fails, with the gate's name before it."""
        started = time.perf_counter()
        try:
            value = gate.prove()
        except InputError as error:
            self.notices.say(f"  FAIL  {gate.name}")
            raise InputError(f"gate {gate.name!r}: {error.what}", error.remedy) from error
        self.figures[gate.name] = gate.figure(value)
        seconds = time.perf_counter() - started
        took = f" ({seconds:.1f} s)" if seconds >= SLOW_S else ""
        self.notices.say(f"  ok    {gate.name.ljust(NAME_WIDTH)}  {self.figures[gate.name]}{took}")
        return value

    def all(self, gates: Iterable[Gate[Any]]) -> None:
        for gate in gates:
            self.through(gate)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def relative_figure(error: float) -> str:
    return f"relative difference {error:.1e}"
