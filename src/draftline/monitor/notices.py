"""What is said to a person between progress bars: sections, facts, tables and warnings.

On a terminal they are styled; anywhere else they are plain aligned lines without a control character, never wrapped,
so that a log can be searched line by line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = "  "


def stdout_console() -> Console:
    """The console for standard output; hand the same one to Notices and Progress, or lines tear the bar."""
    return Console(highlight=False, emoji=False, markup=False)


def stderr_console() -> Console:
    """The console for progress of a verb whose standard output is its result."""
    return Console(stderr=True, highlight=False, emoji=False, markup=False)


class Notices:
    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def section(self, title: str) -> None:
        """Start a new part of the run."""
        if self.console.is_terminal:
            self.console.print()
            self.console.rule(Text(title, style="bold"), align="left", style="dim")
        else:
            self.say(f"\n== {title}")

    def warn(self, name: str, evidence: str, remedy: str) -> None:
        """Show what was noticed, the numbers that show it, and what to do (the fields of events.Alarm)."""
        text = Text(f"warning: {name}", style="bold yellow")
        text.append(f"\n  {evidence}\n  {remedy}", style="not bold")
        self.console.print(text, soft_wrap=True)

    def facts(self, values: Mapping[str, object]) -> None:
        """Name and value pairs, one a line, values aligned."""
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            line = Text(GAP + name.ljust(width) + GAP, style="dim" if self.console.is_terminal else "")
            line.append(str(value), style="not dim")
            self.console.print(line, soft_wrap=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table whose first column names the row; the others are numbers or short words, aligned right."""
        cells = [[str(cell) for cell in row] for row in rows]
        if self.console.is_terminal:
            self.console.print(rich_table(headers, cells))
            return
        widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]
        for row in [list(headers), *cells]:
            padded = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            self.say(GAP + GAP.join(padded).rstrip())


def rich_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=True, header_style="bold")
    for column, header in enumerate(headers):
        table.add_column(header, justify="left" if column == 0 else "right")
    for row in cells:
        table.add_row(*row)
    return table


def short_count(value: float) -> str:
    """A count in three figures: 950, 12.3K, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit * 0.9995:  # what three figures round up to the limit
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def short_duration(seconds: float) -> str:
    """A time as people say it: 42s, 3m05s, 2h07m, 37d 4h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"
