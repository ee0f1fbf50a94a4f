"""What a person sees: on a terminal, and in a log file, where no control character may appear."""

import io
import re
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from draftline.monitor.notices import Notices, short_count, short_duration, stdout_console
from draftline.monitor.progress import Progress

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def plain_console() -> Console:
    return Console(file=io.StringIO(), highlight=False, emoji=False, markup=False, width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, highlight=False, emoji=False, markup=False, width=100)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def ticking(step_s: float) -> Callable[[], float]:
    def ticks() -> Iterator[float]:
        now_s = 100.0
        while True:
            yield now_s
            now_s += step_s

    return ticks().__next__


def test_plain_progress_prints_every_nth_update_and_the_last() -> None:
    console = plain_console()
    with Progress("train", 10, console=console, every=2, clock=ticking(0.5)) as progress:
        for step in range(1, 6):
            progress.advance(tokens=600, loss=3.0 / step, proxy_tau=1 + step / 4)
    assert text_of(console).splitlines() == [
        "train 2/10  loss 1.5  proxy tau 1.5  1.2K tokens/s  ETA 4s",
        "train 4/10  loss 0.75  proxy tau 2  1.2K tokens/s  ETA 3s",
        "train 5/10  loss 0.6  proxy tau 2.25  1.2K tokens/s  ETA 2s",
    ]


def test_the_last_line_is_not_said_twice() -> None:
    console = plain_console()
    with Progress("eval", 2, console=console, clock=ticking(1.0)) as progress:
        progress.advance()
        progress.advance()
    assert text_of(console).splitlines() == ["eval 1/2  ETA 1s", "eval 2/2  ETA 0s"]


def test_nothing_is_printed_for_no_work() -> None:
    console = plain_console()
    with Progress("eval", 2, console=console):
        pass
    assert text_of(console) == ""


def test_rates_come_from_the_last_updates_so_that_a_slow_start_is_forgotten() -> None:
    times_s = iter([0.0, 1000.0, *(1000.0 + n for n in range(1, 60))])
    with Progress("train", 1000, console=plain_console(), every=1000, clock=lambda: next(times_s)) as progress:
        for _ in range(60):
            progress.advance(tokens=50)
        assert progress.tokens_per_s == 50.0
        assert progress.remaining_s == 940.0


def test_a_resumed_piece_of_work_counts_only_its_own_pace() -> None:
    with Progress("train", 100, console=plain_console(), every=1000, done=90, clock=ticking(2.0)) as progress:
        progress.advance(tokens=10)
        assert progress.done == 91
        assert progress.tokens_per_s == 5.0
        assert progress.remaining_s == 18.0


def test_a_terminal_gets_a_bar_with_the_same_numbers() -> None:
    console = terminal()
    with Progress("train", 4, console=console, clock=ticking(1.0)) as progress:
        for _ in range(4):
            progress.advance(tokens=2500, loss=0.5)
    shown = text_of(console)
    assert "\x1b[" in shown
    assert "4/4" in shown
    assert "loss 0.5  2.5K tokens/s  ETA 0s" in shown


@pytest.mark.parametrize("make_console", [plain_console, terminal])
def test_progress_survives_an_exception_and_lets_it_through(make_console: Callable[[], Console]) -> None:
    with pytest.raises(ValueError, match="mine"), Progress("train", 4, console=make_console()) as progress:
        progress.advance()
        raise ValueError("mine")


def test_plain_notices_are_aligned_whole_lines_without_control_characters() -> None:
    console = plain_console()
    notices = Notices(console)
    notices.section("Target")
    notices.facts({"taps": "1, 9", "mask token": "[bold]31 :smile: " + "x" * 60})
    notices.table(["benchmark", "tau"], [["quickstart", 3.25], ["gsm8k", 11.5]])
    notices.warn("tau differs", "proxy tau 3.0, tau 2.5", "look at the template")
    assert text_of(console).splitlines() == [
        "",
        "== Target",
        "  taps        1, 9",
        "  mask token  [bold]31 :smile: " + "x" * 60,
        "  benchmark    tau",
        "  quickstart  3.25",
        "  gsm8k       11.5",
        "warning: tau differs",
        "  proxy tau 3.0, tau 2.5",
        "  look at the template",
    ]
    assert not CONTROL.search(text_of(console))


def test_the_console_for_stdout_takes_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Notices(stdout_console()).say("[bold]taps[/bold] [1, 9] :smile: " + "x" * 200)
    assert capsys.readouterr().out == "[bold]taps[/bold] [1, 9] :smile: " + "x" * 200 + "\n"


def test_notices_on_a_terminal_say_the_same_words() -> None:
    console = terminal()
    notices = Notices(console)
    notices.section("Target")
    notices.table(["benchmark", "tau"], [["[red]quickstart", 3.25]])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text_of(console))
    assert [line.split() for line in shown.splitlines()][1:][1:] == [["benchmark", "tau"], ["[red]quickstart", "3.25"]]
    assert "Target ───" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (12345, "12.3K"),
        (4.56e6, "4.56M"),
        (7e9, "7G"),
        (999.9999, "1K"),
        (999.4, "999"),
        (0.25, "0.25"),
    ],
)
def test_short_count(value: float, text: str) -> None:
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (3.2e6, "37d 0h")]
)
def test_short_duration(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text
