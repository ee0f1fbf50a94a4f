"""Rates of a machine: matrix products, memory, and copies between host and devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import combinations

import torch

from draftline.environment.checks import Check

WARM, TIMED = 3, 10
GB = 1e9
# Dense bf16 TFLOP/s by NVIDIA's data sheets; a healthy device reaches two thirds and more on large products.
DATA_SHEET_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0}
HEALTHY_SHARE = 0.6
SLOW_HOST_GB_PER_S = 10.0  # PCIe 4 x16 gives about 25, PCIe 5 about 50
SLOW_PEER_GB_PER_S = 20.0  # NVLink gives 100 and more; below this, copies go through the host


def rate_checks(device: torch.device) -> Iterator[Check]:
    """Seconds in all on a GPU, a fraction of one on a CPU."""
    yield matrix_check(device)
    yield Check("memory", "ok", f"{copy_rate(device, device):,.0f} GB/s read and written in copies on one device")
    if device.type != "cuda":
        return
    up, down = copy_rate(torch.device("cpu"), device), copy_rate(device, torch.device("cpu"))
    slow = min(up, down) < SLOW_HOST_GB_PER_S
    remedy = (
        "check the PCIe link (`nvidia-smi -q -d PCIE`: width and generation) and that the process runs on its NUMA node"
    )
    yield Check(
        "host to device",
        "warn" if slow else "ok",
        f"{up:,.0f} GB/s to it, {down:,.0f} GB/s from it, pinned memory",
        remedy if slow else "",
    )
    if torch.cuda.device_count() > 1:
        yield peers_check()


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of square products of normal numbers: bf16 of 8192 on a GPU, float32 of 1024 on a CPU. The best of
    several, for the question is what the device can do."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    return 2 * size**3 / fastest(lambda: a @ b, device) / 1e12


def fp8_matrix_rate(device: torch.device) -> float:
    """TFLOP/s of the same square products in FP8 with a scale for each row. Only where the device has them."""
    size = 8192
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, device=device, generator=generator).to(torch.float8_e4m3fn) for _ in range(2)
    )  # fmt: skip
    ones = torch.ones(size, device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=ones[:, None], scale_b=ones[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * size**3 / fastest(product, device) / 1e12


def matrix_check(device: torch.device) -> Check:
    rate = matrix_rate(device)
    if device.type != "cuda":
        return Check("matrix rate", "ok", f"{rate:.3f} TFLOP/s float32 on {torch.get_num_threads()} threads")
    name = torch.cuda.get_device_name(device)
    sheet = next((value for word, value in DATA_SHEET_TFLOPS.items() if word in name.split()), None)
    if sheet is None:
        return Check("matrix rate", "ok", f"{rate:,.0f} TFLOP/s bf16 ({name}: no figure to compare with)")
    found = f"{rate:,.0f} TFLOP/s bf16, {rate / sheet:.0%} of the data sheet's {sheet:,.0f}"
    if rate < HEALTHY_SHARE * sheet:
        remedy = "another job on this GPU? throttled or limited (`nvidia-smi -q -d PERFORMANCE,POWER`)? a MIG slice?"
        return Check("matrix rate", "warn", found, remedy)
    return Check("matrix rate", "ok", found)


def copy_rate(source: torch.device, target: torch.device) -> float:
    """GB/s of bytes copied; pinned on the host's side. 256 MiB between devices, 32 MiB within a CPU."""
    size_bytes = 2**28 if "cuda" in (source.type, target.type) else 2**25
    pinned = "cuda" in (source.type, target.type)
    one, other = (
        torch.empty(size_bytes, dtype=torch.uint8, device=place, pin_memory=pinned and place.type == "cpu").fill_(7)
        for place in (source, target)
    )
    waits_for = source if source.type == "cuda" else target
    return size_bytes / fastest(lambda: other.copy_(one, non_blocking=True), waits_for) / GB


def peers_check() -> Check:
    """Every pair of GPUs; the slowest pair by name."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rates = {(a.index, b.index): copy_rate(a, b) for a, b in combinations(devices, 2)}
    (a, b), slowest = min(rates.items(), key=lambda item: item[1])
    found = f"{slowest:,.0f} GB/s between GPU {a} and {b}, the slowest of {len(rates)} pairs"
    if slowest < SLOW_PEER_GB_PER_S:
        return Check("device to device", "warn", found, "see `nvidia-smi topo -m`: that pair has no direct link")
    return Check("device to device", "ok", found)


def fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of TIMED runs after WARM ones."""
    for _ in range(WARM):
        work()
    return min(once(work, device) for _ in range(TIMED))


def once(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
