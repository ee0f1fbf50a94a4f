"""The bench verb's way: shape, measurement, ceiling in the same run, table or JSON."""

from __future__ import annotations

import json

from draftline.bench.measure import ceiling
from draftline.bench.shapes import Shape
from draftline.bench.step import measure_step, step_figures
from draftline.config import Products
from draftline.drafter.cost import RowWork, step_cost
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.device import training_device
from draftline.environment.fingerprint import fingerprint
from draftline.monitor.notices import Notices, stderr_console, stdout_console

CPU_CALLS = 9  # of a step, in `measure`


def bench(part: str, shape: Shape, loss: str, products: Products, as_json: bool) -> None:
    """part: step or capture; loss and products are the step's. Random data, never zeros; the ceiling is measured last,
    on a device that is warm."""
    device = training_device("auto")
    use_compile_cache()
    if device.type == "cpu":
        warn_of_waiting(part, shape, ceiling(device).burst)
    if part == "step":
        timing, cost = measure_step(shape, loss, products, device)
        figures = step_figures(shape, loss, products, timing, cost, ceiling(device))
    else:
        from draftline.bench.capture import capture_figures, measure_capture  # a step does without transformers

        captured = measure_capture(shape, device)
        figures = capture_figures(shape, captured, ceiling(device))
    if as_json:
        print(json.dumps(figures | {"environment": fingerprint()}))
        return
    notices = Notices(stdout_console())
    notices.section(f"bench {part}")
    classes = figures.pop("ms_by_kernel_class")
    notices.facts({name.replace("_", " "): text(value) for name, value in figures.items()})
    if isinstance(classes, dict) and classes:
        notices.section("ms by class of kernel")
        notices.facts({name: f"{ms:.2f}" for name, ms in classes.items()})


def warn_of_waiting(part: str, shape: Shape, tflop_per_s: float) -> None:
    """The shapes that figures are published of are a GPU's: a CPU works on them for hours."""
    work = RowWork(shape.sequence, shape.anchors, shape.sequence / shape.documents / 2, 0, 0)
    tflop = shape.rows * step_cost(shape.spec, work).total / 1e12
    minutes = CPU_CALLS * tflop / tflop_per_s / 60
    if part == "step" and minutes > 1:
        Notices(stderr_console()).say(
            f"  warning: {CPU_CALLS} steps of {tflop:.3g} TFLOP take this CPU {minutes:,.0f} minutes or more; "
            "`--shape tiny`, or fewer --sequence and --anchors, take seconds"
        )


def text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"
    return str(value)
