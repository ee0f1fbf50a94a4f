"""Real `draftline train` runs of one random target, a placement each, timed by their own event logs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftline.bench.shapes import Shape
from draftline.errors import RunError
from draftline.monitor.events import LoggedEvent, Phases, Preflight, RunStarted, Step
from draftline.monitor.gantt import write_gantt
from draftline.monitor.phases import WAITING
from draftline.monitor.tail import RunTail
from draftline.monitor.trace import read_traces

MICRO_BATCHES = 8  # a step
WARM_STEPS = 2
SLOTS = 3  # micro-batches in flight: enough to hide one, few enough that a run soon is in its steady state
SPARE_STEPS = 100  # a run is ended from outside, and must not end before
POLL_S = 0.1
LAST_LINES = 15
SPLIT = {"kind": "split", "targets": 1, "drafters": 1}


@dataclass(frozen=True)
class Placement:
    name: str
    ranks: int
    section: dict[str, Any]  # of the recipe's placement

    @property
    def overrides(self) -> list[str]:
        return [f"placement.{key}={value}" for key, value in self.section.items()]


def placements(devices: int) -> list[Placement]:
    """Those that so many devices allow."""
    counts = sorted({1, 2, devices})
    known = [Placement(f"colocated-{count}", count, {"drafters": count}) for count in counts]
    known += [
        Placement("split", 2, SPLIT),
        Placement("split-distributed", 2, SPLIT | {"channel": "distributed"}),
    ]
    return [placement for placement in known if placement.ranks <= devices]


@dataclass(frozen=True)
class Outcome:
    """What a placement reached over its steady steps, and where its wall time went."""

    name: str
    tokens_per_s: float
    steps: int  # that count
    waiting: list[float]  # share of its time that each rank waited for another
    wall_s: dict[str, float]  # start, preflight, warm-up, steps, end


def write_recipe(home: Path, shape: Shape, own: dict[str, dict[str, Any]], slot_bytes: int, steps: int) -> Path:
    """The recipe of all placements: what the shape says, what `own` asks for by section, the defaults for the rest, a
    trace, nothing decoded."""
    spec, rows_per_step = shape.spec, MICRO_BATCHES * shape.rows
    sliding = [layer for layer, kind in enumerate(spec.layer_types) if kind == "sliding_attention"]
    tree: dict[str, Any] = {
        "target": {"path": str(home / "target")},
        "data": {"train": str(home / "conversations.jsonl"), "sequence_length": shape.sequence},
        "drafter": {
            "layers": spec.num_hidden_layers, "block_size": spec.block_size, "taps": list(spec.target_layer_ids),
            "mask_token_id": spec.mask_token_id, "sliding_layers": sliding, "sliding_window": spec.sliding_window,
        },
        "train": {
            "epochs": steps + SPARE_STEPS, "rows_per_step": rows_per_step, "rows_per_micro_batch": shape.rows,
            "anchors": shape.anchors, "checkpoint_every": 10**6, "keep_checkpoints": 1, "trace": True, "log_every": 1,
        },
        "placement": {"channel_gib": SLOTS * slot_bytes / 2**30, "max_restarts": 0},
        "eval": {"every": 0},
    }  # fmt: skip
    for section, values in own.items():
        tree[section] = tree.get(section, {}) | values
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def run_placement(placement: Placement, recipe: Path, steps: int) -> Outcome:
    """Train until `steps` steps are done, then end the run as a second Ctrl-C does: its last checkpoint and export, of
    many gigabytes for a large drafter, are no part of the question. Raises RunError where it ends by itself."""
    run = recipe.parent / placement.name
    shutil.rmtree(run, ignore_errors=True)
    log = recipe.parent / f"{placement.name}.log"
    words = ["train", str(recipe), f"train.out={run}", *placement.overrides]
    started = time.time()
    with terminated_as_interrupted(), log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "draftline", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            events = wait_for_steps(run, process, steps)
        finally:
            end(process)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)  # perhaps a part of one
    if events is None:
        lines = "\n    ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise RunError(f"{placement.name}: ended with code {process.returncode} before step {steps}\n    {lines}")
    outcome = outcome_of(placement, events, started, time.time())
    names = {rank: f"rank {rank}, {role}" for rank, role in roles(events).items()}
    traces, title = read_traces(run), f"{placement.name}: {outcome.tokens_per_s:,.0f} tokens/s"
    write_gantt(traces, names, title, recipe.parent / f"{placement.name}.svg")
    return outcome


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that no run outlives what started it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_steps(run: Path, process: subprocess.Popen[bytes], steps: int) -> list[LoggedEvent] | None:
    """The events of a run that has done so many steps; None where it ended before."""
    tail, events = RunTail(run), list[LoggedEvent]()
    while True:
        over = process.poll() is not None
        events += tail.poll()
        if sum(isinstance(logged.event, Step) for logged in events) >= steps:
            return events
        if over:
            return None
        time.sleep(POLL_S)


def end(process: subprocess.Popen[bytes]) -> None:
    """The first signal asks a run to save and end, the second ends it at once."""
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


def outcome_of(placement: Placement, events: list[LoggedEvent], started: float, ended: float) -> Outcome:
    begun = next(logged.time_s for logged in events if isinstance(logged.event, RunStarted) and logged.rank == 0)
    gates_s = sum(logged.event.seconds for logged in events if isinstance(logged.event, Preflight) and logged.rank == 0)
    done = [(logged.time_s, logged.event.report) for logged in events if isinstance(logged.event, Step)]
    (first_s, first), steady = done[0], [report for _, report in done[WARM_STEPS:]]
    last_s = done[-1][0]
    wall_s = {
        "start": begun - started - gates_s,
        "preflight": gates_s,
        "warm-up": first_s - first.seconds - begun,
        "steps": last_s - first_s + first.seconds,
        "end": ended - last_s,
    }
    rate = sum(report.tokens for report in steady) / sum(report.seconds for report in steady)
    waiting = [waiting_share(events, rank, done[WARM_STEPS - 1][0], last_s) for rank in range(placement.ranks)]
    return Outcome(placement.name, rate, len(steady), waiting, wall_s)


def waiting_share(events: list[LoggedEvent], rank: int, from_s: float, to_s: float) -> float:
    laps = [
        logged.event
        for logged in events
        if isinstance(logged.event, Phases) and logged.rank == rank and from_s < logged.time_s <= to_s
    ]
    waited = sum(lap.phases.get(phase, 0.0) for lap in laps for phase in WAITING)
    return waited / max(sum(lap.seconds for lap in laps), 1e-9)


def roles(events: list[LoggedEvent]) -> dict[int, str]:
    return {logged.rank: logged.event.role for logged in events if isinstance(logged.event, Phases)}
