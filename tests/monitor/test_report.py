"""report.html in a real browser: the charts are drawn, light and dark, at desk and phone width; nothing complains."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from command import draftline_here
from draftline.monitor.events import (
    Alarm,
    Derived,
    Evaluation,
    EventLog,
    Health,
    LoggedEvent,
    Phases,
    Resources,
    RunEnded,
    RunStarted,
    Step,
    encode,
)
from draftline.monitor.report import write_report
from draftline.monitor.state import read_run
from draftline.records import EvalReport, StepReport, Verdict

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
TITLES = ["Loss", "Proxy tau", "Tokens per second", "Where the time went", "Busy", "Memory, GiB"]
PROBE = """<script>
const seen = [...document.querySelectorAll('.chart')].map(card => {
  const box = card.querySelector('svg').getBoundingClientRect();
  return {title: card.querySelector('h3').textContent.trim(), width: box.width, height: box.height,
          shapes: card.querySelectorAll('path, rect').length};
});
const found = {charts: seen, page: document.documentElement.scrollWidth, window: window.innerWidth,
               dark: matchMedia('(prefers-color-scheme: dark)').matches};
parent.document.body.setAttribute('data-probe', JSON.stringify(found));
</script>"""


def evaluation(benchmark: str, tau: float) -> EvalReport:
    return EvalReport(benchmark, "draftline", tau, (0.7, 0.5, 0.3), 8, 40, 100, 0.0, None, 4, 32, 80.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, 200 steps, one alarm with a name that is no HTML, two evaluations."""
    run = tmp_path_factory.mktemp("report") / "a <b> run"
    run.mkdir()
    lines: dict[int, list[str]] = {0: [], 1: []}

    def add(at: float, rank: int, event: object) -> None:
        lines[rank].append(encode(LoggedEvent(1.79e9 + at, rank, event)) + "\n")  # type: ignore[arg-type]

    add(0, 0, RunStarted({"target": {"path": "t"}}, {"torch": "2.13.0", "gpus": "none"}, 200, None, 5000.0))
    add(0, 0, Derived({"layers": "2 of hidden 192"}))
    for step in range(200):
        at = 1 + step * 0.5
        report = StepReport(step, 20 / (1 + step), 1 + step / 100, (0.5, 0.2, 0.1), 64, 2000, 900, 1.0, 1e-3, 0.5)
        add(at, 0, Step(report))
        for rank, role in ((0, "target"), (1, "drafter")):
            seconds = {"capture": 0.1, "put": 0.35} if rank == 0 else {"forward": 0.2, "backward": 0.25}
            add(at, rank, Phases(step, role, 0.5, seconds, 2000, 0, 0, 0))
            if step % 4 == 0:
                add(at, rank, Resources("cpu", step, "put", 0.0, 0.4 + 0.5 * rank, 0.0, (1 + rank) * 2**30, 0, None))
    add(20, 0, Health((Verdict("channel full", "warning", "the targets wait 70% of their time in put", "more"),)))
    add(20, 0, Alarm("<script>alert(1)</script>", "a & b", "look"))
    add(102, 0, Evaluation(evaluation("held_out", 2.5)))
    add(103, 0, Evaluation(evaluation("gsm8k", 3.25)))
    add(104, 0, RunEnded("completed"))
    for rank, written in lines.items():
        (run / ("events.jsonl" if rank == 0 else "events-rank1.jsonl")).write_text("".join(written))
    write_report(read_run(run), run / "report.html")
    return run


