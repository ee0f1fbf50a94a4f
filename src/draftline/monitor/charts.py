"""Charts as inline SVG: lines, stacked bars and bars, coloured by the page's own CSS variables, readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from draftline.monitor.notices import short_count

WIDTH, HEIGHT = 440, 220  # of the view box; the page scales it to its column
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 26
PALE = ("put", "get", "reduce", "settle", "other")  # waits and rests, drawn in greys
COLOURS = 8  # --c0 .. --c7 of the page


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A dashed horizontal line with its words."""

    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with round ticks; on a log axis the ticks are 1, 2 and 5 times powers of ten."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0..1 along the axis."""
        low, high, at = (math.log10(max(v, 1e-12)) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value,
        )  # fmt: skip
        return min(max((at - low) / (high - low or 1.0), 0.0), 1.0)

    def ticks(self, wanted: int = 4) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
            return found[:: max(1, -(-len(found) // (wanted + 1)))]
        step = round_step((self.high - self.low) / wanted)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def axis_over(values: Sequence[float], log: bool = False, from_zero: bool = False) -> Axis:
    """A range that holds all values with a little room. Values that are not finite have no place."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return Axis(0.1 if log else 0.0, 1.0, log)
    low, high = min(finite), max(finite)
    if log:
        return Axis(low / 1.1, high * 1.1, True)
    if from_zero:
        return Axis(0.0, high * 1.08 or 1.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room)


def line_chart(
    lines: Sequence[Line], y: Axis, x_unit: str, levels: Sequence[Level] = (), percent: bool = False
) -> Markup:
    """Lines over one x axis, named in a legend where there are several."""
    x = axis_of_x([value for line in lines for value in line.x])
    parts = [grid(x, y, x_unit, percent)]
    parts += [path(line, x, y) for line in lines if len(line.x)]
    for level in levels:
        at = TOP + (1 - y.place(level.y)) * (HEIGHT - TOP - BOTTOM)
        parts.append(Markup('<line class="level" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, WIDTH - RIGHT, at, at))  # fmt: skip
        above = at - 5 if at > TOP + 16 else at + 14
        parts.append(text(LEFT + 4, above, level.text, "start", "levelname"))
    return svg(parts, HEIGHT, ", ".join(line.name for line in lines))


def axis_of_x(values: Sequence[float]) -> Axis:
    return Axis(min(values), max(values)) if values else Axis(0.0, 1.0)


def grid(x: Axis, y: Axis, x_unit: str, percent: bool) -> Markup:
    parts = []
    for tick in y.ticks():
        at = TOP + (1 - y.place(tick)) * (HEIGHT - TOP - BOTTOM)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, WIDTH - RIGHT, at, at))  # fmt: skip
        parts.append(text(LEFT - 6, at + 4, f"{tick:.0%}" if percent else short_count(tick), "end"))
    ticks = x.ticks()
    for tick in ticks:
        at = LEFT + x.place(tick) * (WIDTH - LEFT - RIGHT)
        label = f"{short_count(tick)} {x_unit}" if tick == ticks[-1] else short_count(tick)
        parts.append(text(at, HEIGHT - 8, label, "end" if tick == ticks[-1] and x.place(tick) > 0.9 else "middle"))
    return Markup("").join(parts)


def path(line: Line, x: Axis, y: Axis) -> Markup:
    """Points that are not finite leave a gap."""
    words, drawing = [], False
    for at, value in zip(line.x, line.y, strict=True):
        if not math.isfinite(value):
            drawing = False
            continue
        px = LEFT + x.place(at) * (WIDTH - LEFT - RIGHT)
        py = TOP + (1 - y.place(value)) * (HEIGHT - TOP - BOTTOM)
        words.append(f"{'L' if drawing else 'M'}{px:.1f} {py:.1f}")
        drawing = True
    return Markup('<path class="line{}" style="stroke:var(--c{})" d="{}"><title>{}</title></path>').format(
        " faint" if line.faint else "", line.colour % COLOURS, " ".join(words), line.name
    )


def stacked_bars(rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """One bar for each row, its parts (name -> share of 1) one after the other in the order given."""
    height, step = TOP + len(rows) * 30 + 6, 30
    left = 24 + 7.2 * max((len(name) for name in rows), default=0)
    parts = []
    for number, (name, shares) in enumerate(rows.items()):
        y, x = TOP + number * step, left
        parts.append(text(left - 8, y + 15, name, "end"))
        for part, share in shares.items():
            width = share * (WIDTH - left - RIGHT)
            parts.append(rect(x, y, max(width - 0.7, 0), 21, f"--p-{part}", f"{part} {share:.1%}"))
            if width > 34:
                parts.append(
                    text(x + width / 2, y + 15, f"{share:.0%}", "middle", "inside-pale" if part in PALE else "inside")
                )
            x += width
    return svg(parts, height, "where the time went")


def bars(values: Mapping[str, float], high: float, percent: bool = False) -> Markup:
    """Upright bars with their values on top."""
    height = 170
    room = (WIDTH - 20) / max(len(values), 1)
    width = min(room * 0.72, 64)
    parts = []
    for number, (name, value) in enumerate(values.items()):
        x, tall = 10 + room * (number + 0.5), (height - 46) * min(value / (high or 1.0), 1.0)
        parts.append(rect(x - width / 2, height - 24 - tall, width, tall, "--c0", f"{name} {value:.4g}"))
        parts.append(text(x, height - 30 - tall, f"{value:.0%}" if percent else f"{value:.2f}", "middle", "value"))
        parts.append(text(x, height - 8, name, "middle"))
    return svg(parts, height, ", ".join(values))


def rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> Markup:
    shape = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" style="fill:var({})">').format(
        x, y, width, height, colour
    )
    return shape + Markup("<title>{}</title></rect>").format(title)


def text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, words)


def svg(parts: Sequence[Markup], height: float, label: str, width: float = WIDTH) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, label, Markup("").join(parts)
    )
