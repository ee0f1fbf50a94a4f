"""Faults that show only while a run trains, put into real runs, and the clean runs that must stay silent."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job_in, with_changes
from rich.console import Console
from test_gates import answers_fed, forgetful_decoding

from builders import open_target, save_target
from command import draftline_here
from draftline.drafter.step import DrafterStep, MicroStep
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.switch_watch import SwitchWatch
from draftline.errors import RunError
from draftline.evaluate.check import answered, prompt_ids
from draftline.monitor.alarms import TAU_LEAST_STEPS, WINDOW, Alarms, RunFacts
from draftline.monitor.events import Alarm, Evaluation, EventLog, Step, read_events
from draftline.monitor.notices import Notices
from draftline.monitor.progress import Progress
from draftline.records import StepReport
from draftline.train.folder import open_run_folder
from draftline.train.job import Job
from draftline.train.loop import Loop
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.watch import Watch, documents_of_step
from runs import write_recipe

Patch = pytest.MonkeyPatch
CURVES = Path(__file__).parent / "curves"
MANY = {"epochs": 200, "max_steps": 60, "checkpoint_every": 1000}


def train_here(job: Job, home: Path, steps: int | None = None) -> tuple[list[Any], str, RunError | None]:
    """Run the real loop without preflight, which would have stopped the fault; events, what was shown, how it ended."""
    console = Console(file=io.StringIO(), width=200, highlight=False, emoji=False, markup=False)
    folder = open_run_folder(str(home / "out"), resume=False)
    ended = None
    with EventLog(folder.events) as log:
        watch = Watch(job, folder, log, Notices(console))
        progress = Progress("train", job.total_steps, console=console, every=1000)
        alarms = ProcessAlarms(SwitchWatch((), job.target.device), CompileGuard())
        loop = Loop(job, folder, log, progress, None, watch, alarms)
        try:
            with loop.progress:
                loop.run()
        except RunError as error:
            ended = error
    events = [logged.event for logged in read_events(folder.events).events]
    assert isinstance(console.file, io.StringIO)
    return events, console.file.getvalue(), ended


def alarms_in(events: Sequence[Any]) -> list[Alarm]:
    return [event for event in events if isinstance(event, Alarm)]


def test_a_clean_run_is_silent_and_decodes_on_its_way(tmp_path: Path) -> None:
    job = job_in(tmp_path, train=MANY, eval={"every": 25, "every_prompts": 3})
    events, shown, ended = train_here(job, tmp_path)
    assert (ended, alarms_in(events)) == (None, [])
    looks = [event.report for event in events if isinstance(event, Evaluation)]
    assert [report.trained_steps for report in looks] == [25, 50, 60]
    assert all(report.prompts == 3 and report.benchmark == "training prompts" for report in looks)
    assert f"tau {looks[-1].tau:.4g}" in shown.splitlines()[-1]


def test_decoding_on_the_way_changes_no_bit_of_training(tmp_path: Path) -> None:
    weights = []
    for every in (0, 3):
        job = job_in(tmp_path / str(every), eval={"every": every})
        train_here(job, tmp_path / str(every))
        weights.append(job.drafter.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Diverging(DrafterStep):
    """Every third step's loss is not a number."""

    def forward_backward(self, batch: Any) -> MicroStep:
        micro = super().forward_backward(batch)
        if batch.packed.index // 2 % 3 == 2:
            self.drafter.norm.weight.grad[0] = math.nan
            micro = replace(micro, loss_sum=micro.loss_sum * math.nan)
        return micro


def diverging(job: Job) -> Job:
    old = job.step
    return with_changes(job, step=Diverging(old.drafter, old.embed, old.head, old.loss, old.anchors, old.seed))


