"""Every condition that a verdict names, caused for real by processes that run the real clock, sampler and event log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from draftline.monitor.history import KnownGood
from draftline.monitor.limits import Limits
from draftline.monitor.tail import RunTail
from draftline.monitor.verdict import judge
from draftline.monitor.window import Recent, Window
from draftline.records import Verdict
from ranks import Rank, run_ranks

# Seconds stand for the minutes of a real run, and tens of MiB for its GiB.
LIMITS = Limits(silent_s=3.0, stuck_s=1.0, stuck_steps=3.0, creep_span_s=1.5, creep_bytes=8 * 2**20, creep_share=0.02,
                peer_gap_bytes=64 * 2**20)  # fmt: skip
SECONDS = 1.6
PAUSE_S = 4.0
STEPS = 15


@dataclass(frozen=True)
class Scene:
    ranks: list[Rank]
    pause: int | None = None


CLEAN = {
    "one rank": Scene([Rank(work_s=0.03)]),
    "three ranks": Scene([Rank(work_s=0.03)] * 3),
    "target and drafter": Scene([Rank("target", work_s=0.03), Rank("drafter", work_s=0.03)]),
    "two targets, two drafters": Scene([Rank("target", work_s=0.04)] * 2 + [Rank("drafter", work_s=0.04)] * 2),
}
FAULTY = {
    "slow target": Scene([Rank("target", work_s=0.1), Rank("drafter", work_s=0.01)]),
    "slow drafter": Scene([Rank("target", work_s=0.01), Rank("drafter", work_s=0.1)]),
    "idle drafter": Scene([Rank("target", work_s=0.01), Rank("drafter", work_s=0.3, idle=True)]),
    "idle rank": Scene([Rank(work_s=0.3, idle=True)]),
    "slow rank": Scene([Rank(work_s=0.02)] * 2 + [Rank(work_s=0.15)]),
    "small replica": Scene([Rank(work_s=0.03, ballast_bytes=320 * 2**20)] * 2 + [Rank(work_s=0.03)]),
    "paused rank": Scene([Rank(work_s=0.03)] * 2, pause=1),
    "stuck rank": Scene([Rank(work_s=0.03), Rank(work_s=0.03, stuck_at=12)]),
    "slow data": Scene([Rank(work_s=0.02, data_s=0.02)]),
    "leak": Scene([Rank(work_s=0.02, leak_bytes=2**20)]),
    "recompiles": Scene([Rank(work_s=0.02, new_shape_every=8)]),
    "slow checkpoints": Scene([Rank(work_s=0.02, checkpoint_s=0.15)]),
}


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Window]]:
    """The window at the end of each scene; two scenes at a time, for two cores."""
    home = tmp_path_factory.mktemp("caused")

    def play(named: tuple[str, Scene]) -> tuple[str, Window]:
        name, scene = named
        run = home / name.replace(" ", "-")
        run.mkdir()
        run_ranks(run, scene.ranks, PAUSE_S if scene.pause else SECONDS, STEPS, scene.pause)
        events = RunTail(run).poll()
        recent = Recent()
        recent.feed(events)
        return name, recent.window(events[-1].time_s)

    with ThreadPoolExecutor(2) as pool:
        yield dict(pool.map(play, (CLEAN | FAULTY).items()))


def named(windows: dict[str, Window], scene: str) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in judge(windows[scene], None, LIMITS)}


@pytest.mark.parametrize("scene", CLEAN)
def test_a_clean_run_raises_no_alarm(windows: dict[str, Window], scene: str) -> None:
    verdicts = judge(windows[scene], None, LIMITS)
    assert [verdict for verdict in verdicts if verdict.severity in ("warning", "severe")] == []
    assert windows[scene].tokens_per_s > 100


def test_a_slow_target_starves_the_channel(windows: dict[str, Window]) -> None:
    found = named(windows, "slow target")
    assert set(found) == {"channel starved"}
    assert found["channel starved"].ranks == (0,)
    assert "let more ranks hold the target" in found["channel starved"].remedy


def test_a_slow_drafter_that_computes_fills_the_channel(windows: dict[str, Window]) -> None:
    found = named(windows, "slow drafter")
    assert set(found) == {"channel full"}
    assert found["channel full"].ranks == (1,)


def test_a_slow_drafter_that_idles_has_degraded_kernels(windows: dict[str, Window]) -> None:
    found = named(windows, "idle drafter")
    assert found["degraded kernels"].severity == "severe"
    assert found["degraded kernels"].ranks == (1,)
    assert "drafter rank 1 limits the run (the targets wait" in found["degraded kernels"].evidence


def test_a_colocated_rank_whose_computing_idles_has_degraded_kernels(windows: dict[str, Window]) -> None:
    assert named(windows, "idle rank")["degraded kernels"].ranks == (0,)


def test_a_straggler_is_named_with_its_factor(windows: dict[str, Window]) -> None:
    found = named(windows, "slow rank")
    assert found["straggler"].ranks == (2,)
    assert found["straggler"].evidence.startswith("rank 2 works 1")


def test_a_replica_that_holds_less_is_unlike_its_peers(windows: dict[str, Window]) -> None:
    found = named(windows, "small replica")
    assert set(found) - {"drafter-bound", "balanced"} == {"replica unlike its peers"}
    assert found["replica unlike its peers"].ranks == (2,)
    assert found["replica unlike its peers"].severity == "severe"


def test_a_paused_process_is_a_stalled_rank(windows: dict[str, Window]) -> None:
    stalled = named(windows, "paused rank")["stalled"]
    assert (stalled.ranks, stalled.severity) == ((1,), "severe")
    assert stalled.evidence.startswith("rank 1 has been silent for 4s, last seen in ")


def test_a_rank_that_lives_but_does_not_return_is_stalled_in_its_phase(windows: dict[str, Window]) -> None:
    stalled = named(windows, "stuck rank")["stalled"]
    assert stalled.ranks == (1,)
    assert "rank 1 has been in backward of step 12 for" in stalled.evidence


def test_slow_data_is_data_bound(windows: dict[str, Window]) -> None:
    found = named(windows, "slow data")
    assert set(found) == {"data-bound"}
    assert "wait for rows" in found["data-bound"].evidence


def test_a_leak_is_memory_creeping_with_its_pace(windows: dict[str, Window]) -> None:
    creeping = named(windows, "leak")["memory creeping"]
    assert creeping.ranks == (0,)
    pace = int(creeping.evidence.split(": ")[1].split()[0])
    steps_a_minute = 60 / windows["leak"].ranks[0].median_seconds()
    assert 0.5 * steps_a_minute < pace < 1.5 * steps_a_minute  # one MiB a step


def test_new_shapes_are_recompiling(windows: dict[str, Window]) -> None:
    found = named(windows, "recompiles")
    assert "rank 0 went from" in found["recompiling"].evidence


def test_slow_checkpoints_are_a_stall(windows: dict[str, Window]) -> None:
    found = named(windows, "slow checkpoints")
    assert found["checkpoint stalls"].evidence.startswith("rank 0 waits 0.1")


def test_a_run_is_judged_against_its_own_best(windows: dict[str, Window]) -> None:
    """The same ranks with a drafter four times as slow, against the rate of the clean ones."""
    best = KnownGood(windows["target and drafter"].tokens_per_s, "runs/good", {"torch": "2.11.0"}, {"torch": "2.12.0"})
    found = {verdict.name: verdict for verdict in judge(windows["slow drafter"], best, LIMITS)}
    below = found["below its own best"]
    assert below.severity in ("note", "warning", "severe")  # the more others have the cores, the less is it the run's
    assert "of runs/good" in below.evidence and below.evidence.endswith("since then: torch 2.11.0 -> 2.12.0")
    assert "below its own best" not in {v.name for v in judge(windows["target and drafter"], best, LIMITS)}
