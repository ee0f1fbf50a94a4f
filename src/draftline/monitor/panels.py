"""The live view's parts: from a run's state to what a terminal shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftline.monitor.notices import short_count, short_duration
from draftline.monitor.phases import CAPTURING, DRAFTING, Phase
from draftline.monitor.stages import mean
from draftline.monitor.state import RankState, RunState
from draftline.monitor.window import RankWindow, Window
from draftline.records import Severity, Verdict

STYLE: dict[Severity, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "severe": "bold red"}
SPARKS = "▁▂▃▄▅▆▇█"
GIB = 2**30
NARROW = 100  # columns below which the table leaves phases out
SHOWN_ALARMS = 3
LEAST_SHARE = 0.005  # what rounds to 0% is not shown


def screen(state: RunState, now_s: float, width: int) -> Group:
    """Everything, for a terminal of `width` columns. now_s: unix time that the last minute is counted back from."""
    window = state.recent.window(now_s)
    found = state.verdicts(window)
    return Group(
        header(state, window, now_s, width),
        Text(),
        stage_bar(window, width),
        curves(state, width),
        Text(),
        ranks(state, window, width, found),
        Text(),
        verdict_table(found),
        *alarm_lines(state),
    )


def header(state: RunState, window: Window, now_s: float, width: int) -> Text:
    line = Text(state.root.absolute().name, style="bold")
    line.append(f"  step {state.steps_done:,}/{state.total_steps:,}", style="not bold")
    rate = window.tokens_per_s if state.ended is None else state.tokens_per_s
    best = state.best_tokens_per_s
    if rate:
        line.append(f"  {short_count(rate)} tokens/s", style="bold")
        first = " (first run of this recipe here)" if width >= NARROW else ""
        line.append(f" ({rate / best:.0%} of its best)" if best else first, style="not bold dim")
    if state.ended is not None:
        line.append(f"  {state.ended.status}", style="green" if state.ended.status == "completed" else "red")
        line.append(f" after {short_duration(state.newest_s - state.first_s)}", style="not bold")
    elif rate:
        line.append(f"  ETA {short_duration(remaining_s(state, window))}", style="not bold")
    return line


def remaining_s(state: RunState, window: Window) -> float:
    """At the pace of the window's slowest drafting rank."""
    return (state.total_steps - state.steps_done) * max((mean_step_s(rank) for rank in window.drafting), default=0.0)


def mean_step_s(rank: RankWindow) -> float:
    return rank.seconds / len(rank.steps) if rank.steps else 0.0


def stage_bar(window: Window, width: int) -> Text:
    """Data, target, channel and drafter with the share of the time that each works, and who waits for whom."""
    ranks = [rank for rank in window.ranks if rank.steps]
    if not ranks:
        return Text("warming up: no step to measure yet", style="dim")
    targets = window.of("target")
    if not targets:
        return proportional([(name, mean(r.share(*phases) for r in ranks)) for name, phases in PARTS.items()], width)
    drafters = window.of("drafter")
    put, get = mean(r.share("put") for r in targets), mean(r.share("get") for r in drafters)
    fill = mean(r.queue_fill or 0.0 for r in targets)
    cells = 4 if width < NARROW else 8
    line = Text("data ") if width >= NARROW else Text()
    if width >= NARROW:
        line.append(gauge(1 - mean(r.share("data") for r in targets), cells)).append(" → ")
    line.append(f"target {len(targets)}× ").append(gauge(1 - put, cells)).append(
        f" waits {put:.0%}", style=waiting(put)
    )
    line.append(f" → {fill:.0%} full → drafter {len(drafters)}× ")
    line.append(gauge(1 - get, cells)).append(f" waits {get:.0%}", style=waiting(get))
    return line


def waiting(share: float) -> str:
    return "yellow" if share >= 0.2 else "dim"


def gauge(share: float, cells: int) -> Text:
    full = round(share * cells)
    return Text("█" * full + "░" * (cells - full), style="cyan")


PARTS: dict[str, tuple[Phase, ...]] = {
    "data": ("data",), "target": CAPTURING, "drafter": DRAFTING, "reduce": ("reduce",), "save": ("checkpoint",),
}  # fmt: skip
COLOURS = {"data": "yellow", "target": "blue", "drafter": "green", "reduce": "magenta", "save": "red"}


