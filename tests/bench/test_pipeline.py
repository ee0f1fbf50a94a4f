"""`draftline bench pipeline`: real runs of a tiny random target, and its figures by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from command import draftline_here
from draftline.bench.channel import ChannelRate
from draftline.bench.pipeline import Machine, Wanted
from draftline.bench.pipeline_table import pipeline_figures, show_pipeline
from draftline.bench.placements import SLOTS, WARM_STEPS, Outcome, placements
from draftline.bench.shapes import find_shape
from draftline.monitor.events import Phases, Step, read_events
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.state import read_run
from draftline.monitor.trace import read_traces
from draftline.train.plan import StageTimes

STEPS = 5


@pytest.mark.slow
def test_a_split_is_run_timed_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    done = draftline_here(
        "bench",
        "pipeline",
        "--shape",
        "tiny",
        "--sequence",
        128,
        "--only",
        "split",
        "--steps",
        STEPS,
        "--out",
        out,
        "--json",
    )
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    split = figures["placements"]["split"]
    reports = [logged.event.report for logged in read_events(out / "split/events.jsonl").events
               if isinstance(logged.event, Step)]  # fmt: skip
    steady = reports[WARM_STEPS : WARM_STEPS + split["steps"]]
    assert len(steady) >= STEPS - WARM_STEPS
    assert split["tokens_per_s"] == pytest.approx(sum(r.tokens for r in steady) / sum(r.seconds for r in steady))
    assert {report.tokens for report in steady} == {8 * 128}
    assert figures["alone"] is None and split["share_of_stages"] is None and figures["speed_up_of_2"] is None
    assert len(split["waiting"]) == 2 and all(0 <= share < 1 for share in split["waiting"])
    assert not (out / "split/export").exists() and not (out / "split/checkpoints").exists()

    laps = [logged.event for logged in read_events(out / "split/events-rank1.jsonl").events
            if isinstance(logged.event, Phases)]  # fmt: skip
    assert {lap.queue_limit_bytes for lap in laps} == {SLOTS * 128 * 4 * 64 * 4}  # three taps and the final states
    assert 0 < max(lap.queue_used_bytes for lap in laps) <= laps[0].queue_limit_bytes
    assert read_run(out / "split").attempts == 1  # which both ranks logged the start of

    traces = read_traces(out / "split")
    trained = {span.item: span for span in traces[0] if span.phase == "forward"}
    captured = {span.item: span for span in traces[1] if span.phase == "capture"}
    for index, span in trained.items():
        assert captured[index].end_s < span.start_s + 0.001
    overlapping = [
        index
        for index, span in trained.items()
        for later, capture in captured.items()
        if later > index and capture.start_s < span.end_s and capture.end_s > span.start_s
    ]
    assert len(set(overlapping)) > len(trained) / 4  # a later batch is captured while one trains
    assert "capture, micro-batch" in (out / "split.svg").read_text()


def outcome(name: str, tokens_per_s: float, ranks: int) -> Outcome:
    return Outcome(name, tokens_per_s, 8, [0.01] * ranks, {"start": 1.0})


def test_figures_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Capture 2 ms, training 3 ms, optimizer 8 ms after 8 micro-batches of 256 tokens: 4 ms a micro-batch."""
    found = {
        "alone": asdict(StageTimes(capture_s=0.002, train_s=0.003, optimizer_s=0.008, tokens=256)),
        "channel": asdict(ChannelRate(bytes_per_s=2e9, cpu_s_per_byte=1e-9)) | {"bytes_per_token": 1000},
        **{
            name: asdict(outcome(name, rate, ranks))
            for name, rate, ranks in (("colocated-1", 40_000, 1), ("colocated-2", 60_000, 2), ("split", 63_000, 2))
        },
    }
    wanted = Wanted(find_shape("tiny", {}), None, "plain", STEPS, (), None)
    figures = pipeline_figures(wanted, Machine("cpu", 2), found)
    assert figures["alone"]["capture_tokens_per_s"] == pytest.approx(128_000)
    assert figures["alone"]["train_tokens_per_s"] == pytest.approx(64_000)
    stages = {name: run["stages_tokens_per_s"] for name, run in figures["placements"].items()}
    assert stages == pytest.approx(
        {"colocated-1": 8 * 256 / 0.048, "colocated-2": 8 * 256 / (4 * 0.005 + 0.008), "split": 64_000}
    )
    assert figures["placements"]["split"]["share_of_stages"] == pytest.approx(63 / 64)
    assert figures["speed_up_of_2"] == pytest.approx(1.5)
    assert figures["channel"]["tokens_per_s"] == pytest.approx(2e6)
    assert figures["channel"]["share_of_training"] == pytest.approx(256_000 / 2e9 / 0.004)
    assert figures["channel"]["cpu_share_of_training"] == pytest.approx(256e-6 / 0.004)
    show_pipeline(figures, Notices(stdout_console()))
    shown = capsys.readouterr().out
    assert "1.50 times the rate of 1 (bar 1.9)" in shown and "98.4%" in shown
    assert "3.2% of its training" in shown


def test_placements_follow_the_devices() -> None:
    assert [placement.name for placement in placements(1)] == ["colocated-1"]
    assert [placement.name for placement in placements(4)] == [
        "colocated-1", "colocated-2", "colocated-4", "split", "split-distributed",
    ]  # fmt: skip
    by_name = {placement.name: placement for placement in placements(2)}
    assert by_name["split-distributed"].overrides == [
        "placement.kind=split", "placement.targets=1", "placement.drafters=1", "placement.channel=distributed",
    ]  # fmt: skip


def test_bad_input_is_named(tmp_path: Path) -> None:
    def said(*words: str) -> str:
        done = draftline_here("bench", "pipeline", "--shape", "tiny", "--out", tmp_path, *words)
        assert done.code == 2
        return done.err

    assert "--only colocated-16: not among what 2 cpu devices can measure" in said("--only", "colocated-16")
    (tmp_path / "shape.json").write_text("{}")
    assert "holds figures of another shape, loss or products" in said("--only", "channel")