def test_steps_that_are_not_finite_are_not_taken_and_their_rows_written(tmp_path: Path) -> None:
    job = diverging(job_in(tmp_path, train=MANY | {"max_skipped_steps": 1}))
    events, shown, ended = train_here(job, tmp_path)
    assert [alarm.name for alarm in alarms_in(events)] == ["not-finite", "rows-lost", "not-finite"]
    assert [event.report.step for event in events if isinstance(event, Step)] == [0, 1, 3, 4, 6]  # judged one step late
    assert ended is not None and "2 steps had a loss or gradient that is not finite" in str(ended)
    assert all(torch.isfinite(value).all() for value in job.drafter.state_dict().values())
    rows = [json.loads(line) for line in (tmp_path / "out" / "not_finite_rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2] * len(documents_of_step(job, 2)) + [5] * len(documents_of_step(job, 5))
    wanted = {job.stream.where[document] for document in documents_of_step(job, 2)}
    assert {row["where"] for row in rows if row["step"] == 2} == wanted
    first = rows[0]
    assert first["text"] == job.target.tokenizer.decode(first["ids"]) and "<|im_start|> user" in first["text"]
    assert "warning: not-finite" in shown and "not_finite_rows.jsonl" in shown
    [saved] = (tmp_path / "out" / "checkpoints").iterdir()
    assert json.loads((saved / "state.json").read_text())["step"] in (6, 7)


def test_parameters_that_do_not_move(tmp_path: Path) -> None:
    """bfloat16 weights under a small rate: the norms' steps are rounded away. Preflight refuses such a drafter."""
    job = job_in(tmp_path, train=MANY, optim={"lr": 1.0e-4})
    with torch.no_grad():
        for parameter in job.drafter.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer = type(job.optimizer)(job.drafter, job.recipe.optim, job.total_steps)
    events, shown, _ = train_here(with_changes(job, optimizer=optimizer), tmp_path)
    [alarm] = [alarm for alarm in alarms_in(events) if alarm.name == "parameters-still"]
    assert "step 20" in alarm.evidence and "norm.weight" in alarm.evidence
    assert "warning: parameters-still" in shown


def test_a_block_that_is_fed_its_answers(tmp_path: Path) -> None:
    job = answers_fed(job_in(tmp_path, train=MANY | {"on_alarm": "stop"}), pytest.MonkeyPatch())
    events, shown, ended = train_here(job, tmp_path)
    assert alarms_in(events)[0].name in ("loss-too-low", "leak", "tau-apart")
    assert ended is not None and "alarm" in str(ended)
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 1


FACTS = RunFacts(total_steps=1000, supervised_tokens=50_000, max_unusable_share=0.2, max_skipped_steps=3)


def report(step: int, **changes: Any) -> StepReport:
    values = {
        "step": step, "loss": 2.0, "proxy_tau": 1.5, "slot_accuracy": (0.6, 0.4, 0.3), "blocks": 64, "tokens": 2000,
        "supervised_tokens": 1200, "grad_norm": 1.0, "lr": 6e-4, "seconds": 0.1,
    }  # fmt: skip
    return StepReport(**(values | changes))


def fed(facts: RunFacts, steps: int, make: Callable[[int], StepReport]) -> list[tuple[int, str]]:
    """(step, name) of every alarm."""
    alarms = Alarms(facts)
    return [(step, alarm.name) for step in range(steps) for alarm in alarms.step(make(step), rows=8)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: {}, []),
        (lambda s: {"slot_accuracy": (0.6, 0.6, 0.58)}, [(19, "leak")]),
        (lambda s: {"slot_accuracy": (0.6, 0.6, 0.56)}, []),  # 0.93 of the first slot's
        (lambda s: {"slot_accuracy": (0.2, 0.2, 0.2)}, []),  # chance
        (lambda s: {"slot_accuracy": (0.99, 0.99, 0.99)}, []),  # learned by heart
        (lambda s: {"slot_accuracy": (0.6, 0.1)}, []),
        (lambda s: {"loss": 0.04}, [(2, "loss-too-low")]),
        (lambda s: {"loss": 0.06}, []),
        (lambda s: {"loss": 0.04 if s >= 50 else 2.0}, []),  # 5% of the steps are done
        (lambda s: {"supervised_tokens": 290 if s >= 40 else 1200}, [(50, "supervision-collapsed")]),
        (lambda s: {"supervised_tokens": 310 if s >= 40 else 1200}, []),
        (lambda s: {"supervised_tokens": 10 if s == 59 else 1200}, []),  # the data's last step is lighter
    ],
)
def test_the_rules_at_their_limits(change: Callable[[int], dict[str, Any]], expected: list[tuple[int, str]]) -> None:
    assert fed(FACTS, 60, lambda step: report(step, **change(step))) == expected


def test_a_leak_is_not_told_from_text_learned_by_heart_in_little_data() -> None:
    small = replace(FACTS, supervised_tokens=1_999)
    assert fed(small, 60, lambda step: report(step, slot_accuracy=(0.6, 0.6, 0.6))) == []


def test_tau_apart() -> None:
    def names(tau: float, proxy: float, steps: int) -> list[str]:
        return [alarm.name for alarm in Alarms(FACTS).decoded(500, tau, proxy, steps)]

    assert names(2.0, 2.3, TAU_LEAST_STEPS) == ["tau-apart"]
    assert names(2.0, 1.7, TAU_LEAST_STEPS) == ["tau-apart"]
    assert names(2.0, 2.19, TAU_LEAST_STEPS) == []
    assert names(2.0, 4.0, TAU_LEAST_STEPS - 1) == []


