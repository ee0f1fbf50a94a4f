"""A function with one of its global names bound to something else, for one caller alone.

Families call functions of their own module by name. To give one instance of a layer another function of that name
without touching the module, which the whole process shares, the code that reads the name is copied with a copy of its
globals, and so are the decorators around it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any


def reader_of(function: Callable[..., Any], name: str) -> FunctionType | None:
    """The function under `function`'s decorators if its code reads the global `name`; None where it does not."""
    inner: Any = function
    while isinstance(inner, FunctionType) and "__wrapped__" in vars(inner):
        inner = vars(inner)["__wrapped__"]
    if isinstance(inner, FunctionType) and name in inner.__code__.co_names and name in inner.__globals__:
        return inner
    return None


def rebound(function: FunctionType, reader: FunctionType, name: str, value: Any) -> FunctionType | None:
    """`function` with `name` bound to `value` in `reader`, which it is or wraps; None where a decorator holds what it
    wraps elsewhere than in its closure."""
    if function is reader:
        return copied(function, {**function.__globals__, name: value}, function.__closure__ or ())
    wrapped = vars(function)["__wrapped__"]
    cells = function.__closure__ or ()
    held = [place for place, cell in enumerate(cells) if holds(cell, wrapped)]
    inner = rebound(wrapped, reader, name, value) if held else None
    if inner is None:
        return None
    closure = tuple(CellType(inner) if place in held else cell for place, cell in enumerate(cells))
    outer = copied(function, function.__globals__, closure)
    vars(outer)["__wrapped__"] = inner
    return outer


def holds(cell: CellType, value: object) -> bool:
    return cell != CellType() and cell.cell_contents is value  # an empty cell has no contents to ask for


def copied(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...]) -> FunctionType:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure or None)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    vars(copy).update(vars(function))
    return copy
