"""One GPU seen through NVML: how busy, how full, how fast its clock, and what holds it back."""

from __future__ import annotations

import pynvml
import torch

from draftline.monitor.events import GpuSample

# What NVML says slows the clock down. The power cap is not among what a verdict blames: an H200 at full work meets it.
REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "thermal, software",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "thermal, hardware",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
HARMLESS_REASON = "power cap"


class Gpu:
    """An NVML handle of the GPU that this process calls cuda:N, whatever CUDA_VISIBLE_DEVICES makes of N."""

    def __init__(self, uuid: str) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._max_clock_mhz = int(pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM))

    def sample(self) -> GpuSample:
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        reasons = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return GpuSample(
            utilisation=pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            clock_mhz=int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)),
            max_clock_mhz=self._max_clock_mhz,
            power_w=pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            throttle_reasons=tuple(name for bit, name in REASONS.items() if reasons & bit),
        )

    def close(self) -> None:
        pynvml.nvmlShutdown()


def open_gpu(device: torch.device) -> Gpu | None:
    """None on a CPU, and where NVML cannot be loaded or does not know the GPU (some containers and MIG slices)."""
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return Gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return None
