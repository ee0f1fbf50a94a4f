"""From a recipe to a measured drafter through the verbs, as a person uses them: what lies in the folders afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from builders import save_target
from command import draftline_here
from draftline.config import load_recipe
from draftline.monitor.events import (
    CheckpointWritten,
    Derived,
    Evaluation,
    Event,
    Health,
    Phases,
    Preflight,
    Resources,
    RunEnded,
    RunStarted,
    Step,
    read_events,
)
from runs import assert_same_bits, checkpoint_names, write_recipe

STEPS = 3
SUMMARY_KEYS = {
    "target", "export", "steps", "target_tokens", "train_seconds", "tokens_per_s", "loss", "proxy_tau", "evaluations",
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with an evaluation at its end."""
    home = tmp_path_factory.mktemp("verbs")
    save_target(home / "target", seed=3, vocab_size=20, tie_word_embeddings=False)
    recipe = write_recipe(home, eval={"prompts": str(home / "data.jsonl"), "max_prompts": 3, "max_new_tokens": 12})
    done = draftline_here("train", recipe, f"train.max_steps={STEPS}", "train.checkpoint_every=2", "train.log_every=2")
    assert done.code == 0, done.err
    assert [f"== {part}" for part in ("data", "drafter", "preflight", "training", "export", "summary")] == [
        line for line in done.out.splitlines() if line.startswith("== ")
    ]
    return home


def events_of(run: Path) -> list[Event]:
    history = read_events(run / "events.jsonl")
    assert history.torn is None
    return [logged.event for logged in history.events]


def test_the_run_folder(home: Path) -> None:
    run = home / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "events.jsonl", "export", "recipe.yaml", "report.html", "summary.json",
    ]  # fmt: skip
    assert checkpoint_names(run) == ["step-0000002", "step-0000003"]
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "README.md", "config.json", "draftline.json", "model.safetensors",
    ]  # fmt: skip