def proportional(parts: Sequence[tuple[str, float]], width: int) -> Text:
    """One step as a bar of its parts."""
    line = Text("one step  ")
    room = max(width - 12, 20)
    for name, share in parts:
        if share < LEAST_SHARE:
            continue
        cells = max(round(share * room), 1)
        label = f" {name} {share:.0%}"
        line.append((label if len(label) <= cells else "").ljust(cells)[:cells], style=f"black on {COLOURS[name]}")
    return line


def curves(state: RunState, width: int) -> Text:
    cells = 16 if width < NARROW else 28
    line = Text()
    if state.last is not None:
        line.append(f"loss {state.last.loss:.4g} ").append(
            spark(logs(state.loss.thinned(cells).y), cells), style="blue"
        )
        line.append(f"   proxy tau {state.last.proxy_tau:.2f} ")
        line.append(spark(state.proxy_tau.thinned(cells).y, cells), style="green")
    for report in state.evaluations[-1:]:
        line.append(f"   tau {report.tau:.2f} ").append(report.benchmark, style="dim")
    return line


def logs(values: Sequence[float]) -> list[float]:
    """The first losses are a hundred times the last ones."""
    return [math.log(value) for value in values if value > 0]


def spark(values: Sequence[float], cells: int) -> str:
    """The last `cells` values, the lowest as the lowest block."""
    shown = [value for value in values[-cells:] if value == value]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low or 1.0
    return "".join(SPARKS[min(int((value - low) / span * len(SPARKS)), len(SPARKS) - 1)] for value in shown)


def ranks(state: RunState, window: Window, width: int, found: Sequence[Verdict]) -> Table:
    """A row for each rank: what it is, what it does now, and where its time went in the last minute. The ranks that an
    alarm is about stand out."""
    blamed = {rank: STYLE[verdict.severity] for verdict in reversed(found) for rank in verdict.ranks}
    table = Table(box=None, pad_edge=False, header_style="dim")
    wide = width >= NARROW
    columns = ["rank", "role", "device", "in phase", "busy", "GiB", "tokens/s", "ms/step"]
    phases: tuple[Phase, ...] = ("data", "capture", "put", "get", "forward", "backward") if wide else ()
    for number, column in enumerate([*columns, *phases]):
        table.add_column(column, justify="left" if 0 < number < 4 else "right", no_wrap=True)
    for rank in window.ranks:
        own = state.ranks.get(rank.rank, RankState())
        shares = [f"{share:.0%}" if (share := rank.share(phase)) >= LEAST_SHARE else "·" for phase in phases]
        table.add_row(
            str(rank.rank), rank.role, own.device or "–", phase_text(rank, window), percent(rank.utilisation),
            "–" if rank.memory_bytes is None else f"{rank.memory_bytes / GIB:.3g}", short_count(rank.tokens_per_s),
            f"{mean_step_s(rank) * 1e3:.0f}", *shares, style=blamed.get(rank.rank, ""),
        )  # fmt: skip
    return table


def phase_text(rank: RankWindow, window: Window) -> Text:
    if window.ended:
        return Text("ended", style="dim")
    if rank.newest is None:
        return Text("–")
    standing_s = window.end_s - rank.newest.phase_since_s
    silent_s = window.end_s - rank.heard_s
    if silent_s > 10:
        return Text(f"silent {short_duration(silent_s)}", style="red")
    return Text(f"{rank.newest.phase} {short_duration(standing_s)}" if standing_s > 10 else rank.newest.phase)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def verdict_table(found: Sequence[Verdict]) -> Table:
    """A dot, the name and the numbers; below them what to do."""
    table = Table.grid(padding=(0, 1))
    for verdict in found:
        line = Text(verdict.name, style="bold").append(f"  {verdict.evidence}", style="not bold")
        table.add_row(Text("●", style=STYLE[verdict.severity]), line)
        if verdict.remedy and verdict.severity != "ok":
            table.add_row("", Text(verdict.remedy, style="dim"))
    return table


def alarm_lines(state: RunState) -> list[Text]:
    """The newest alarms that no verdict line repeats are worth a look later too: name and when."""
    if not state.alarms:
        return []
    newest = state.alarms[-SHOWN_ALARMS:]
    shown = ", ".join(f"{alarm.name} at {short_duration(time_s - state.first_s)}" for time_s, alarm in newest)
    more = f" and {len(state.alarms) - len(newest)} before" if len(state.alarms) > len(newest) else ""
    return [Text(f"alarms: {shown}{more}", style="yellow")]
