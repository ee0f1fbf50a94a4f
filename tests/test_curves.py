"""Curves from event logs."""

from pathlib import Path

import numpy as np
import pytest

from draftline.errors import InputError
from draftline.monitor.curves import moving_mean, plot_curves, read_curve
from draftline.monitor.events import Evaluation, EventLog, RunEnded, Step
from draftline.records import EvalReport, StepReport


def step(number: int, loss: float) -> Step:
    return Step(StepReport(number, loss, 1.0 + number / 10, (0.5,), 8, 64, 32, 1.0, 1e-3, 0.1))


EVALUATION = EvalReport("quickstart", "draftline", 3.5, (0.9,), 8, 40, 100, 0.0, None, 4, 32, 80.0)


def test_a_repeated_step_counts_as_done_last_and_steps_ascend(tmp_path: Path) -> None:
    path = tmp_path / "my-run" / "events.jsonl"
    with EventLog(path) as log:
        for event in (step(2, 3.0), step(3, 9.0), step(1, 4.0), step(2, 2.5), step(3, 2.0), Evaluation(EVALUATION)):
            log.write(event)
    curve = read_curve(path)
    assert curve.name == "my-run"
    assert [(report.step, report.loss) for report in curve.steps] == [(1, 4.0), (2, 2.5), (3, 2.0)]
    assert curve.evaluations == (EVALUATION,)


def test_moving_mean_against_a_direct_mean() -> None:
    values = np.random.default_rng(0).normal(size=50)
    expected = [values[max(0, place - 3) : place + 4].mean() for place in range(50)]
    np.testing.assert_allclose(moving_mean(values, 7), expected, rtol=1e-12)
    np.testing.assert_allclose(moving_mean(values, 1), values, rtol=0, atol=1e-12)


def test_two_runs_become_one_png(tmp_path: Path) -> None:
    paths = [tmp_path / name / "events.jsonl" for name in ("ce", "dpace")]
    for path in paths:
        with EventLog(path) as log:
            for number in range(1, 21):
                log.write(step(number, 4.0 / number))
            log.write(Evaluation(EVALUATION))
    out = tmp_path / "plots" / "curves.png"
    plot_curves(paths, out)
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert out.stat().st_size > 20_000


def test_a_run_that_never_trained_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(RunEnded("failed", "no data"))
    with pytest.raises(InputError, match="no training steps"):
        plot_curves([path], tmp_path / "x.png")
