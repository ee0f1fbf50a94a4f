"""report.html: a whole run on one page that needs nothing but a browser."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from draftline.errors import RunError
from draftline.monitor.charts import Level, Line, axis_over, bars, line_chart, stacked_bars
from draftline.monitor.gantt import gantt, page_style
from draftline.monitor.notices import short_count, short_duration
from draftline.monitor.phases import PHASES
from draftline.monitor.series import Series
from draftline.monitor.state import RankState, RunState
from draftline.monitor.trace import Span, read_traces
from draftline.monitor.verdict import SEVERITIES
from draftline.records import EvalReport, Verdict

POINTS = 300
SMOOTHED_POINTS = 40
OTHER = "other"  # what the phases leave of a step
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...] = ()  # (CSS variable, name)
    note: str = ""
    wide: bool = False  # over the whole page


def write_report(state: RunState, path: Path) -> None:
    """Write the page whole. Raises RunError where the disk refuses."""
    template = (files("draftline.monitor") / "report.html").read_text(encoding="utf-8")
    traces = read_traces(state.root)
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html = page.from_string(template).render(
        name=state.root.absolute().name,
        status=status(state),
        verdicts=state.last_verdicts,
        tiles=tiles(state),
        style=Markup(page_style()),
        charts=charts(state) + ([gantt_chart(traces, state)] if traces else []),
        history=history(state),
        alarms=[(clock(state, time_s), alarm) for time_s, alarm in state.alarms],
        derived=state.derived,
        gates=state.gates,
        environment=state.fingerprint,
        recipe=yaml.safe_dump(state.recipe, sort_keys=False),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}", "free space, then: draftline report RUN") from error


def status(state: RunState) -> str:
    if state.ended is None:
        return "running" if time.time() - state.newest_s < 60 else "no sign of life"
    return f"{state.ended.status}: {state.ended.reason}" if state.ended.reason else state.ended.status


def tiles(state: RunState) -> list[tuple[str, str, str]]:
    """(name, figure, what to compare it with)."""
    last, rate = state.last, state.tokens_per_s
    best = f"{rate / state.best_tokens_per_s:.0%} of its best" if state.best_tokens_per_s and rate else "no earlier run"
    shown = [
        ("steps", f"{state.steps_done:,}", f"of {state.total_steps:,}"),
        ("tokens/s", short_count(rate) if rate else "–", best),
        ("loss", "–" if last is None else f"{last.loss:.4g}", "last step"),
        ("proxy tau", "–" if last is None else f"{last.proxy_tau:.2f}", "last step"),
    ]
    shown += [("tau", f"{report.tau:.2f}", report.benchmark) for report in state.newest_evaluations[-2:]]
    return [*shown, ("time", short_duration(state.newest_s - state.first_s), attempts(state.attempts))]


def attempts(count: int) -> str:
    return "one attempt" if count == 1 else f"{count} attempts"


def charts(state: RunState) -> list[Chart]:
    drawn: list[Chart] = []
    if state.loss.x:
        drawn += [
            curve("loss", "Loss", state.loss, log=True),
            tau_chart(state),
            rate_chart(state),
        ]  # fmt: skip
    timed = {number: rank for number, rank in sorted(state.ranks.items()) if rank.seconds > 0}
    if timed:
        drawn.append(time_chart({name_of(number, rank): rank for number, rank in timed.items()}))
    drawn += rank_charts(state)
    drawn += [chart for report in state.newest_evaluations for chart in slot_chart(report)]
    taus = {report.benchmark: report.tau for report in state.newest_evaluations}
    if len(taus) > 1:
        drawn.append(Chart("Tau by benchmark", bars(taus, max(taus.values()))))
    return drawn


def name_of(number: int, rank: RankState) -> str:
    return f"rank {number}" if rank.role == "colocated" else f"{rank.role} {number}"


def tau_chart(state: RunState) -> Chart:
    """With the tau that decoding gave: of the export as levels, of the small runs on the way as a line."""
    exports = [report for report in state.newest_evaluations if report.trained_steps is None]
    levels = [Level(report.tau, f"tau {report.tau:.2f} decoded, {report.benchmark}") for report in exports]
    steps = [report.trained_steps for report in state.evaluations if report.trained_steps is not None]
    taus = [report.tau for report in state.evaluations if report.trained_steps is not None]
    more = [Line("decoded while training", steps, taus, colour=1)] if len(steps) > 1 else []
    return curve("proxy tau", "Proxy tau", state.proxy_tau, levels, more=more)


def curve(
    name: str, title: str, series: Series, levels: Sequence[Level] = (), log: bool = False, more: Sequence[Line] = ()
) -> Chart:
    """Every step faint, its mean bold."""
    fine, smooth = series.thinned(POINTS), series.thinned(SMOOTHED_POINTS)
    log = log and min(fine.y) > 0
    y = axis_over([*fine.y, *(level.y for level in levels), *(v for line in more for v in line.y)], log=log)
    lines = [Line(f"{name}, each step", fine.x, fine.y, faint=True), Line(name, smooth.x, smooth.y), *more]
    legend = (("--c0", name), *((f"--c{line.colour}", line.name) for line in more)) if more else ()
    return Chart(title, line_chart(lines, y, "steps", levels), legend, "logarithmic" if log else "")


def rate_chart(state: RunState) -> Chart:
    """The slope of the tokens seen, over equal stretches of time of at least two steps."""
    seen = state.tokens_seen
    edges = np.linspace(seen.x[0], seen.x[-1], min(SMOOTHED_POINTS, max(len(seen.x) // 2, 1)) + 1)
    counts = np.interp(edges, seen.x, seen.y)
    rates = (np.diff(counts) / np.maximum(np.diff(edges), 1e-9)).tolist()
    minutes = (((edges[1:] + edges[:-1]) / 2 - state.first_s) / 60).tolist()
    best = state.best_tokens_per_s
    levels = [Level(best, f"best so far {short_count(best)}")] if best else []
    y = axis_over([*rates, *(level.y for level in levels)], from_zero=True)
    return Chart("Tokens per second", line_chart([Line("tokens/s", minutes, rates)], y, "min", levels))


def with_rest(phase_seconds: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Shares of the time, in the order of the phases; what they leave is "other"."""
    shares = {name: phase_seconds[name] / seconds for name in PHASES if phase_seconds.get(name, 0.0) > 0}
    return shares | {OTHER: max(1.0 - sum(shares.values()), 0.0)}


