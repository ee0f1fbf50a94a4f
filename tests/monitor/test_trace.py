"""A rank's trace is its laps on a clock that all ranks share, and the picture is drawn from nothing else."""

from __future__ import annotations

import time
import xml.etree.ElementTree as xml
from itertools import count
from pathlib import Path

import pytest
import torch

from draftline.monitor.gantt import gantt, shown, window, write_gantt
from draftline.monitor.phases import PhaseClock
from draftline.monitor.trace import Span, Trace, read_spans, read_traces, trace_path

CPU = torch.device("cpu")


def test_spans_are_the_laps_in_unix_time(tmp_path: Path) -> None:
    seconds = count()
    clock = PhaseClock(CPU, now=lambda: float(next(seconds)))  # 0
    clock.lap()  # 1: what was before belongs to no step of the trace
    trace = Trace(tmp_path / "trace", clock)  # 2
    with clock.phase("capture", 7):  # 3
        pass  # 4
    with clock.phase("forward", 7), clock.phase("backward", 7):  # 5 and 6
        pass  # 7
    trace.write(clock.lap())  # 8 as forward ends, 9
    with clock.phase("optimizer"):  # 10
        pass  # 11
    trace.write(clock.lap())
    zero = trace.zero_s - 2
    assert abs(trace.zero_s - time.time()) < 5
    assert [
        (span.phase, span.item, span.step, round(span.start_s - zero, 3), round(span.end_s - zero, 3))
        for span in read_spans(tmp_path / "trace")
    ] == [
        ("capture", 7, 1, 3, 4),
        ("forward", 7, 1, 5, 6),
        ("backward", 7, 1, 6, 7),
        ("forward", 7, 1, 7, 8),
        ("optimizer", None, 2, 10, 11),
    ]


def test_a_line_that_its_writer_could_not_finish_is_left_out(tmp_path: Path) -> None:
    clock = PhaseClock(CPU)
    trace = Trace(trace_path(tmp_path, 1), clock)
    with clock.phase("get", 3):
        pass
    trace.write(clock.lap())
    with trace_path(tmp_path, 1).open("a") as file:
        file.write('{"phase": "forw')
    assert [span.phase for span in read_traces(tmp_path)[1]] == ["get"]
    assert list(read_traces(tmp_path)) == [1]


def steps(number: int, start_s: float = 100.0) -> list[Span]:
    """Of a second each: capture 0.3, forward 0.2, backward 0.4, optimizer 0.1."""
    spans, at = [], start_s
    for step in range(number):
        for phase, item, seconds in (("capture", step, 0.3), ("forward", step, 0.2), ("backward", step, 0.4),
                                     ("optimizer", None, 0.1)):  # fmt: skip
            spans.append(Span(phase, item, step, at, at + seconds))
            at += seconds
    return spans


def test_the_picture_shows_the_middle_steps_from_one_optimizer_step_to_another() -> None:
    assert window({0: steps(6)}) == pytest.approx((103.0, 105.0))
    assert window({0: steps(2)}) == pytest.approx((100.0, 102.0))  # too few: all of them


def test_forward_and_backward_are_one_bar_cut_at_the_window() -> None:
    found = shown(steps(2), 100.4, 101.1)
    assert [(span.phase, span.item, round(span.end_s - span.start_s, 3)) for span in found] == [
        ("training", 0, 0.5), ("optimizer", None, 0.1), ("capture", 1, 0.1),
    ]  # fmt: skip


def test_bars_lie_where_the_times_are(tmp_path: Path) -> None:
    """Two ranks over two seconds: a waiting rank's lane lies under the other's, and the file is whole XML."""
    traces = {0: steps(6), 1: [Span("put", 4, 0, 103.0, 104.0), Span("capture", 5, 1, 104.0, 105.0)]}
    drawn = gantt(traces, {0: "rank 0, drafter", 1: "rank 1, target"})
    assert ("--p-put", "waiting for room") in drawn.legend and ("--p-capture", "capture") in drawn.legend
    write_gantt(traces, {}, "split: 12,345 tokens/s <&>", tmp_path / "split.svg")
    tree = xml.parse(tmp_path / "split.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    bars = {
        bar.find(f"{name}title").text: bar for bar in tree.iter(f"{name}rect") if bar.find(f"{name}title") is not None
    }
    capture, put = bars["capture, micro-batch 5: 1e+03 ms"], bars["waiting for room, micro-batch 4: 1e+03 ms"]
    assert float(put.get("width")) == pytest.approx(float(capture.get("width")), abs=0.2)
    assert float(capture.get("x")) == pytest.approx(float(put.get("x")) + float(put.get("width")) + 0.5, abs=0.2)
    training = bars["forward and backward, micro-batch 3: 600 ms"]
    assert float(training.get("width")) == pytest.approx(0.6 * float(put.get("width")), abs=0.5)
    assert float(put.get("y")) > float(training.get("y"))
    assert "split: 12,345 tokens/s <&>" in "".join(tree.itertext())