def test_rows_lost_beyond_the_stated_share() -> None:
    alarms = Alarms(FACTS)
    for step in range(9):
        assert alarms.step(report(step), rows=8) == []
    found = [[alarm.name for alarm in alarms.skipped(9 + n, math.nan, 1.0, 8, "rows.jsonl")] for n in range(4)]
    assert found == [["not-finite"], ["not-finite"], ["not-finite", "rows-lost"], ["not-finite"]]  # 3 of 12 rows
    assert alarms.is_over


def test_every_alarm_speaks_once_but_for_steps_not_taken() -> None:
    leaky = fed(FACTS, 10 * WINDOW, lambda step: report(step, slot_accuracy=(0.6, 0.6, 0.6)))
    assert leaky == [(19, "leak")]


def by_heart(home: Path) -> Job:
    """A target's own answers to a few prompts, learned by heart; decoded with every 40 steps."""
    target = open_target(save_target(home / "target", seed=3, tie_word_embeddings=False, vocab_size=19))
    conversations = answered(target, prompt_ids(target))
    rows = [
        {"messages": [*c.messages[:1], {"role": "assistant", "content": "w0"}], "answer_ids": c.answer_ids,
         "finished": c.finished} for c in conversations
    ]  # fmt: skip
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return job_in(
        home,
        data={"sequence_length": 64},
        loss={"kind": "ce", "weights": "exponential"},
        optim={"lr": 1.0e-2},
        train={"epochs": 160, "rows_per_step": 4, "max_steps": 120, "anchors": 24, "checkpoint_every": 1000},
        eval={"every": 40},
    )


def test_decoding_that_is_not_what_training_was(tmp_path: Path) -> None:
    """A decoding loop that forgets features, and the same run with a right one beside it."""
    for name, forgets in (("right", False), ("wrong", True)):
        job = by_heart(tmp_path / name)
        with pytest.MonkeyPatch.context() as patch:
            events, _, _ = train_here(forgetful_decoding(job, patch) if forgets else job, tmp_path / name)
        names = [alarm.name for alarm in alarms_in(events)]
        taus = [event.report.tau for event in events if isinstance(event, Evaluation)]
        assert names == (["tau-apart"] if forgets else []), (names, taus)
        assert (taus[-1] > 4) != forgets


def curve(name: str) -> list[StepReport]:
    with (CURVES / f"{name}.csv").open() as file:
        return [
            report(
                int(row["step"]), loss=float(row["loss"]), supervised_tokens=int(row["supervised_tokens"]),
                slot_accuracy=(float(row["first_slot"]), 0.0, float(row["last_slot"])),
            ) for row in csv.DictReader(file)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("quickstart", RunFacts(400, 23_621, 0.2, 3), []),
        ("smollm2_by_heart", RunFacts(200, 233, 0.2, 3), []),
        ("race", RunFacts(3356, 1_000_000, 0.2, 3), []),
        ("quickstart_answers_in_context", RunFacts(400, 23_621, 0.2, 3), ["leak"]),
    ],
)
def test_recorded_runs(name: str, facts: RunFacts, expected: list[str]) -> None:
    """Real runs, the last one with the fault of `sees(p > a)` put in: what the thresholds were taken from."""
    reports = curve(name)
    assert [alarm for _, alarm in fed(facts, len(reports), lambda step: reports[step])] == expected


def test_the_verb_says_what_preflight_found_and_stops_on_an_alarm(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    done = draftline_here("train", recipe)
    assert done.code == 0, done.err
    assert "⟦w0 w1 w2 w3 <|im_end|>⟧" in done.out
    history = [logged.event for logged in read_events(tmp_path / "run" / "events.jsonl").events]
    [flown] = [event for event in history if type(event).__name__ == "Preflight"]
    assert f"{len(flown.gates)} gates passed in " in done.out and 0 < flown.seconds < 60
    assert {"loss mask", "taps", "head", "anchor state", "labels", "trial step", "export"} <= set(flown.gates)
    refused = draftline_here("train", recipe, f"train.out={tmp_path / 'other'}", "train.keep_checkpoints=1000000000")
    assert refused.code == 2
    assert "  FAIL  disk" in refused.out and "error: gate 'disk': expected " in refused.err
    assert not any(path.is_file() for path in (tmp_path / "other").rglob("*"))