def time_chart(ranks: Mapping[str, RankState]) -> Chart:
    rows = {name: with_rest(rank.phase_seconds, rank.seconds) for name, rank in ranks.items()}
    present = [name for name in (*PHASES, OTHER) if any(row.get(name, 0.0) >= 0.005 for row in rows.values())]
    words = {name: name for name in present}
    if len(ranks) == 1:
        [(row, rank)] = zip(rows.values(), ranks.values(), strict=True)
        step_ms = rank.seconds / rank.steps_done * 1e3
        words = {name: f"{name} {row[name]:.1%}, {row[name] * step_ms:.3g} ms a step" for name in present}
    return Chart("Where the time went", stacked_bars(rows), tuple((f"--p-{name}", words[name]) for name in present))


def rank_charts(state: RunState) -> list[Chart]:
    """Utilisation and memory of every rank over the run's minutes."""
    ranks = [(number, rank) for number, rank in sorted(state.ranks.items()) if len(rank.utilisation.x) > 1]
    if not ranks:
        return []
    busy: list[Line] = []
    held: list[Line] = []
    for number, rank in ranks:
        for lines, series, scale in ((busy, rank.utilisation, 1.0), (held, rank.memory_bytes, GIB)):
            thin = series.thinned(SMOOTHED_POINTS * 2)
            minutes = [(time_s - state.first_s) / 60 for time_s in thin.x]
            lines.append(Line(f"rank {number}", minutes, [value / scale for value in thin.y], colour=number))
    legend = tuple((f"--c{number % 8}", f"rank {number}") for number, _ in ranks) if len(ranks) > 1 else ()
    on_gpu = any(rank.newest is not None and rank.newest.gpu is not None for _, rank in ranks)
    memory = axis_over([value for line in held for value in line.y], from_zero=True)
    return [
        Chart(
            "Busy",
            line_chart(busy, axis_over([0.0, 1.0], from_zero=True), "min", percent=True),
            legend,
            "GPU utilisation" if on_gpu else "share of the time that the busiest thread ran or wanted to",
        ),
        Chart("Memory, GiB", line_chart(held, memory, "min"), legend),
    ]


def gantt_chart(traces: Mapping[int, Sequence[Span]], state: RunState) -> Chart:
    names = {number: name_of(number, rank) for number, rank in state.ranks.items()}
    drawing = gantt(traces, names)
    return Chart("Who did what when", drawing.picture, drawing.legend, drawing.note, wide=True)


def slot_chart(report: EvalReport) -> list[Chart]:
    slots = {str(slot): share for slot, share in enumerate(report.slot_acceptance, start=1)}
    title = f"Accepted by draft slot, {report.benchmark}"
    note = f"tau {report.tau:.3f} over {report.prompts} prompts, {report.verify_steps:,} steps, {report.engine}"
    return [Chart(title, bars(slots, max(slots.values()), percent=True), note=note)] if slots else []


def history(state: RunState) -> list[tuple[str, Verdict]]:
    """(time since the start, each window's worst verdict), where it changed."""
    lines: list[tuple[str, Verdict]] = []
    for time_s, verdicts in state.health:
        worst = min(verdicts, key=lambda verdict: SEVERITIES.index(verdict.severity))
        lines.append((clock(state, time_s), worst))
    return lines


def clock(state: RunState, time_s: float) -> str:
    return short_duration(max(time_s - state.first_s, 0.0))
