"""One caller's own globals: decorators kept, the module untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from draftline.target.rebinding import reader_of, rebound

calls: list[str] = []


def helper(x: int) -> int:
    return x + 1


def reads(x: int, *, scale: int = 2) -> int:
    return helper(x) * scale


def counted(label: str) -> Callable[..., Any]:
    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def wrapper(*args: Any, **named: Any) -> int:
            calls.append(label)
            return function(*args, **named)

        return wrapper

    return decorate


@counted("outer")
@counted("inner")
def decorated(x: int) -> int:
    return helper(x)


def hidden(x: int) -> int:
    return x


class Holder:
    def __call__(self, x: int) -> int:
        return helper(x)


@functools.wraps(reads)
def elsewhere(x: int) -> int:
    """Says that it wraps `reads`, and holds it in no closure."""
    return x


def changed(function: Any) -> Any:
    reader = reader_of(function, "helper")
    assert reader is not None
    return rebound(function, reader, "helper", lambda x: 100 * x)


def test_one_name_is_another_for_the_copy_alone() -> None:
    copy = changed(reads)
    assert (copy(3), copy(3, scale=5), reads(3)) == (600, 1500, 8)
    assert copy.__name__ == "reads" and copy.__globals__ is not reads.__globals__
    assert reads.__globals__["helper"] is helper


def test_decorators_stay_around_it() -> None:
    copy = changed(decorated)
    calls.clear()
    assert (copy(3), calls) == (300, ["outer", "inner"])
    calls.clear()
    assert (decorated(3), calls) == (4, ["outer", "inner"])
    assert reader_of(copy, "helper") is not reader_of(decorated, "helper")


def test_what_does_not_read_the_name_or_is_no_function_is_left() -> None:
    assert reader_of(hidden, "helper") is None
    assert reader_of(reads, "absent") is None
    assert reader_of(Holder(), "helper") is None
    assert changed(elsewhere) is None
