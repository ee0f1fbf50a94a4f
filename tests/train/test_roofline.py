"""The roofline gate's arithmetic and its words; tests/gpu forces a real step onto the plain path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftline.bench.shapes import QWEN3_8B
from draftline.drafter.cost import RowWork, fp8_bytes, fp8_flop, step_bytes, step_cost
from draftline.errors import RunError
from draftline.train.roofline import Prediction, Rates, Roofline, Work, judge, predict


def test_counted_flop_of_the_published_row() -> None:
    """Qwen3-8B's drafter, 4,096 tokens, 512 blocks, by hand. The published count of 74.5 gives fc an input gradient,
    which nobody needs: 0.7 more."""
    cost = step_cost(QWEN3_8B, RowWork(4096, 512, mean_context=2048, supervised=512 * 15, compared=0))
    found = [part / 1e12 for part in (cost.body, cost.context, cost.attention, cost.head, cost.total)]
    assert found == pytest.approx([47.4, 2.4, 4.8, 19.1, 73.8], abs=0.06)


def test_only_supervised_slots_and_compared_positions_are_counted() -> None:
    """By hand: 4 V d a slot and 2 V d a position; bf16 logits written, read, turned and read, and once more beside a
    teacher's, which are written, read for their statistics; V = 151,936 and d = 4,096."""
    full = RowWork(4096, 512, mean_context=2048, supervised=7680, compared=0)
    part, beside = replace(full, supervised=3000), replace(full, supervised=3000, compared=1000)
    costs = [step_cost(QWEN3_8B, work) for work in (full, part, beside)]
    assert [cost.head for cost in costs] == [4 * 151936 * 4096 * slots for slots in (7680, 3000, 3000)]
    assert [cost.teacher for cost in costs] == [0, 0, 2 * 151936 * 4096 * 1000]
    assert costs[0].total - costs[1].total == pytest.approx(4 * 151936 * 4096 * 4680)
    moved = [step_bytes(QWEN3_8B, work, 2) for work in (full, part, beside)]
    assert moved[0] - moved[1] == pytest.approx(2 * 151936 * 4 * 4680)
    assert moved[2] - moved[1] == pytest.approx(2 * 151936 * (3000 + 2 * 1000))


def test_prediction_is_products_and_traffic_one_after_the_other() -> None:
    assert predict(Work(90.0, 30.0, layers=5), Rates(100.0, 10.0)).seconds == pytest.approx(1.0 + 3.0)


def test_fp8_products_are_predicted_at_their_own_rate() -> None:
    work = Work(90.0, 30.0, layers=5, fp8_flop=36.0)
    assert predict(work, Rates(100.0, 10.0, fp8_flop_per_s=200.0)).seconds == pytest.approx(0.6 + 0.2 + 3.0)


def test_fp8_products_of_the_published_row() -> None:
    """Two thirds of the layers' 47.4 TFLOP over block slots and of the context's keys and values, 1.0."""
    spec = QWEN3_8B
    assert fp8_flop(spec, 4096, 512) / 1e12 == pytest.approx(2 / 3 * 47.4 + 2 / 3 * 1.03, abs=0.06)
    assert fp8_bytes(spec, 4096, 512) / 1e9 == pytest.approx(10.70, abs=0.05)


def test_a_tiny_step_is_bound_by_its_launches() -> None:
    assert predict(Work(90.0, 30.0, layers=5), Rates(1e9, 1e9)).seconds == pytest.approx((150 + 5 * 60) * 50e-6)
    fp8 = predict(Work(90.0, 30.0, layers=5, fp8_flop=36.0), Rates(1e9, 1e9, 1e9))
    assert fp8.seconds == pytest.approx((150 + 5 * 73) * 50e-6)


def test_a_good_step_gets_its_figure() -> None:
    assert (
        judge(Roofline(Prediction(0.118, 0.0225), 0.124, {}))
        == "124.0 ms a micro-batch, 95% of the predicted rate (118.0 ms)"
    )


def test_a_step_whose_launches_take_longer_than_its_work_says_what_would_fill_the_device() -> None:
    """SmolLM2's on one row of 2,048 tokens, on an H200; not where the device is busy for more than half of it."""
    assert judge(Roofline(Prediction(0.0051, 0.0225), 0.0177, {})) == (
        "17.7 ms a micro-batch, 127% of the predicted rate (22.5 ms); its arithmetic takes 5.1 ms, for the rest the "
        "device waits for the host: a larger train.rows_per_micro_batch takes hardly longer"
    )
    assert judge(Roofline(Prediction(0.0100, 0.0225), 0.0177, {})).endswith("(22.5 ms)")


def test_a_step_that_waits_for_the_host_is_told_so() -> None:
    """As SmolLM2's did on an H200, in 214 ms (docs/LOG.md); the kernels here are made up."""
    with pytest.raises(
        RunError, match="45.0 ms of that: for the rest the device waits for the host. Slowest kernels: mm"
    ):
        judge(Roofline(Prediction(0.041, 0.0225), 0.214, {"mm": 0.03, "softmax": 0.015}))


def test_a_slow_step_is_told_with_its_kernels() -> None:
    kernels = {"bmm": 0.05, "softmax": 0.11, "mm": 0.02}
    text = judge(Roofline(Prediction(0.118, 0.0225), 0.2, kernels))
    assert "59%" in text and text.endswith("Slowest kernels: softmax 110.0 ms, bmm 50.0 ms, mm 20.0 ms")


def test_the_incident_ends_the_run() -> None:
    """36% of what the device should do."""
    with pytest.raises(RunError, match="36% of the predicted rate .* Slowest kernels: dense 200.0 ms") as error:
        judge(Roofline(Prediction(0.118, 0.0225), 0.328, {"dense": 0.2}))
    assert "draftline doctor" in (error.value.remedy or "")
