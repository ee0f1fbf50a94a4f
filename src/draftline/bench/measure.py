"""Measuring: ceilings of the device, medians of steps, and where a step's time goes, kernel by kernel."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from draftline.environment.kernel_times import kernel_seconds

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 20, 3
HEATING_S = 1.5  # of products before the sustained ceiling is taken: a GPU at its power limit has slowed down by then

CLASSES = {  # first match of a kernel's name; attention's hold the word cutlass too
    "attention forward": r"^forward_kernel|flash_fwd|fmha.*fwd|fprop",
    "attention backward": r"^(query|context|own)_kernel|flash_bwd|fmha.*bwd|bprop",
    "matrix products": r"nvjet|gemm|cutlass|cublas|splitKreduce|wgmma",
    "loss": r"^(loss|statistics|dpace|spread)_kernel",
    "norms and RoPE": r"^(head_)?norm_|^rope_",
    "FP8 rounding": r"^(quantise|transpose)_kernel",
    "SwiGLU": r"^(swiglu|gated)_",
    "copies": r"^Mem(cpy|set)",
}


@dataclass(frozen=True)
class Ceiling:
    """TFLOP/s of square products of normal numbers: `burst` on a rested device, `sustained` at its power limit."""

    burst: float
    sustained: float


@dataclass(frozen=True)
class Timing:
    median_s: float
    first_s: float  # the very first call, kernels compiled or read from the cache
    since_process_start_s: float  # when that first call had ended
    peak_first_bytes: int  # of a call that begins without gradients
    peak_bytes: int  # of later ones, which add to them
    classes: dict[str, float]  # seconds a call by class of kernel; empty without a GPU


def ceiling(device: torch.device) -> Ceiling:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    flop = 2 * size**3 / 1e12
    burst = flop / min(timed(lambda: a @ b, device, 10))
    if device.type != "cuda":
        return Ceiling(burst, burst)
    until = time.perf_counter() + HEATING_S
    while time.perf_counter() < until:
        timed(lambda: a @ b, device, 50)
    return Ceiling(burst, flop / median(timed(lambda: a @ b, device, 100)))


def timed(call: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Seconds of each of `times` calls, one right after the other, by the device's own clock."""
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(times):
            call()
            clock.append(time.perf_counter())
        return [after - before for before, after in zip(clock, clock[1:], strict=False)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def measure(
    call: Callable[[], object], compile_first: Callable[[], object], forget: Callable[[], object], device: torch.device
) -> Timing:
    """`compile_first` is what a run does before its first call, and counts into that; `forget` drops what calls add up,
    so that the next one begins afresh."""
    started = time.perf_counter()
    compile_first()
    timed(call, device, 1)
    first = time.perf_counter() - started
    since_start = seconds_since_process_start()
    timed(call, device, WARM_STEPS)
    steps = timed(call, device, TIMED_STEPS if device.type == "cuda" else 3)
    peak = peak_bytes(call, device)
    forget()
    return Timing(median(steps), first, since_start, peak_bytes(call, device), peak, kernel_classes(call, device))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    timed(call, device, 1)
    return int(torch.cuda.max_memory_allocated())


def kernel_classes(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    total: dict[str, float] = {}
    for kernel, seconds in kernel_seconds(call, PROFILED_STEPS).items():
        name = next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel)), "all others")
        total[name] = total.get(name, 0.0) + seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def seconds_since_process_start() -> float:
    """From the kernel's own record of this process (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")
