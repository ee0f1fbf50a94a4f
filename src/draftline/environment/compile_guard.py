"""What a run compiled in warm-up stays compiled: a recompile, an eager fallback or an unfused attention is an error."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

from draftline.environment.switches import recompiles_refused
from draftline.errors import RunError

UNFUSED_WARNING = "flex_attention called without torch.compile"
REPORT = "this is never right: report it with the recipe and the run's events.jsonl"
P = ParamSpec("P")
R = TypeVar("R")


def compiled_only(function: Callable[P, R]) -> Callable[P, R]:
    """`function` for torch.compile, whose Python body raises RunError when it runs outside a trace.

    The check is traced away, so it costs nothing. It catches every way in which torch falls back to eager without an
    error: suppressed errors, the recompile limit, a tracing flag that another thread set or left on.
    """

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_eager(function.__qualname__)
        return function(*args, **kwargs)

    return checked


def compile_layer(layer: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile a layer in place, as one graph for its one shape; run eagerly it raises RunError from then on."""
    layer.register_forward_pre_hook(layer_is_compiled)
    layer.compile(backend=backend, fullgraph=True, dynamic=False)


def layer_is_compiled(layer: nn.Module, _inputs: object) -> None:
    refuse_eager(type(layer).__qualname__)


def refuse_eager(name: str) -> None:
    if not torch.compiler.is_compiling():
        raise RunError(
            f"{name} was compiled, and torch ran it eagerly: attention would be dense and several times slower",
            "see `draftline doctor` for what this environment changes in torch's compiler (suppress_errors, "
            "TORCHDYNAMO_DISABLE), and whether another thread of this process traces",
        )


def graph_counts() -> dict[str, int]:
    """What torch has compiled in this process so far; none of it may grow once a run is warm."""
    inductor = counters["inductor"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "kernels": sum(inductor[f"fxgraph_cache_{outcome}"] for outcome in ("hit", "miss", "bypass")),
    }


class CompileGuard:
    """Lets one thread, the one that made it, call compiled code: first in `warming`, from then on in `steady`.

    One process trains on one device with one thread. torch's compiler does not stand several (to 2.13 each call of a
    compiled function looks at a tracing flag that any thread may have set), so another thread is refused here.
    """

    def __init__(self) -> None:
        self.owner = threading.current_thread()

    @contextmanager
    def warming(self) -> Iterator[None]:
        """For the steps that compile. Raises RunError where flex_attention would run unfused."""
        self.refuse_other_thread()
        with unfused_refused():
            yield

    @contextmanager
    def steady(self, shapes: Callable[[], str]) -> Iterator[None]:
        """For every later step. Raises RunError where anything is compiled, naming the guard and `shapes()`."""
        self.refuse_other_thread()
        before = graph_counts()
        try:
            with recompiles_refused(), unfused_refused():
                yield
        except RecompileError as error:
            raise RunError(
                f"a step of {shapes()} has a shape that was not compiled in warm-up: {failed_guards(error)}",
                f"a recompile takes minutes, and past torch's limit attention runs unfused; {REPORT}",
            ) from error
        grown = {name: count - before[name] for name, count in graph_counts().items() if count > before[name]}
        if grown:
            what = ", ".join(f"{count} {name}" for name, count in grown.items())
            raise RunError(f"a step of {shapes()} compiled {what} after warm-up", REPORT)

    def refuse_other_thread(self) -> None:
        here = threading.current_thread()
        if here is not self.owner:
            raise RunError(
                f"thread {here.name} called the compiled step, which belongs to thread {self.owner.name}",
                f"torch's compiler is not safe for several threads; {REPORT}",
            )


@contextmanager
def unfused_refused() -> Iterator[None]:
    """Turn torch's warning about an unfused flex_attention into an error; it is given once a process, so catch the
    first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=UNFUSED_WARNING)
        try:
            yield
        except UserWarning as warning:
            if UNFUSED_WARNING not in str(warning):
                raise
            raise RunError("flex_attention was called outside compiled code and would run dense", REPORT) from warning


def failed_guards(error: RecompileError) -> str:
    """ "forward: tensor 'c' size mismatch at index 1. expected 32, actual 48" from torch's own text."""
    first, *rest = str(error).splitlines()
    guards = [line.strip().removeprefix("- ").partition(": ")[2] for line in rest if line.strip().startswith("- ")]
    function = first.removeprefix("Recompiling function ").partition(" in ")[0]
    return f"{function}: " + "; ".join(dict.fromkeys(guards))
