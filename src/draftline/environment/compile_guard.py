"""What a run compiles, it compiles in its warm-up: later compilation is noticed by name, and one thread does it all."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from draftline.errors import RunError

REPORT = "this is never right: report it with the recipe and the run's events.jsonl"


def graph_counts() -> dict[str, int]:
    """What torch has compiled in this process so far. draftline's step is not compiled by torch, so it adds nothing.

    Where nobody has loaded torch's compiler it has compiled nothing, and is not loaded to be asked: that takes 800
    modules, sympy among them.
    """
    if "torch._dynamo.utils" not in sys.modules:
        return {"graphs": 0, "graph breaks": 0}
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
    }


class CompileGuard:
    """Lets one thread, the one that made it, take training steps, and watches what they compile.

    One process trains on one device with one thread: torch's compiler and tracer do not stand several (to 2.13 every
    trace sets a flag that all threads see), and Triton compiles a kernel again for each device and kind of argument.
    """

    def __init__(self) -> None:
        self.owner = threading.current_thread()
        self.kernels = 0  # Triton kernels compiled or loaded since `watch_kernels`
        self.late_kernels: list[str] = []  # those of them that came in `steady`
        self._steady = False

    def watch_kernels(self) -> None:
        """Have Triton tell of every kernel that it compiles or loads from its cache, each a pause of the run. Without
        Triton there are none."""
        if importlib.util.find_spec("triton") is not None:
            from triton import knobs

            knobs.runtime.jit_post_compile_hook = self.note_kernel

    def note_kernel(self, *, repr: str, **_told: Any) -> None:
        """Triton's hook: `repr` is the kernel's name with its options and the kinds of its arguments, which is what it
        was compiled anew for (`('*fp32', 'D')` is a pointer to a multiple of 16 bytes)."""
        self.kernels += 1
        if self._steady:
            self.late_kernels.append(repr)

    @contextmanager
    def steady(self, shapes: Callable[[], str]) -> Iterator[None]:
        """For a step after the warm-up. Raises RunError where another thread takes it, and where torch compiles in it,
        naming `shapes()`; kernels that Triton compiles are added to `late_kernels`."""
        self.refuse_other_thread()
        before, self._steady = graph_counts(), True
        try:
            yield
        finally:
            self._steady = False
        grown = {name: count - before[name] for name, count in graph_counts().items() if count > before[name]}
        if grown:
            what = ", ".join(f"{count} {name}" for name, count in grown.items())
            raise RunError(f"a step of {shapes()} made torch compile: {what}", REPORT)

    def refuse_other_thread(self) -> None:
        here = threading.current_thread()
        if here is not self.owner:
            raise RunError(
                f"thread {here.name} took a training step, which belongs to thread {self.owner.name}",
                f"torch's compiler is not safe for several threads; {REPORT}",
            )
