"""The roofline gate: a step that is far slower than its own arithmetic on this device ends the run, by name.

The prediction is counted FLOP at nine tenths of the matrix rate (FP8 products at that of FP8), and counted bytes at the
copy rate, one after the other; all rates are measured here, on this device. Measured steps take 1.0 to 1.24 times the
prediction over the shapes of benchmarks/step. The incident's drafters ran at 0.36 of their known good and raised no
error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftline.config import Products
from draftline.drafter.cost import fp8_bytes, fp8_flop, step_bytes, step_cost
from draftline.drafter.step import DrafterStep
from draftline.environment.kernel_times import kernel_seconds
from draftline.environment.rates import GB, copy_rate, fp8_matrix_rate, matrix_rate
from draftline.errors import RunError
from draftline.records import PackedBatch
from draftline.train.warm_up import random_features

STOP_BELOW = 0.5  # of the predicted rate
WARN_BELOW = 0.65
MATRIX_SHARE = 0.9
SHOWN_KERNELS = 5
BUSY_SHARE = 0.7  # of a step that its kernels fill, or the host is to blame
LAUNCHES, LAUNCHES_PER_LAYER = 150, 60
FP8_LAUNCHES_PER_LAYER = 13  # ten operands rounded, three sums added
LAUNCH_S = 50e-6  # of a kernel from Python on a slow host; 20 ms for five layers where 19 were measured
TIMED = 4


@dataclass(frozen=True)
class Rates:
    """What this device does: FLOP/s of matrix products, and bytes/s read plus written in copies."""

    flop_per_s: float
    bytes_per_s: float
    fp8_flop_per_s: float | None = None  # measured where `train.products` is fp8


@dataclass(frozen=True)
class Prediction:
    """Seconds that the device's products and traffic take, and that the host takes to launch them."""

    device_s: float
    launches_s: float

    @property
    def seconds(self) -> float:
        return max(self.device_s, self.launches_s)


@dataclass(frozen=True)
class Roofline:
    """One micro-batch's forward and backward: seconds predicted and measured, and its kernels' seconds by name."""

    predicted: Prediction
    measured_s: float
    kernels: dict[str, float]

    @property
    def share(self) -> float:
        return self.predicted.seconds / self.measured_s

    @property
    def is_launch_bound(self) -> bool:
        """Whether the device idles for more than half of it because the host launches no faster."""
        return self.predicted.device_s < min(self.predicted.launches_s, self.measured_s / 2)


@dataclass(frozen=True)
class Work:
    """One micro-batch, counted: FLOP in all and those of them in FP8, bytes through memory, and its layers."""

    flop: float
    bytes_moved: float
    layers: int
    fp8_flop: float = 0.0


def predict(work: Work, rates: Rates) -> Prediction:
    """A micro-batch: products and traffic one after the other on the device, its launches beside them on the host."""
    device_s = (work.flop - work.fp8_flop) / (MATRIX_SHARE * rates.flop_per_s) + work.bytes_moved / rates.bytes_per_s
    launches = LAUNCHES + work.layers * LAUNCHES_PER_LAYER
    if rates.fp8_flop_per_s is not None:
        device_s += work.fp8_flop / (MATRIX_SHARE * rates.fp8_flop_per_s)
        launches += work.layers * FP8_LAUNCHES_PER_LAYER
    return Prediction(device_s, launches * LAUNCH_S)


def measure_rates(device: torch.device, products: Products) -> Rates:
    fp8 = fp8_matrix_rate(device) * 1e12 if products == "fp8" else None
    return Rates(matrix_rate(device) * 1e12, 2 * copy_rate(device, device) * GB, fp8)


def work_of(step: DrafterStep, packed: PackedBatch, item: int) -> Work:
    """item: bytes of a value of the compute dtype."""
    spec, rows, work = step.drafter.spec, len(packed.ids), step.work(packed)
    flop, moved = rows * step_cost(spec, work).total, rows * step_bytes(spec, work, item)
    if step.products == "plain":
        return Work(flop, moved, spec.num_hidden_layers)
    moved += rows * fp8_bytes(spec, work.tokens, work.anchors)
    return Work(flop, moved, spec.num_hidden_layers, rows * fp8_flop(spec, work.tokens, work.anchors))


def measure(step: DrafterStep, packed: PackedBatch, dtype: torch.dtype, rates: Rates) -> Roofline:
    """Times one micro-batch of the warm step on random features, and leaves no gradient behind. CUDA only."""
    batch = random_features(step, packed, dtype)

    def run() -> None:
        step.forward_backward(batch)

    seconds = timed(run, torch.cuda.synchronize, TIMED)
    found = Roofline(predict(work_of(step, packed, dtype.itemsize), rates), seconds, {})
    if found.share < WARN_BELOW:
        found = replace(found, kernels=kernel_seconds(run))
    step.drafter.zero_grad(set_to_none=True)
    return found


def judge(found: Roofline) -> str:
    """The figure to print. Raises RunError below STOP_BELOW, with the slowest kernels by name."""
    text = (
        f"{found.measured_s * 1e3:.1f} ms a micro-batch, {found.share:.0%} of the predicted rate "
        f"({found.predicted.seconds * 1e3:.1f} ms)"
    )
    if found.share >= WARN_BELOW:
        return f"{text}; {advice(found)}" if found.is_launch_bound else text
    if found.share >= STOP_BELOW:
        return f"{text}: slow. {account(found)}"
    raise RunError(
        f"the training step is degraded: {text}, and the run ends below {STOP_BELOW:.0%}. {account(found)}",
        "`draftline doctor` checks the kernels and this device's rates; `draftline compare` with a good run's folder "
        "names what differs. Another job on the same GPU looks like this too",
    )


def advice(found: Roofline) -> str:
    return (
        f"its arithmetic takes {found.predicted.device_s * 1e3:.1f} ms, for the rest the device waits for the host: "
        "a larger train.rows_per_micro_batch takes hardly longer"
    )


def account(found: Roofline) -> str:
    """What a slow step spends its time on: the slowest kernels, or the host where the device hardly works."""
    device_s = sum(found.kernels.values())
    slowest = sorted(found.kernels.items(), key=lambda item: -item[1])[:SHOWN_KERNELS]
    named = "Slowest kernels: " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in slowest)
    if device_s >= BUSY_SHARE * found.measured_s:
        return named
    return f"Its kernels take {device_s * 1e3:.1f} ms of that: for the rest the device waits for the host. {named}"


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
