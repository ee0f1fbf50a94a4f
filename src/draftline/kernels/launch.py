"""Launching a kernel, or only compiling it: all kernels of a step are compiled side by side before the first runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import triton

COMPILERS = 16  # threads at most; Triton's passes, its assembler and the C compiler run outside Python's lock

# The kernels compiled so far inside `compiling_together`, None outside. Each thread has its own.
compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](...), or no more than its compilation inside `compiling_together`. Multiplications and additions are
    fused, which Triton will leave off by default from 3.10 on."""
    constants["enable_fp_fusion"] = True
    kernels = compiled.get()
    if kernels is None:
        kernel[grid](*arguments, **constants)
    else:
        kernels.append(kernel.warmup(*arguments, grid=grid, **constants))


def compiling() -> bool:
    """Whether this thread's kernels are compiled and not run."""
    return compiled.get() is not None


@contextmanager
def compiling_together() -> Iterator[None]:
    """Kernels launched inside are compiled, all at once in threads, and not run: what they would write stays as it was
    allocated. Leaves when all are ready to run, compiled or from the cache, and raises what the compiler raised.

    One process of a cache does so at a time: the others then find its kernels there, instead of compiling the same ones
    on the same cores.
    """
    kernels: list[Any] = []
    token = compiled.set(kernels)
    try:
        threads = min(COMPILERS, os.cpu_count() or 1)
        with turn(), ThreadPoolExecutor(threads, "kernel", use_device, (device(),)) as pool:
            with triton.AsyncCompileMode(pool):
                yield
            list(pool.map(attrgetter("run"), finished(kernels)))  # which builds its launcher in C and loads it
    finally:
        compiled.reset(token)


@contextmanager
def turn() -> Iterator[None]:
    """Held by one process at a time of those that share Triton's cache; given up at its death too."""
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finished(kernels: list[Any]) -> list[Any]:
    """The compiled kernels, each once. The interpreter gives None for each."""
    results = [kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel for kernel in kernels]
    return list({id(kernel): kernel for kernel in results if kernel is not None}.values())


def device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def use_device(number: int | None) -> None:
    """A new thread begins on device 0, whichever its maker uses."""
    if number is not None:
        torch.cuda.set_device(number)
