"""Launching a kernel, or only compiling it: all kernels of a step are compiled side by side before the first runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

COMPILERS = 16  # threads at most; Triton's passes and its assembler run outside Python's lock

compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)  # each thread has its own


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](...), or no more than its compilation inside `compiling_together`."""
    if compile_only.get():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


@contextmanager
def compiling_together() -> Iterator[None]:
    """Kernels launched inside are compiled, all at once in threads, and not run: what they would write stays as it was
    allocated. Leaves when all are compiled or loaded from the cache, and raises what the compiler raised."""
    token = compile_only.set(True)
    try:
        with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        compile_only.reset(token)
