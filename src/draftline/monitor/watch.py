"""`draftline watch`: a run seen from outside, live on a terminal; elsewhere, or once it has ended, its state once."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draftline.monitor.notices import stdout_console
from draftline.monitor.panels import screen
from draftline.monitor.state import RunState
from draftline.monitor.tail import RunTail

REFRESH_S = 1.0


def watch(run: Path) -> None:
    """Show the run until it ends; one that is still loading is waited for on a terminal. Raises InputError where the
    folder is no run."""
    console = stdout_console()
    tail, state = RunTail(run), RunState(run)
    if not console.is_terminal or not run.is_dir():
        tail.require_run()
    state.feed(tail.poll())
    if not console.is_terminal or state.ended is not None:
        console.print(screen(state, moment(state), console.width))
        return
    follow(tail, state, console)


def follow(tail: RunTail, state: RunState, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if tail.has_begun():
                live.update(screen(state, moment(state), console.width), refresh=True)
            else:
                live.update(Text(f"{tail.run}: loading, no event yet", style="dim"), refresh=True)
            if state.ended is not None:
                return
            time.sleep(REFRESH_S)
            state.feed(tail.poll())


def moment(state: RunState) -> float:
    """Now, while the run goes on; the end of one that has ended."""
    return time.time() if state.ended is None else state.newest_s
