"""The verdicts that a CPU cannot cause, and the edges of the others, on windows made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftline.monitor.events import GpuSample, Phases, Resources
from draftline.monitor.history import KnownGood
from draftline.monitor.verdict import judge
from draftline.monitor.window import RankWindow, Window

GIB = 2**30
GPU = GpuSample(0.9, 40 * GIB, 141 * GIB, 1900, 1980, 600.0, ("power cap",))
BUSY = {"data": 0.002, "capture": 0.03, "forward": 0.03, "backward": 0.035}


def rank(number: int = 0, phases: dict[str, float] = BUSY, gpu: GpuSample = GPU, **changes: object) -> RankWindow:
    step = Phases(9, "colocated", 0.1, phases, 1000, 0, 0, 3)
    sample = Resources(f"cuda:{number}", 9, "forward", 995.0, 1.0, 0.0, GIB, GIB, gpu)
    window = RankWindow(number, "colocated", (step,) * 50, (sample,) * 30, ((999.0, sample),), 60, 999.0, ())
    return replace(window, **changes)


def names(*ranks: RankWindow, best: KnownGood | None = None, **changes: object) -> list[str]:
    window = replace(Window(1000.0, ranks, False), **changes)
    return [f"{verdict.severity}: {verdict.name}" for verdict in judge(window, best)]


def test_a_healthy_rank_is_drafter_bound_or_balanced() -> None:
    assert names(rank()) == ["note: drafter-bound"]
    assert names(rank(phases={"capture": 0.045, "forward": 0.025, "backward": 0.03})) == ["ok: balanced"]
    assert names(rank(phases={"capture": 0.07, "forward": 0.01, "backward": 0.01})) == ["note: target-bound"]


def test_no_steps_is_warming_up() -> None:
    assert names(rank(steps=())) == ["ok: warming up"]
    assert names() == ["ok: warming up"]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [((), []), (("power cap",), []), (("thermal, hardware",), [0]), (("power cap", "power brake"), [0])],
)
def test_a_gpu_is_throttled_by_heat_or_a_power_brake_not_by_its_power_cap(
    reasons: tuple[str, ...], expected: list[int]
) -> None:
    window = Window(1000.0, (rank(gpu=replace(GPU, throttle_reasons=reasons, clock_mhz=1200)),), False)
    throttled = [verdict for verdict in judge(window, None) if verdict.name == "throttled GPU"]
    assert [number for verdict in throttled for number in verdict.ranks] == expected
    assert all("clock 1200 of 1980 MHz" in verdict.evidence for verdict in throttled)


@pytest.mark.parametrize(
    ("utilisation", "seconds", "degraded"), [(0.29, 0.3, True), (0.31, 0.3, False), (0.29, 0.29, False)]
)
def test_the_edge_of_degraded_kernels(utilisation: float, seconds: float, degraded: bool) -> None:
    """A step shorter than 0.3 s may wait for its launches."""
    phases = {name: part * seconds / 0.1 for name, part in BUSY.items()}
    step = Phases(9, "colocated", seconds, phases, 1000, 0, 0, 3)
    found = names(rank(gpu=replace(GPU, utilisation=utilisation), steps=(step,) * 50))
    assert ("severe: degraded kernels" in found) == degraded


@pytest.mark.parametrize(
    ("best", "expected"),
    [(11_000, []), (11_200, ["warning: below its own best"]), (20_100, ["severe: below its own best"])],
)
def test_the_edges_of_below_its_own_best(best: float, expected: list[str]) -> None:
    """The rank takes 10,000 tokens/s."""
    assert names(rank(), best=KnownGood(best, "runs/a", {}, {})) == [*expected, "note: drafter-bound"]


@pytest.mark.parametrize(
    ("best", "severity"), [(11_200, "note"), (27_000, "note"), (28_000, "warning"), (51_000, "severe")]
)
def test_cores_taken_by_others_are_said_and_are_no_alarm_as_far_as_they_explain_it(best: float, severity: str) -> None:
    """The rank takes 10,000 tokens/s and waits 60% of the time for a core: 25,000 are what it would take."""
    sample = replace(rank().samples[0], cpu_wait_share=0.6, gpu=None)
    window = Window(1000.0, (rank(samples=(sample,) * 30),), False)
    [below] = [v for v in judge(window, KnownGood(best, "runs/a", {}, {})) if v.name == "below its own best"]
    assert below.severity == severity
    assert (below.remedy == "end the other processes") == (severity == "note")
    assert "other processes had its cores 60% of the time" in below.evidence


def test_memory_of_peers() -> None:
    """12% apart is how the incident's healthy two were, 64% how the third was."""
    held = [replace(GPU, memory_used_bytes=gib * GIB) for gib in (86, 96, 31)]
    assert names(rank(0, gpu=held[0]), rank(1, gpu=held[1])) == ["note: drafter-bound"]
    assert names(*(rank(n, gpu=gpu) for n, gpu in enumerate(held)))[0] == "severe: replica unlike its peers"


