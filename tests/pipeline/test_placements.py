"""Every placement trains the same weights: bits where the number of drafter ranks is the same, rounding where not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from worlds import run_world

from command import draftline_here
from draftline.decode.models import CachedDrafter
from draftline.drafter import step as step_module
from draftline.drafter.attention import DenseAttention
from draftline.drafter.step import DrafterStep
from draftline.monitor.events import Evaluation, Preflight, RunEnded, Step, read_events
from draftline.monitor.state import read_run
from draftline.records import StepReport
from runs import assert_same_bits, write_recipe

LAST = Path("checkpoints/step-0000008")
SPLIT = "placement.kind=split"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose steps have three micro-batches, which two drafters cannot share evenly, run in one process."""
    home = tmp_path_factory.mktemp("placements")
    recipe = write_recipe(home, train={**TRAIN, "out": str(home / "one")})
    done = draftline_here("train", recipe)
    assert done.code == 0, done.err
    return home


TRAIN: dict[str, object] = {
    "epochs": 3, "max_steps": 8, "rows_per_step": 3, "rows_per_micro_batch": 1, "anchors": 6, "checkpoint_every": 4,
}  # fmt: skip


def trained(home: Path, name: str, *overrides: str) -> Path:
    out = home / name
    if not out.exists():
        ended = run_world(home / "recipe.yaml", f"train.out={out}", *overrides)
        assert ended.code == 0, ended.out
    return out


def two(home: Path) -> Path:
    return trained(home, "two", "placement.drafters=2")


def test_two_drafters_take_the_steps_of_one(home: Path) -> None:
    one, both = reports(home / "one"), reports(two(home))
    assert [report.tokens for report in one] == [report.tokens for report in both]
    assert [report.blocks for report in one] == [report.blocks for report in both]
    assert [report.loss for report in both] == pytest.approx([report.loss for report in one], rel=1e-5)
    assert [report.grad_norm for report in both] == pytest.approx([report.grad_norm for report in one], rel=1e-4)
    assert_close(home / "one" / LAST, two(home) / LAST)


def test_a_report_of_many_ranks_counts_each_step_once(home: Path) -> None:
    state = read_run(two(home))
    assert state.tokens == json.loads((two(home) / "summary.json").read_text())["target_tokens"]
    assert state.loss.y == [report.loss for report in reports(two(home))] and len(state.loss.y) == 8


def test_a_step_that_is_not_finite_is_told_once(home: Path) -> None:
    """One drafter of two has it; both skip it, one says so and keeps the rows of both."""
    whole, calls = DrafterStep.forward_backward, [0]

    def broken(self: DrafterStep, batch: Any) -> Any:
        micro = whole(self, batch)
        calls[0] += 1
        if calls[0] == 6:  # the trial step was the first
            next(self.drafter.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        return micro

    hook = in_second_drafter(DrafterStep, "forward_backward", broken)
    words = ["placement.drafters=2", f"train.out={home / 'nan'}", "train.max_skipped_steps=3"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 0, ended.out
    state = read_run(home / "nan")
    assert [alarm.name for _, alarm in state.alarms].count("not-finite") == 1
    rows = (home / "nan/not_finite_rows.jsonl").read_text().splitlines()
    assert len(rows) == len(set(rows)) > 2


def reports(run: Path) -> list[StepReport]:
    events = [logged.event for logged in read_events(run / "events.jsonl").events]
    return [event.report for event in events if isinstance(event, Step)]


def assert_close(one: Path, other: Path) -> None:
    """AdamW turns a rounding of a gradient near zero into a step of its learning rate: compared where it is large."""
    left, right = load_file(one / "drafter.safetensors"), load_file(other / "drafter.safetensors")
    moved = torch.cat([(left[name] - right[name]).abs().flatten() for name in left])
    assert moved.median() < 1e-6 and moved.max() < 2e-3


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (1, 2)])
def test_a_split_trains_the_same_bits(home: Path, targets: int, drafters: int) -> None:
    split = trained(
        home, f"split{targets}{drafters}", SPLIT, f"placement.targets={targets}", f"placement.drafters={drafters}"
    )
    assert_same_bits(split / LAST, (home / "one" if drafters == 1 else two(home)) / LAST)


def gates_of(events: Path) -> list[str]:
    (passed,) = [e.event for e in read_events(events).events if isinstance(e.event, Preflight)]
    return list(passed.gates)


def test_the_drafters_of_a_split_pass_the_gates_that_need_no_layer_of_the_target(home: Path) -> None:
    """What a rank alone passes, without those of the target's layers, which the capturing rank passes."""
    split = trained(home, "split12", SPLIT, "placement.targets=1", "placement.drafters=2")
    of_target = {"stream", "taps", "features", "head", "cache", "embedding"}
    expected = [name for name in gates_of(home / "one/events.jsonl") if name not in of_target]
    assert {"own answers", "other blocks", "labels", "decoding logits", "trial step", "export"} <= set(expected)
    assert gates_of(split / "events.jsonl") == [*gates_of(split / "events-rank1.jsonl"), "export"] == expected
    assert set(gates_of(split / "events-rank2.jsonl")) == {*of_target, "mask token"}
    assert set(read_run(split).gates) == {*expected, *of_target}