def test_a_relative_run_folder_holds_nothing_else_either(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preflight's trial export is made inside the run folder and must leave nothing there."""
    monkeypatch.chdir(tmp_path)
    done = draftline_here("train", home / "recipe.yaml", "train.out=runs/mine", "train.max_steps=1")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir()) == [
        "checkpoints", "events.jsonl", "export", "recipe.yaml", "report.html", "summary.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_summary(home: Path) -> None:
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert summary.keys() == SUMMARY_KEYS
    assert (summary["target"], summary["export"]) == (str(home / "target"), str(home / "run" / "export"))
    assert summary["steps"] == STEPS
    [evaluation] = summary["evaluations"]
    assert (evaluation["benchmark"], evaluation["prompts"], evaluation["same_text_share"]) == ("data", 3, 1.0)
    steps = [event.report for event in events_of(home / "run") if isinstance(event, Step)]
    assert (summary["loss"], summary["proxy_tau"]) == (steps[-1].loss, steps[-1].proxy_tau)
    assert summary["target_tokens"] == sum(report.tokens for report in steps) > 0


def test_the_events(home: Path) -> None:
    events = events_of(home / "run")
    kinds = [RunStarted, Derived, Preflight, Step, Step, Step, Evaluation, Evaluation, RunEnded]
    beside = (Phases, Resources, Health, CheckpointWritten)  # a checkpoint is written while training goes on
    assert [type(event) for event in events if not isinstance(event, beside)] == kinds
    steps = [index for index, event in enumerate(events) if isinstance(event, Step)]
    saved = [index for index, event in enumerate(events) if isinstance(event, CheckpointWritten)]
    assert saved[0] > steps[1] and saved[1] > steps[2]
    times = [event for event in events if isinstance(event, Phases)]
    assert [event.step for event in times] == [0, 1, 2]
    assert all({"data", "capture", "forward", "backward", "optimizer"} <= event.phases.keys() for event in times)
    assert all(0.5 * event.seconds < sum(event.phases.values()) <= event.seconds for event in times)
    started, ended = events[0], events[-1]
    assert isinstance(started, RunStarted) and started.resumed_from_step is None
    assert started.recipe == load_recipe(home / "run" / "recipe.yaml").model_dump(mode="json")
    assert ended == RunEnded("completed")
    evaluations = [event.report for event in events if isinstance(event, Evaluation)]
    assert [(report.benchmark, report.trained_steps) for report in evaluations] == [
        ("training prompts", STEPS), ("data", None),
    ]  # fmt: skip
    written = [event for event in events if isinstance(event, CheckpointWritten)]
    assert [event.step for event in written] == [2, 3]
    newest = Path(written[-1].path)
    assert written[-1].size_bytes == sum(path.stat().st_size for path in newest.iterdir())
    steps = [event.report for event in events if isinstance(event, Step)]
    assert [report.step for report in steps] == [0, 1, 2]
    assert all(len(report.slot_accuracy) == 7 and report.blocks > 0 and report.grad_norm > 0 for report in steps)


def test_the_recipe_of_the_folder_trains_the_same_run_again(home: Path) -> None:
    recipe = home / "run" / "recipe.yaml"
    tree = yaml.safe_load(recipe.read_text())
    assert (tree["train"]["max_steps"], tree["optim"]["lr"]) == (STEPS, 6e-4)  # overrides and defaults are in it
    done = draftline_here("train", recipe, f"train.out={home / 'again'}")
    assert done.code == 0, done.err
    for name in ("step-0000002", "step-0000003"):
        assert_same_bits(home / "again" / "checkpoints" / name, home / "run" / "checkpoints" / name)
    one, other = ((home / name / "export" / "model.safetensors").read_bytes() for name in ("run", "again"))
    assert one == other


def evaluation(home: Path, draft: Path, *words: str) -> dict[str, object]:
    options = ["--target", home / "target", "--draft", draft, "--prompts", home / "data.jsonl", "--max-prompts", "3"]
    done = draftline_here("eval", *options, "--max-new-tokens", "12", "--json", *words)
    assert done.code == 0, done.err
    [line] = done.out.splitlines()  # one JSON object and nothing else
    report: dict[str, object] = json.loads(line)
    return report


def test_export_in_both_formats_and_eval_as_json(home: Path, tmp_path: Path) -> None:
    checkpoint = home / "run" / "checkpoints" / "step-0000003"
    for name in ("reference", "speculators"):
        done = draftline_here("export", checkpoint, tmp_path / name, "--format", name)
        assert (done.code, done.out) == (0, f"wrote {tmp_path / name}: reloads to the same logits\n")
    assert (tmp_path / "reference" / "model.safetensors").read_bytes() == (
        home / "run" / "export" / "model.safetensors"
    ).read_bytes()
    reports = [evaluation(home, tmp_path / name) for name in ("reference", "speculators")]
    timed = ("tokens_per_s", "plain_tokens_per_s")
    one, other = ({key: value for key, value in report.items() if key not in timed} for report in reports)
    assert one == other
    [measured] = json.loads((home / "run" / "summary.json").read_text())["evaluations"]
    assert one == {key: value for key, value in measured.items() if key not in timed}
    assert one["same_text_share"] == 1.0


def test_eval_for_people_and_without_plain_decoding(home: Path) -> None:
    options = ["--target", home / "target", "--draft", home / "run" / "export", "--prompts", home / "data.jsonl"]
    done = draftline_here("eval", *options, "--max-prompts", "2", "--max-new-tokens", "4", "--no-compare-plain")
    assert done.code == 0, done.err
    assert done.out.startswith("\n== data (draftline)\n  tau ")
    assert "greedy" in done.out and "speed-up" not in done.out and "same text" not in done.out
    sampled = evaluation(home, home / "run" / "export", "--temperature", "1.0")
    assert (sampled["temperature"], sampled["same_text_share"]) == (1.0, None)
