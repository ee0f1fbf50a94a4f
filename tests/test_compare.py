"""`draftline compare`: every difference named, the likeliest cause of another rate first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from command import draftline_here
from draftline.monitor.compare import differences, read_run
from draftline.monitor.events import Alarm, Derived, Evaluation, Event, EventLog, RunEnded, RunStarted, Step
from draftline.records import EvalReport, StepReport

SWITCH = "torch._dynamo.config.force_compile_during_fx_trace"
FINGERPRINT = {
    "draftline": "0.1.0", "commit": "a" * 40, "python": "3.12.3", "os": "Linux-6.8", "cuda": "13.0",
    "torch": "2.11.0+cu130 (70d99e998b4955e0049d13a98d77ae1b14db1f45)", "driver": "580.159.04",
    "gpus": "NVIDIA H200 x8", "triton": "3.6.0", "transformers": "5.17.0", "cpu": "EPYC, 64 cores, 8 threads",
    "variables": "CUDA_HOME=/usr/local/cuda; TORCHINDUCTOR_CACHE_DIR=/a", "switches": "none",
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "target": {"path": "qwen3-8b"},
    "data": {"train": ["answers.jsonl"], "sequence_length": 4096},
    "drafter": {"layers": 5},
    "train": {"out": "runs/good", "anchors": 512},
    "overrides": [],
}
STEP = StepReport(0, 0.5, 3.0, (0.5,), 512, 32_000, 20_000, 1.0, 1e-4, 2.5)
EVALUATION = EvalReport(
    "held_out", "draftline", 3.5, (0.6,), 48, 100, 350, 0.0, None, 16, 256, 50.0,
)  # fmt: skip


def write_run(folder: Path, *events: Event) -> Path:
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return folder


def steps(seconds: float, count: int = 5) -> list[Step]:
    """The first step takes a minute more: it compiles."""
    return [Step(replace(STEP, step=i, seconds=seconds + 60 * (i == 0))) for i in range(count)]


def started(recipe: dict[str, Any] | None = None, **changes: str) -> RunStarted:
    return RunStarted(RECIPE | (recipe or {}), FINGERPRINT | changes, 100)


def good_run(folder: Path) -> Path:
    derived = Derived({"data": "d1", "weights": "w1"})
    return write_run(folder, started(), derived, *steps(2.5), Evaluation(EVALUATION), RunEnded("completed"))


def incident(folder: Path) -> Path:
    """The run of the incident: another build of torch, the switch that silenced the crash set by the model's code."""
    start = started(
        {"train": {"out": "runs/slow", "anchors": 512}},
        torch="2.11.0+cu128 (ea10a74b1f5b1c5a3f0f0a5d1d4a3ad2bd9a1c77)", cuda="12.8", commit="b" * 40,
        switches=f"{SWITCH}=True", variables="CUDA_HOME=/usr/local/cuda; TORCHINDUCTOR_CACHE_DIR=/b",
    )  # fmt: skip
    alarm = Alarm("undeclared-switch", "...", "...")
    derived = Derived({"data": "d1", "weights": "w1"})
    return write_run(folder, start, alarm, derived, *steps(32_000 / 4_600), RunEnded("interrupted"))


def test_in_the_incident_the_build_of_torch_comes_first_then_the_switch(tmp_path: Path) -> None:
    slow, good = read_run(incident(tmp_path / "slow")), read_run(good_run(tmp_path / "good"))
    assert (round(slow.tokens_per_s or 0), good.tokens_per_s) == (4_600, 12_800)
    assert [(found.kind, found.name, found.change) for found in differences(slow, good)] == [
        ("environment", "torch", "2.11.0+cu128 -> +cu130"),
        ("environment", f"switch {SWITCH}", "True -> unset"),
        ("environment", "cuda", "12.8 -> 13.0"),
        ("environment", "variable TORCHINDUCTOR_CACHE_DIR", "/b -> /a"),
        ("code", "commit", f"{'b' * 40} -> {'a' * 40}"),
    ]


def test_what_the_verb_prints_for_the_incident(tmp_path: Path) -> None:
    done = draftline_here("compare", incident(tmp_path / "slow"), good_run(tmp_path / "good"))
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "B runs at 278% of A's rate; the likeliest cause: torch 2.11.0+cu128 -> +cu130"
    for expected in (
        "tokens/s 4,600 12,800 2.78",
        "proxy tau 3.000 3.000 1.00",
        "tau (held_out) none 3.500",
        "alarms: undeclared-switch 1 0",
        "environment torch 2.11.0+cu128 -> +cu130",
    ):
        assert expected in lines


def test_kinds_come_in_their_order_and_a_declared_override_is_no_environment(tmp_path: Path) -> None:
    override = {"switch": "NCCL_ALGO", "value": "Ring", "reason": "x", "until": "2030-01-01"}
    recipe = {
        "overrides": [override],
        "drafter": {"layers": 3},
        "data": {"train": ["other.jsonl"], "sequence_length": 2048},
    }
    other = started(recipe, variables=f"{FINGERPRINT['variables']}; NCCL_ALGO=Ring", transformers="5.24.0")
    a = read_run(good_run(tmp_path / "a"))
    b = read_run(write_run(tmp_path / "b", other, Derived({"data": "d2", "weights": "w1"}), *steps(2.5)))
    assert [(found.kind, found.name, found.change) for found in differences(a, b)] == [
        ("environment", "transformers", "5.17.0 -> 5.24.0"),
        ("overrides", "NCCL_ALGO", "not declared -> Ring"),
        ("recipe", "drafter.layers", "5 -> 3"),
        ("recipe", "data.sequence_length", "4096 -> 2048"),
        ("data", "data.train", "['answers.jsonl'] -> ['other.jsonl']"),
        ("data", "content of the packed rows", "d1 -> d2"),
    ]


def test_an_environment_that_changed_inside_a_run_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", started(), *steps(2.5), started(driver="590.1"), *steps(2.6))
    done = draftline_here("compare", run, good_run(tmp_path / "b"))
    assert "what changed inside A, between its 2 attempts" in done.out
    assert "environment driver  580.159.04 -> 590.1" in done.out
    assert done.out.startswith("the rates are alike: B runs at 104% of A's\n")


def test_equal_runs_and_a_run_without_a_step(tmp_path: Path) -> None:
    same = draftline_here("compare", good_run(tmp_path / "a"), good_run(tmp_path / "b"))
    assert "nothing  same environment, recipe and data" in same.out
    unstarted = write_run(tmp_path / "c", started())
    assert "took no step" in draftline_here("compare", tmp_path / "a", unstarted).out


def test_a_folder_without_events_ends_with_2(tmp_path: Path) -> None:
    done = draftline_here("compare", good_run(tmp_path / "a"), tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: event log {tmp_path}/events.jsonl: No such file or directory")
    empty = write_run(tmp_path / "empty", RunEnded("failed"))
    assert "no run has started in it" in draftline_here("compare", empty, empty).err