def test_one_new_graph_is_the_last_lighter_step_and_no_recompiling() -> None:
    steps = rank().steps
    once = steps[:30] + tuple(replace(step, graphs=4) for step in steps[30:])
    twice = once[:40] + tuple(replace(step, graphs=5) for step in once[40:])
    assert names(rank(steps=once)) == ["note: drafter-bound"]
    assert names(rank(steps=twice))[0] == "warning: recompiling"


def test_checkpoints_may_take_a_twentieth() -> None:
    def saves(seconds: float) -> tuple[tuple[float, float], ...]:
        return tuple((100.0 * n, seconds) for n in range(4))

    assert names(rank(saves=saves(4.9))) == ["note: drafter-bound"]
    assert names(rank(saves=saves(5.1)))[0] == "warning: checkpoint stalls"
    assert names(rank(saves=saves(50.0)[:2])) == ["note: drafter-bound"]  # the end follows at once


def test_an_allocator_that_fills_up_is_no_leak() -> None:
    def past(levels: list[float]) -> tuple[tuple[float, Resources], ...]:
        sample = rank().samples[0]
        return tuple(
            (900.0 + n, replace(sample, gpu=replace(GPU, memory_used_bytes=int(level * GIB))))
            for n, level in enumerate(levels)
        )

    leaking = [40 + 0.1 * n for n in range(100)]
    filling = [50 - 10 * 0.9**n for n in range(100)]
    assert names(rank(past_samples=past(leaking)))[0] == "warning: memory creeping"
    assert names(rank(past_samples=past(filling))) == ["note: drafter-bound"]


def test_a_run_that_has_ended_stands_still_rightly() -> None:
    late = rank(heard_s=100.0)
    assert names(late)[0] == "severe: stalled"
    assert names(late, ended=True) == ["note: drafter-bound"]


def test_of_two_ranks_that_stand_still_the_one_that_does_not_wait_is_the_cause() -> None:
    def standing(number: int, phase: str) -> RankWindow:
        sample = replace(rank().samples[0], phase=phase, phase_since_s=500.0)
        return rank(number, past_samples=((999.0, sample),))

    window = Window(1000.0, (standing(0, "reduce"), standing(1, "forward"), standing(2, "get")), False)
    stalled = [verdict for verdict in judge(window, None) if verdict.name == "stalled"]
    assert [verdict.ranks for verdict in stalled] == [(1,)]
    assert stalled[0].evidence == "rank 1 has been in forward of step 9 for 8m20s; 2 other ranks wait"


def test_an_evaluation_may_last_and_so_may_the_first_step() -> None:
    sample = replace(rank().samples[0], phase="evaluation", phase_since_s=0.0)
    assert names(rank(past_samples=((999.0, sample),))) == ["note: drafter-bound"]
    compiling = replace(sample, phase="forward", phase_since_s=400.0)
    assert names(rank(steps=(), steps_done=0, past_samples=((999.0, compiling),))) == ["ok: warming up"]
