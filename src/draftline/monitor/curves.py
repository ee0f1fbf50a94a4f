"""A run at a glance: loss and proxy tau over the steps, with the tau that decoding measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftline.errors import InputError
from draftline.monitor.events import Evaluation, Step, read_events
from draftline.records import EvalReport, StepReport

COLOURS = ("#2563a8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#555555")
INK = "#333333"
SMOOTHED_SHARE = 0.04  # width of the bold line's moving mean, as a share of the run


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    steps: tuple[StepReport, ...]  # ascending, each step once
    evaluations: tuple[EvalReport, ...]


def plot_curves(events_paths: Sequence[Path], out_png: Path) -> None:
    """Draw the runs whose event logs are given, one colour each, named by their run folders.

    Thin: every step; bold: its moving mean, whose last value stands in the legend; dashed: tau by real decoding.
    Raises InputError where a log cannot be read or has no steps.
    """
    curves = [read_curve(path) for path in events_paths]
    figure = Figure(figsize=(8, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for colour, curve in zip(cycle(COLOURS), curves):
        steps = np.array([report.step for report in curve.steps])
        draw_series(above, steps, np.array([report.loss for report in curve.steps]), colour, curve.name)
        draw_series(below, steps, np.array([report.proxy_tau for report in curve.steps]), colour, curve.name)
        on_the_way = [report for report in curve.evaluations if report.trained_steps is not None]
        if on_the_way:
            places = [report.trained_steps for report in on_the_way]
            taus = [report.tau for report in on_the_way]
            below.plot(places, taus, "o", color=colour, markersize=4, label=f"{taus[-1]:.2f}  tau decoded on the way")
        for report in [report for report in curve.evaluations if report.trained_steps is None]:
            label = f"{report.tau:.2f}  tau decoded by {report.engine} on {report.benchmark}"
            below.axhline(report.tau, color=colour, linewidth=1.2, linestyle=(0, (5, 3)), label=label)
    above.set_yscale("log")  # the first steps lose a hundred times what the last ones do
    above.yaxis.set_major_formatter("{x:g}")
    style(above, "loss, weighted mean over slots", "upper right")
    style(below, "proxy tau: tokens per verification step", "lower right")
    below.set_xlabel("optimizer step", color=INK)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)


def read_curve(path: Path) -> Curve:
    """The steps and evaluations of one log. A step that was done again after a restart counts as done last."""
    events = [logged.event for logged in read_events(path).events]
    latest = {event.report.step: event.report for event in events if isinstance(event, Step)}
    if not latest:
        raise InputError(f"event log {path} has no training steps", "give the events.jsonl of a run that trained")
    evaluations = tuple(event.report for event in events if isinstance(event, Evaluation))
    return Curve(path.absolute().parent.name, tuple(latest[step] for step in sorted(latest)), evaluations)


def draw_series(axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, name: str) -> None:
    mean = moving_mean(values, max(1, round(len(values) * SMOOTHED_SHARE)))
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, mean, color=colour, linewidth=2, label=f"{mean[-1]:.2f}  {name}")


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the values at most width // 2 places away, of fewer at both ends: [n] -> [n]."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    places = np.arange(len(values))
    starts = np.maximum(places - width // 2, 0)
    ends = np.minimum(places + width // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def style(axes: Axes, title: str, legend: Literal["upper right", "lower right"]) -> None:
    axes.legend(frameon=False, loc=legend, fontsize=9)
    axes.margins(x=0.01)
    axes.set_title(title, loc="left", fontsize=11, color=INK, weight="bold")
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
