"""What a rank uses, looked at from a thread beside its work: memory, cores, GPU, and the phase that it is in."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import pynvml
import torch

from draftline.errors import RunError
from draftline.monitor.events import Alarm, EventLog, Resources
from draftline.monitor.gpu import Gpu, open_gpu
from draftline.monitor.phases import PhaseClock

SAMPLE_EVERY_S = 2.0  # NVML's own utilisation covers up to a second; a look costs well under a millisecond


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds so far of each thread of this process."""

    at_s: float
    ran_s: dict[str, float]
    waited_s: dict[str, float]  # ready to run while other processes had the cores


class ResourceSampler:
    """Writes a Resources event every `every_s` while entered.

    Without a GPU the busiest thread stands in for it: `busy_share` counts the time in which it ran or was ready to, so
    that a machine full of other work does not make a rank look idle.
    """

    def __init__(self, log: EventLog, clock: PhaseClock, every_s: float = SAMPLE_EVERY_S) -> None:
        self.log = log
        self.clock = clock
        self.every_s = every_s
        self._process = psutil.Process()
        self._gpu: Gpu | None = None
        self._before = core_times()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)

    def sample(self) -> Resources:
        before, self._before = self._before, core_times()
        busy, waited = shares(before, self._before)
        phase, since_s = self.clock.current
        cuda = self.clock.device.type == "cuda"
        return Resources(
            device=str(self.clock.device),
            step=self.clock.step,
            phase=phase,
            phase_since_s=since_s,
            busy_share=busy,
            cpu_wait_share=waited,
            rss_bytes=self._process.memory_info().rss,
            allocated_bytes=torch.cuda.memory_allocated(self.clock.device) if cuda else 0,
            gpu=None if self._gpu is None else self._gpu.sample(),
        )

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            try:
                self.log.write(self.sample())
            except pynvml.NVMLError as error:  # a GPU that fell off the bus, or a counter that this one lacks
                self._gpu = None
                self.log.write(Alarm("gpu-unreadable", f"NVML: {error}", "see nvidia-smi and the kernel's log (dmesg)"))
            except RunError:  # the disk is full: the loop's next event ends the run with the same words
                return

    def __enter__(self) -> ResourceSampler:
        self._gpu = open_gpu(self.clock.device)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._gpu is not None:
            self._gpu.close()


def core_times() -> CoreTimes:
    """From /proc/self/task/*/schedstat (nanoseconds run, nanoseconds ready); elsewhere the process's own CPU time."""
    ran, waited = {}, {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            words = path.read_text().split()
        except OSError:  # the thread has ended since it was listed
            continue
        ran[path.parent.name], waited[path.parent.name] = int(words[0]) / 1e9, int(words[1]) / 1e9
    if not ran:
        ran, waited = {"all": time.process_time()}, {"all": 0.0}
    return CoreTimes(time.monotonic(), ran, waited)


def shares(before: CoreTimes, after: CoreTimes) -> tuple[float, float]:
    """(time in which the busiest thread ran or was ready to, the part in which it was ready only), as shares."""
    elapsed = max(after.at_s - before.at_s, 1e-9)

    def wanted(thread: str) -> float:
        old = before.ran_s.get(thread, 0.0) + before.waited_s.get(thread, 0.0)
        return after.ran_s[thread] + after.waited_s[thread] - old

    busiest = max(after.ran_s, key=wanted)
    waited = after.waited_s[busiest] - before.waited_s.get(busiest, 0.0)
    return min(wanted(busiest) / elapsed, 1.0), min(waited / elapsed, 1.0)
