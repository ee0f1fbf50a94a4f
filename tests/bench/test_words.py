"""What `draftline bench` says before it measures."""

from __future__ import annotations

import pytest

from command import draftline_here
from draftline.bench.run import warn_of_waiting
from draftline.bench.shapes import NAMED


def test_a_shape_too_large_for_a_cpu_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """9 steps of 54.7 TFLOP at 0.1 TFLOP/s, the head not counted, are 82 minutes; the tiny shape's are milliseconds."""
    warn_of_waiting("step", NAMED["qwen3-8b"], 0.1)
    assert "54.7 TFLOP take this CPU 82 minutes or more" in capsys.readouterr().err
    warn_of_waiting("step", NAMED["tiny"], 0.1)
    assert capsys.readouterr().err == ""


def test_words_of_the_pipeline_are_not_ignored_elsewhere() -> None:
    done = draftline_here("bench", "step", "--shape", "tiny", "--only", "split")
    assert done.code == 2 and "bench step has no use for them" in done.err
