"""The roofline gate: a step that is far slower than its own arithmetic on this device ends the run, by name.

The prediction is counted FLOP at nine tenths of the matrix rate, and counted bytes at the copy rate, one after the
other; both rates are measured here, on this device. Measured steps take 1.0 to 1.24 times the prediction over
the shapes of benchmarks/step. The incident's drafters ran at 0.36 of their known good and raised no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftline.drafter.cost import step_bytes, step_cost
from draftline.drafter.step import DrafterStep
from draftline.environment.kernel_times import kernel_seconds
from draftline.environment.rates import GB, copy_rate, matrix_rate
from draftline.errors import RunError
from draftline.records import PackedBatch
from draftline.train.warm_up import random_features

STOP_BELOW = 0.5  # of the predicted rate
WARN_BELOW = 0.65
MATRIX_SHARE = 0.9
SHOWN_KERNELS = 5
LAUNCHES, LAUNCHES_PER_LAYER = 150, 60
LAUNCH_S = 50e-6  # of a kernel from Python on a slow host; 20 ms for five layers where 19 were measured
TIMED = 4


@dataclass(frozen=True)
class Rates:
    """What this device does: FLOP/s of matrix products, and bytes/s read plus written in copies."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Roofline:
    """One micro-batch's forward and backward: seconds predicted and measured, and its kernels' seconds by name."""

    predicted_s: float
    measured_s: float
    kernels: dict[str, float]

    @property
    def share(self) -> float:
        return self.predicted_s / self.measured_s


def predict(flop: float, bytes_moved: float, layers: int, rates: Rates) -> float:
    """Seconds of a micro-batch: products and traffic one after the other, or its launches where those take longer."""
    device_s = flop / (MATRIX_SHARE * rates.flop_per_s) + bytes_moved / rates.bytes_per_s
    return max(device_s, (LAUNCHES + layers * LAUNCHES_PER_LAYER) * LAUNCH_S)


def measure_rates(device: torch.device) -> Rates:
    return Rates(matrix_rate(device) * 1e12, 2 * copy_rate(device, device) * GB)


def measure(step: DrafterStep, packed: PackedBatch, dtype: torch.dtype, rates: Rates) -> Roofline:
    """Times one micro-batch of the warm step on random features, and leaves no gradient behind. CUDA only."""
    spec, rows, work = step.drafter.spec, len(packed.ids), step.work(packed)
    flop, moved = rows * step_cost(spec, work).total, rows * step_bytes(spec, work, dtype.itemsize)
    batch = random_features(step, packed, dtype)

    def run() -> None:
        step.forward_backward(batch)

    seconds = timed(run, torch.cuda.synchronize, TIMED)
    found = Roofline(predict(flop, moved, spec.num_hidden_layers, rates), seconds, {})
    if found.share < WARN_BELOW:
        found = replace(found, kernels=kernel_seconds(run))
    step.drafter.zero_grad(set_to_none=True)
    return found


def judge(found: Roofline) -> str:
    """The figure to print. Raises RunError below STOP_BELOW, with the slowest kernels by name."""
    text = (
        f"{found.measured_s * 1e3:.1f} ms a micro-batch, {found.share:.0%} of the predicted rate "
        f"({found.predicted_s * 1e3:.1f} ms)"
    )
    if found.share >= WARN_BELOW:
        return text
    slowest = sorted(found.kernels.items(), key=lambda item: -item[1])[:SHOWN_KERNELS]
    named = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in slowest)
    if found.share >= STOP_BELOW:
        return f"{text}: slow. Slowest kernels: {named}"
    raise RunError(
        f"the training step is degraded: {text}, and the run ends below {STOP_BELOW:.0%}. Slowest kernels: {named}",
        "`draftline doctor` checks the kernels and this device's rates; `draftline compare` with a good run's folder "
        "names what differs. Another job on the same GPU looks like this too",
    )


def timed(call: Callable[[], object], wait: Callable[[], object], times: int) -> float:
    """Seconds of a call, the best of `times`: a neighbour or a page fault makes one slow, nothing makes one fast."""
    best = float("inf")
    for _ in range(times):
        wait()
        started = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - started)
    return best