def test_the_page_needs_no_network_and_says_what_it_is_about(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"|url\(|@import|https?://', page) == []
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<h1>a &lt;b&gt; run</h1>" in page
    for words in ("channel full", "the targets wait 70% of their time in put", "2.13.0", "path: t", "tau 3.250 over 8"):
        assert words in page


def test_where_the_time_went_is_the_sum_of_the_steps(run: Path) -> None:
    page = (run / "report.html").read_text()
    for words in ("capture 20.0%", "put 70.0%", "forward 40.0%", "backward 50.0%", "other 10.0%"):
        assert f"<title>{words}</title>" in page


@dataclass(frozen=True)
class Seen:
    probe: dict[str, object]
    console: list[str]
    image: Image.Image


def look(page: Path, home: Path, width: int, dark: bool) -> Seen:
    """Open the page, with a probe at its end, in a frame `width` pixels wide: no browser window is as narrow as a
    phone."""
    probed, shot = home / "probed.html", home / "shot.png"
    inner = html.escape(page.read_text().replace("</body>", PROBE + "</body>"))
    probed.write_text(f'<iframe style="width:{width}px;height:2600px;border:0" srcdoc="{inner}"></iframe>')
    words = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={home / 'profile'}", f"--window-size={width},2600",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    dumped = subprocess.run(
        [*words, "--dump-dom", probed.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    subprocess.run(
        [*words, f"--screenshot={shot}", page.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    probe = re.search(r'data-probe="([^"]*)"', dumped.stdout)
    assert probe is not None
    console = [line for line in dumped.stderr.splitlines() if "CONSOLE" in line]
    return Seen(json.loads(probe[1].replace("&quot;", '"')), console, Image.open(shot).convert("RGB"))


def pixels_like(image: Image.Image, colour: str) -> int:
    """Pixels of exactly this #rrggbb."""
    wanted = tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return sum(count for count, found in image.getcolors(2**24) if found == wanted)


@pytest.mark.skipif(not BROWSER, reason="no chromium on this machine; .ci/run installs one")
@pytest.mark.parametrize(
    ("width", "dark", "background", "line"),
    [(1200, False, "#f6f7f9", "#2563a8"), (1200, True, "#12161c", "#6cb0f5"), (390, False, "#f6f7f9", "#2563a8")],
    ids=["light", "dark", "phone"],
)
def test_the_charts_in_a_browser(run: Path, tmp_path: Path, width: int, dark: bool, background: str, line: str) -> None:
    seen = look(run / "report.html", tmp_path, width, dark)
    assert seen.console == []
    assert seen.probe["dark"] is dark
    assert seen.probe["page"] <= seen.probe["window"] == width  # nothing to scroll sideways
    charts = {chart["title"]: chart for chart in seen.probe["charts"]}
    wanted = [*TITLES, "Accepted by draft slot, held_out", "Accepted by draft slot, gsm8k", "Tau by benchmark"]
    assert len(charts) == len(wanted)
    for title in wanted:
        [chart] = [chart for name, chart in charts.items() if name.startswith(title)]
        assert chart["width"] > 300 and chart["height"] > 50 and chart["shapes"] >= 1, chart
    assert pixels_like(seen.image, background) > 10_000
    assert pixels_like(seen.image, line) > 1000


def test_the_verb_writes_it_where_it_is_told(run: Path, tmp_path: Path) -> None:
    done = draftline_here("report", run, "--out", tmp_path / "page.html")
    assert (done.code, done.out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_folder_that_is_no_run_is_bad_input(tmp_path: Path) -> None:
    done = draftline_here("report", tmp_path)
    assert done.code == 2
    assert f"run {tmp_path}: holds no events.jsonl" in done.err


def test_a_run_that_ended_before_its_first_step_has_a_report_too(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write(RunStarted({}, {}, 100))
        log.write(RunEnded("failed", "no rows"))
    write_report(read_run(tmp_path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "failed: no rows" in page and "warming up" in page


def test_a_recorded_run_is_judged_when_its_report_is_written(tmp_path: Path) -> None:
    incident = Path(__file__).resolve().parents[1] / "data" / "incident"
    write_report(read_run(incident), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for words in ("degraded kernels", "drafter rank 7 holds 31 GiB", "36% of the 12.8K", "36% of its best"):
        assert words in page
