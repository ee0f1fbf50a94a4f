"""Who did what when: a lane for each rank, a bar for each phase, over the middle steps of a traced run, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from draftline.monitor.charts import Axis, rect, svg, text
from draftline.monitor.notices import short_count
from draftline.monitor.trace import Span

WIDTH, LANE, BAR = 1080, 40, 30
TOP, BOTTOM, RIGHT = 8, 26, 14
STEPS = 2  # shown
SHARES = {"forward": "training", "backward": "training"}  # one word where a picture needs no two
WORDS = {
    "data": "rows", "capture": "capture", "put": "waiting for room", "get": "waiting for features",
    "training": "forward and backward", "reduce": "summing over ranks", "optimizer": "optimizer",
    "checkpoint": "checkpoint", "evaluation": "decoding",
}  # fmt: skip
COLOURS = {"training": "--p-forward"}


@dataclass(frozen=True)
class Gantt:
    picture: Markup
    legend: tuple[tuple[str, str], ...]  # (CSS variable, name)
    note: str


def gantt(traces: Mapping[int, Sequence[Span]], names: Mapping[int, str]) -> Gantt:
    """traces: every rank's spans; names: what to call them. Numbers in bars are micro-batches."""
    start_s, end_s = window(traces)
    lanes = {rank: shown(spans, start_s, end_s) for rank, spans in traces.items()}
    titles = {rank: names.get(rank, f"rank {rank}") for rank in traces}
    left = 24 + 7.2 * max(map(len, titles.values()))
    x = Axis(0.0, (end_s - start_s) * 1e3)
    parts = [grid(x, left, len(lanes))]
    for lane, (rank, spans) in enumerate(lanes.items()):
        y = TOP + lane * LANE
        parts.append(text(left - 8, y + BAR / 2 + 4, titles[rank], "end"))
        parts += [bar(span, x, start_s, left, y) for span in spans]
    present = {span.phase for spans in lanes.values() for span in spans}
    legend = tuple((colour(phase), word) for phase, word in WORDS.items() if phase in present)
    note = "times on the device; numbers are micro-batches"
    return Gantt(svg(parts, height(len(lanes)), "who did what when", WIDTH), legend, note)


def window(traces: Mapping[int, Sequence[Span]]) -> tuple[float, float]:
    """Unix times of the middle steps of rank 0, from the end of one optimizer step to that of a later one; the whole
    trace where it has too few."""
    first = next(iter(traces.values()))
    ends = [span.end_s for span in first if span.phase == "optimizer"]
    if len(ends) <= STEPS:
        return min((span.start_s for span in first), default=0.0), max((span.end_s for span in first), default=1.0)
    middle = (len(ends) - STEPS) // 2
    return ends[middle], ends[middle + STEPS]


def shown(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    """The spans inside a window, cut at its ends, neighbours that differ in nothing a picture shows joined."""
    joined: list[Span] = []
    for span in spans:
        begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
        phase = SHARES.get(span.phase, span.phase)
        if end <= begin or phase not in WORDS:
            continue
        last = joined[-1] if joined else None
        if last is not None and (last.phase, last.item) == (phase, span.item) and begin - last.end_s < 1e-4:
            joined[-1] = Span(phase, span.item, last.step, last.start_s, end)
        else:
            joined.append(Span(phase, span.item, span.step, begin, end))
    return joined


def bar(span: Span, x: Axis, zero_s: float, left: float, y: float) -> Markup:
    begin, end = (left + x.place((at - zero_s) * 1e3) * (WIDTH - left - RIGHT) for at in (span.start_s, span.end_s))
    what = WORDS[span.phase] + ("" if span.item is None else f", micro-batch {span.item}")
    title = f"{what}: {(span.end_s - span.start_s) * 1e3:.3g} ms"
    drawn = rect(begin, y, max(end - begin - 0.5, 0.4), BAR, colour(span.phase), title)
    number = "" if span.item is None else str(span.item)
    if number and end - begin > 9 * len(number) and span.phase not in ("put", "get"):
        drawn += text((begin + end) / 2, y + BAR / 2 + 4, number, "middle", "inside")
    return drawn


def grid(x: Axis, left: float, lanes: int) -> Markup:
    parts = []
    bottom = TOP + lanes * LANE
    ticks = x.ticks(8)
    for tick in ticks:
        at = left + x.place(tick) * (WIDTH - left - RIGHT)
        parts.append(Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(at, TOP, bottom))
        word = f"{short_count(tick)} ms" if tick == ticks[-1] else short_count(tick)
        parts.append(text(at, bottom + 16, word, "end" if x.place(tick) > 0.97 else "middle"))
    for lane in range(lanes):
        parts.append(Markup('<rect class="lane" x="{:.1f}" y="{}" width="{:.1f}" height="{}" rx="2"/>').format(
            left, TOP + lane * LANE, WIDTH - left - RIGHT, BAR))  # fmt: skip
    return Markup("").join(parts)


def height(lanes: int) -> int:
    return TOP + lanes * LANE + BOTTOM


def colour(phase: str) -> str:
    return COLOURS.get(phase, f"--p-{phase}")


def page_style() -> str:
    """The report's colours and fonts, which every picture of it needs."""
    return (files("draftline.monitor") / "report.css").read_text(encoding="utf-8")


def write_gantt(traces: Mapping[int, Sequence[Span]], names: Mapping[int, str], title: str, path: Path) -> None:
    """The picture with title and legend as an SVG file of its own, which any browser shows."""
    drawn = gantt(traces, names)
    head, tall = 58, height(len(traces))
    parts = [text(14, 22, title, "start", "value"), text(WIDTH - RIGHT, 22, drawn.note, "end")]
    at = 14.0
    for variable, word in drawn.legend:
        parts += [rect(at, 34, 10, 10, variable, word), text(at + 15, 43, word, "start")]
        at += 34 + 6.4 * len(word)
    inner = Markup('<svg x="0" y="{}" width="{}" height="{}"').format(head, WIDTH, tall) + drawn.picture[len("<svg") :]
    style = Markup("<style>{}</style>").format(Markup(page_style()))
    back = Markup('<rect width="100%" height="100%" style="fill:var(--card)"/>')
    whole = Markup('<svg xmlns="{}" width="{}" height="{}" font-family="system-ui, sans-serif">{}</svg>\n').format(
        "http://www.w3.org/2000/svg", WIDTH, head + tall, Markup("").join([style, back, *parts, inner])
    )
    path.write_text(whole, encoding="utf-8")
