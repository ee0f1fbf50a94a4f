"""The progress of one long piece of work, for training, regeneration and evaluation alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from rich import progress as bars
from rich.console import Console

from draftline.monitor.notices import short_count, short_duration

RATE_WINDOW = 50  # updates that tokens/s and the time left are taken from: a warm-up must not slow them for an hour


class Progress:
    """A bar on a terminal; elsewhere a plain line every `every` updates and at the end.

        with Progress("train", total=500, every=10, console=console) as progress:
            progress.advance(tokens=report.tokens, loss=report.loss, proxy_tau=report.proxy_tau)

    total and done count units (steps, prompts); `done` is where a resumed piece of work starts. The numbers given to
    `advance` are shown as they are, under their own names, and `remarks` (a run's overrides) stand at the end.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        console: Console,
        every: int = 1,
        done: int = 0,
        remarks: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.total = total
        self.done = done
        self.every = every
        self.console = console
        self.remarks = tuple(remarks)
        self.tokens = 0
        self._clock = clock
        self._updates = 0
        self._shown = True  # whether the newest state is on the screen
        self._numbers: dict[str, float] = {}
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=RATE_WINDOW + 1)  # (time, units, tokens)
        self._bar = Bar(self) if console.is_terminal else None

    def advance(self, units: int = 1, *, tokens: int = 0, **numbers: float) -> None:
        """Count `units` more of `total` as done, with the tokens that they took."""
        self.done += units
        self.tokens += tokens
        self._updates += 1
        self._numbers = numbers
        self._marks.append((self._clock(), self.done, self.tokens))
        self._shown = False
        if self._bar is not None:
            self._bar.show(self)
        elif self._updates % self.every == 0:
            self._show_line()

    def details(self) -> list[str]:
        """The given numbers, tokens/s, the time left and the remarks, each as one short text."""
        shown = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self._numbers.items()]
        if self.tokens:
            shown.append(f"{short_count(self.tokens_per_s)} tokens/s")
        return [*shown, f"ETA {short_duration(self.remaining_s)}", *self.remarks]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the last updates."""
        (start_s, _, before), (end_s, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(end_s - start_s, 1e-9)

    @property
    def remaining_s(self) -> float:
        """Seconds left at the pace of the last updates."""
        (start_s, before, _), (end_s, after, _) = self._marks[0], self._marks[-1]
        return (self.total - self.done) * (end_s - start_s) / max(after - before, 1)

    def __enter__(self) -> Progress:
        self._marks.append((self._clock(), self.done, self.tokens))
        if self._bar is not None:
            self._bar.rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.rich.stop()
        elif not self._shown:
            self._show_line()

    def _show_line(self) -> None:
        self.console.print("  ".join([f"{self.title} {self.done}/{self.total}", *self.details()]), soft_wrap=True)
        self._shown = True


class Bar:
    """The bar of a Progress on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self.rich = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[numbers]}", markup=False),
            console=progress.console,
        )
        self.task = self.rich.add_task(progress.title, total=progress.total, completed=progress.done, numbers="")

    def show(self, progress: Progress) -> None:
        self.rich.update(self.task, completed=progress.done, numbers="  ".join(progress.details()))
