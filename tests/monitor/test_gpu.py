"""Phases and counters on a real GPU."""

from __future__ import annotations

import time

import pytest
import torch

from draftline.monitor.gpu import open_gpu
from draftline.monitor.phases import PhaseClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CYCLES = 100_000_000  # about 50 ms


def spin() -> None:
    torch.cuda._sleep(CYCLES)


def test_phases_are_those_of_the_gpus_timeline_and_marking_them_does_not_wait() -> None:
    device = torch.device("cuda", 0)
    spin()
    torch.cuda.synchronize()
    clock = PhaseClock(device)
    started = time.perf_counter()
    with clock.phase("forward"):
        spin()
    with clock.phase("data"):
        time.sleep(0.02)  # hidden behind the kernel before it
    with clock.phase("backward"):
        spin()
        spin()
    assert time.perf_counter() - started < 0.05  # nothing has waited for the GPU
    lap = clock.lap()
    torch.cuda.synchronize()
    seconds = lap.phases()
    assert seconds["backward"] == pytest.approx(2 * seconds["forward"], rel=0.1)
    assert seconds["data"] < 0.002
    assert lap.seconds == pytest.approx(sum(seconds.values()), rel=0.05)


def test_what_leaves_the_gpu_waiting_shows_in_full() -> None:
    clock = PhaseClock(torch.device("cuda", 0))
    torch.cuda.synchronize()
    with clock.phase("data"):
        time.sleep(0.05)
    lap = clock.lap()
    torch.cuda.synchronize()
    assert 0.045 < lap.phases()["data"] < 0.1


def test_the_gpu_that_is_read_is_the_one_that_torch_uses() -> None:
    gpu = open_gpu(torch.device("cuda", 0))
    assert gpu is not None
    before = gpu.sample()
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    after = gpu.sample()
    assert after.memory_used_bytes - before.memory_used_bytes == pytest.approx(2**30, rel=0.1)
    assert after.memory_total_bytes == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.05)
    assert 0 < after.clock_mhz <= after.max_clock_mhz and after.power_w > 10
    for _ in range(40):
        spin()
    time.sleep(1.5)
    assert gpu.sample().utilisation > 0.5
    del held
    gpu.close()  # NVML counts its users: it goes on for the others
