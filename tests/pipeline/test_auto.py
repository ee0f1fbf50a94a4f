"""Placement `auto` takes what is measured to be best, and shows why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import Ended, run_world

from draftline.config import PlacementSection
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.target.capture import FeatureCapture
from draftline.train.plan import StageTimes, World, candidates, make_plan, predicted_rate, ranks_wanted
from runs import write_recipe

SLOW_S = 0.15


def slowed(owner: Any, method: str) -> Callable[[], None]:
    """A stage that takes SLOW_S longer for every micro-batch, on any rank."""

    def hook() -> None:
        whole = getattr(owner, method)

        def slow(*args: Any) -> Any:
            time.sleep(SLOW_S)
            return whole(*args)

        setattr(owner, method, slow)

    return hook


COLOCATED = {"kind": "colocated"}


def split(targets: int, drafters: int) -> dict[str, object]:
    return {"kind": "split", "targets": targets, "drafters": drafters}


@pytest.mark.parametrize(
    ("hook", "ranks", "micro_batches", "best", "worse", "times_faster"),
    [
        (slowed(FeatureCapture, "__call__"), 3, 2, split(2, 1), split(1, 2), 1.3),
        (slowed(DrafterStep, "forward_backward"), 3, 2, split(1, 2), split(2, 1), 1.3),
        (slowed(FeatureCapture, "__call__"), 4, 5, split(3, 1), COLOCATED, 1.05),
    ],
    ids=["slow capture", "slow training", "slow capture, micro-batches that do not divide"],
)
def test_auto_picks_the_measured_best(
    tmp_path: Path, hook: Callable[[], None], ranks: int, micro_batches: int, best: dict[str, object],
    worse: dict[str, object], times_faster: float,
) -> None:  # fmt: skip
    """Two micro-batches a step: three ranks cannot all train, so it is one of two splits. Five on four colocated ranks
    take as long as eight would: three that capture ahead for one are faster. Best and worse are both run."""
    recipe = write_recipe(tmp_path, train={"rows_per_step": 2 * micro_batches, "epochs": 9, "checkpoint_every": 1000})

    def start(name: str, *words: str) -> Ended:
        return run_world(recipe, f"train.out={tmp_path / name}", *words, hook=hook, ranks=ranks)

    ended = start("auto", "placement.kind=auto")
    assert ended.code == 0, ended.out
    assert json.loads((tmp_path / "auto/placement.json").read_text()) == best
    assert f"split, {best['targets']} capturing and {best['drafters']} training" in ended.out and "taken" in ended.out
    rates = []
    for name, section in (("best", best), ("worse", worse)):
        assert start(name, *(f"placement.{key}={value}" for key, value in section.items())).code == 0
        rates.append(json.loads((tmp_path / name / "summary.json").read_text())["tokens_per_s"])
    assert rates[0] > times_faster * rates[1]


def rates(times: StageTimes, ranks: int, micro_batches: int) -> dict[str, float]:
    plans = candidates(PlacementSection(kind="auto"), World(ranks, ranks, "cpu"), micro_batches)
    return {plan.text: predicted_rate(plan, times, micro_batches) for plan in plans}


def test_rates_of_placements_by_hand() -> None:
    """Stages of 100 and 300 tokens/s on 4 ranks, in micro-batches of 300 tokens."""
    times = StageTimes(capture_s=3.0, train_s=1.0, optimizer_s=0.0, tokens=300)
    assert rates(times, 4, 8) == pytest.approx(
        {
            "colocated on 4": 300.0,
            "split, 1 capturing and 3 training": 100.0,
            "split, 2 capturing and 2 training": 200.0,
            "split, 3 capturing and 1 training": 300.0,
        }
    )
    two = candidates(PlacementSection(kind="auto"), World(4, 4, "cpu"), micro_batches_per_step=2)
    assert [plan.drafters for plan in two] == [2, 1]


def test_micro_batches_that_do_not_divide_are_in_the_prediction() -> None:
    """Five micro-batches on four colocated ranks take the time of eight: three targets that work ahead are faster."""
    times = StageTimes(capture_s=0.9, train_s=0.1, optimizer_s=0.2, tokens=100)
    assert rates(times, 4, 5) == pytest.approx(
        {
            "colocated on 4": 500 / 2.2,  # 2 (0.9 + 0.1) + 0.2
            "split, 1 capturing and 3 training": 500 / 4.5,
            "split, 2 capturing and 2 training": 500 / 2.25,
            "split, 3 capturing and 1 training": 500 / 1.5,
        }
    )
    assert rates(times, 4, 4)["colocated on 4"] == pytest.approx(400 / 1.2)


def test_the_optimizer_is_paid_once_a_step_by_every_drafter() -> None:
    times = StageTimes(capture_s=0.1, train_s=1.0, optimizer_s=0.5, tokens=100)
    assert times.capture_tokens_per_s == pytest.approx(1000)
    assert times.train_tokens_per_s(8) == pytest.approx(800 / 8.5)
    assert rates(times, 2, 8) == pytest.approx(
        {"colocated on 2": 800 / (4 * 1.1 + 0.5), "split, 1 capturing and 1 training": 800 / 8.5}
    )


def test_roles_of_two_hosts() -> None:
    placement = PlacementSection(kind="split", targets=2, drafters=4, tensor_parallel=2)
    plan = make_plan(placement, World(8, 4, "cuda"))
    assert [(role.host, role.device, role.name) for role in plan.roles] == [
        (0, "cuda:0", "drafter 0"),
        (0, "cuda:1", "drafter 1"),
        (0, "cuda:2", "drafter 2"),
        (0, "cuda:3", "drafter 3"),
        (1, "cuda:0", "target 0"),
        (1, "cuda:1", "target 0 shard 1"),
        (1, "cuda:2", "target 1"),
        (1, "cuda:3", "target 1 shard 1"),
    ]
    assert plan.target_ranks(1) == [6, 7] and plan.drafter_ranks() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("section", "ranks", "named"),
    [
        ({"drafters": 3}, 2, "placement.drafters 3 and a world of 2 ranks"),
        ({"kind": "split", "targets": 2, "drafters": 2}, 5, "do not fill 5 ranks"),
        ({"kind": "split", "targets": 4}, 4, "do not fill 4 ranks"),
        ({"kind": "split", "drafters": 2, "tensor_parallel": 2}, 5, "do not fill 5 ranks"),
    ],
)
def test_a_placement_that_does_not_fill_the_world_is_refused(section: dict, ranks: int, named: str) -> None:
    with pytest.raises(InputError, match=named):
        make_plan(PlacementSection(**section), World(ranks, ranks, "cpu"))


def test_ranks_that_a_host_starts_by_itself() -> None:
    def wanted(devices: int = 8, micro_batches: int = 8, **section: object) -> int:
        return ranks_wanted(PlacementSection(**section), devices, micro_batches)  # type: ignore[arg-type]

    assert wanted() == 8
    assert wanted(micro_batches=3) == 3  # a fourth would never train
    assert wanted(drafters=2) == 2
    assert wanted(kind="auto", micro_batches=3) == 8
    assert wanted(kind="split", targets=2, drafters=1) == 3
    assert wanted(kind="split", targets=2) == 8
    assert wanted(kind="split", targets=2, tensor_parallel=2, drafters=1) == 5


def test_more_drafters_than_micro_batches_are_refused(tmp_path: Path) -> None:
    ended = run_world(write_recipe(tmp_path), ranks=3)
    assert ended.code == 2
    assert "3 drafter ranks, and a step has 2 micro-batches: some would never train" in ended.out
