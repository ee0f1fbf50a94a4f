"""Where a call's time goes on a GPU, kernel by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def kernel_seconds(call: Callable[[], object], calls: int = 1) -> dict[str, float]:
    """Seconds a call by the name of the kernel, longest first; waits for the device before and after."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    seconds = {event.key: event.self_device_time_total / 1e6 / calls for event in trace.key_averages()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