class SeesItsAnchor(DenseAttention):
    """A block that also sees the features of its anchor's own token, which decoding does not have yet."""

    def visible_context(self, window: int | None) -> torch.Tensor:
        at_anchor = torch.arange(self.context_mask.shape[-1]) == self.slot_position[..., :1, None]
        return super().visible_context(window) | at_anchor


def in_second_drafter(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value) if os.environ["RANK"] == "1" else None


def test_a_leak_in_one_drafter_of_a_split_is_stopped_by_name(home: Path) -> None:
    hook = in_second_drafter(step_module, "DenseAttention", SeesItsAnchor)
    words = [SPLIT, "placement.targets=1", "placement.drafters=2", f"train.out={home / 'leak'}"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 2, ended.out
    assert "gate 'anchor state'" in ended.out
    assert not (home / "leak/checkpoints").exists() or not list((home / "leak/checkpoints").iterdir())


def test_decoding_that_differs_in_one_drafter_of_a_split_is_stopped_by_name(home: Path) -> None:
    """No layer of the target is there: its captured features stand for those through its cache."""

    def forgetful(self: Any, anchor_id: int, features: torch.Tensor) -> torch.Tensor:
        return whole(self, anchor_id, features[:, 1:])

    whole = CachedDrafter.forward
    hook = in_second_drafter(CachedDrafter, "forward", forgetful)
    words = [SPLIT, "placement.targets=1", "placement.drafters=2", f"train.out={home / 'forgetful'}"]
    ended = run_world(home / "recipe.yaml", *words, hook=hook)
    assert ended.code == 2, ended.out
    assert "gate 'decoding logits'" in ended.out


def test_a_split_exports_and_measures_what_it_trained(home: Path) -> None:
    """Rank 0, which held no layer of the target while it trained."""
    (home / "prompts.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}) + "\n")
    words = [f"eval.prompts={home / 'prompts.jsonl'}", "eval.max_new_tokens=8", "train.max_steps=2"]
    split = trained(home, "evaluated", SPLIT, "placement.targets=1", "placement.drafters=1", *words)
    (report,) = json.loads((split / "summary.json").read_text())["evaluations"]
    assert report["tokens"] > 0 and report["same_text_share"] == 1.0
    kinds = [logged.event for logged in read_events(split / "events-rank1.jsonl").events]
    assert isinstance(kinds[-1], RunEnded) and kinds[-1].status == "completed"


def test_features_between_hosts_are_the_same_bits(home: Path) -> None:
    words = [SPLIT, "placement.targets=2", "placement.drafters=1", "placement.channel=distributed"]
    assert_same_bits(trained(home, "distributed", *words) / LAST, home / "one" / LAST)


def test_a_sharded_drafter_takes_the_same_steps(home: Path) -> None:
    """Also the rank that has no micro-batch in a step's last round; rank 0 decodes with it on the way."""
    words = ["placement.drafters=2", "placement.sharded=true", "eval.every=4", "eval.every_prompts=1"]
    sharded = trained(home, "sharded", *words)
    assert_close(sharded / LAST, two(home) / LAST)
    found, expected = reports(sharded), reports(two(home))
    assert [report.loss for report in found] == pytest.approx([report.loss for report in expected], rel=1e-5)
    assert [report.grad_norm for report in found] == pytest.approx([r.grad_norm for r in expected], rel=1e-4)
    events = [logged.event for logged in read_events(sharded / "events.jsonl").events]
    assert [event.report.trained_steps for event in events if isinstance(event, Evaluation)] == [4, 8]


@pytest.mark.parametrize("words", [[], ["placement.drafters=3", "placement.sharded=true"]], ids=["one", "three"])
def test_a_sharded_run_goes_on_with_another_number_of_ranks(home: Path, tmp_path: Path, words: list[str]) -> None:
    sharded = trained(home, "sharded", "placement.drafters=2", "placement.sharded=true")
    run = tmp_path / "run"
    shutil.copytree(sharded / "checkpoints/step-0000004", run / "checkpoints/step-0000004")
    ended = run_world(home / "recipe.yaml", f"train.out={run}", *words, resume=True, ranks=None if words else 1)
    assert ended.code == 0, ended.out
    assert_close(run / LAST, sharded / LAST)
    seen, whole = reports(run), reports(sharded)[4:]
    assert [(r.step, r.tokens) for r in seen] == [(r.step, r.tokens) for r in whole]
    assert [r.loss for r in seen] == pytest.approx([r.loss for r in whole], rel=1e-4)


def test_target_shards_give_the_features_of_the_whole(home: Path) -> None:
    words = [SPLIT, "placement.targets=1", "placement.drafters=1", "placement.tensor_parallel=2"]
    assert_close(trained(home, "tensor_parallel", *words) / LAST, home / "one" / LAST)
