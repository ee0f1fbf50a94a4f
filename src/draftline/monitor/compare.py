"""`draftline compare`: what differs between two runs, the most likely cause of a difference in rate first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from draftline.environment.variables import HARMLESS_ENDINGS
from draftline.errors import InputError
from draftline.monitor.events import Alarm, Derived, Evaluation, Event, RunStarted, Step, read_events
from draftline.monitor.notices import Notices
from draftline.records import StepReport

ALIKE = 0.05  # rates within 5% of each other are called alike
RECENT_STEPS = 50  # that loss and proxy tau are averaged over
NOTHING = "none"
# What most often changes a rate stands first; a name that is not listed comes last.
ENVIRONMENT_ORDER = (
    "torch", "switches", "cuda", "triton", "driver", "gpus", "cpu", "transformers", "python", "os", "variables",
)  # fmt: skip
CODE = ("draftline", "commit")
RECIPE_ORDER = ("placement", "drafter", "target", "data", "train", "loss", "optim", "eval", "export")
DATA_KEYS = ("data.train", "data.template_kwargs", "data.max_unusable_share")
UNTELLING_KEYS = ("train.out",)
KINDS = ("environment", "overrides", "recipe", "code", "data")


@dataclass(frozen=True)
class Difference:
    kind: str  # one of KINDS
    name: str
    before: str
    after: str

    @property
    def change(self) -> str:
        """ "2.11.0+cu128 -> +cu130": the part of a version that both share is said once."""
        shared = self.before.partition("+")[0]
        after = self.after.removeprefix(shared) if "+" in self.before and "+" in self.after else self.after
        return f"{self.before} -> {after}"


@dataclass(frozen=True)
class RunRecord:
    """What a run's events say about it: its last attempt that took steps, and the evaluations of all."""

    name: str
    started: RunStarted
    derived: dict[str, Any]
    steps: tuple[StepReport, ...]
    tau: dict[str, float]  # benchmark -> tau of its last evaluation
    alarms: Counter[str]
    attempts: tuple[RunStarted, ...]

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the steps; the first one, which compiles and warms up, is left out where there are more."""
        rates = [step.tokens / step.seconds for step in self.steps if step.seconds > 0]
        return median(rates[1:] or rates) if rates else None

    def recent(self, name: str) -> float | None:
        values = [getattr(step, name) for step in self.steps[-RECENT_STEPS:]]
        return sum(values) / len(values) if values else None


def read_run(folder: Path) -> RunRecord:
    """Raises InputError where the folder holds no events, or none of a run that started."""
    path = folder if folder.is_file() else folder / "events.jsonl"
    events = [logged.event for logged in read_events(path).events if logged.rank == 0]
    attempts = split_attempts(events)
    if not attempts:
        raise InputError(f"{path}: no run has started in it", "give a run folder: what a recipe's train.out names")
    told = next((events for events in reversed(attempts) if any(isinstance(e, Step) for e in events)), attempts[-1])
    started = told[0]
    assert isinstance(started, RunStarted)
    return RunRecord(
        name=str(folder),
        started=started,
        derived=next((event.values for event in told if isinstance(event, Derived)), {}),
        steps=tuple(event.report for event in told if isinstance(event, Step)),
        tau={event.report.benchmark: event.report.tau for event in events if isinstance(event, Evaluation)},
        alarms=Counter(event.name for event in events if isinstance(event, Alarm)),
        attempts=tuple(event for event in events if isinstance(event, RunStarted)),
    )


def split_attempts(events: list[Event]) -> list[list[Event]]:
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    return [events[begin:end] for begin, end in pairwise([*starts, len(events)])]


def differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Everything that differs, the likeliest cause of a difference in rate first: environment, overrides, recipe, code,
    data."""
    found = [*between(a.started, b.started), *data_differences(a.derived, b.derived)]
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))


def between(a: RunStarted, b: RunStarted) -> Iterator[Difference]:
    """What two starts differ in: each kind in its own order."""
    yield from fingerprint_differences(a, b)
    yield from overrides_differences(a.recipe, b.recipe)
    before, after = flat(a.recipe), flat(b.recipe)
    for key in sorted(before.keys() | after.keys(), key=recipe_rank):
        one, other = before.get(key, NOTHING), after.get(key, NOTHING)
        if one != other and key not in UNTELLING_KEYS:
            yield Difference("data" if key in DATA_KEYS else "recipe", key, one, other)


def fingerprint_differences(a: RunStarted, b: RunStarted) -> Iterator[Difference]:
    names = sorted(a.fingerprint.keys() | b.fingerprint.keys(), key=environment_rank)
    for name in names:
        before, after = a.fingerprint.get(name, NOTHING), b.fingerprint.get(name, NOTHING)
        if before == after:
            continue
        if name in ("switches", "variables"):
            declared = set(declared_values(a.recipe)) | set(declared_values(b.recipe))
            yield from listed_differences(name, before, after, declared)
        else:
            yield Difference("code" if name in CODE else "environment", name, *without_common_hash(before, after))


def listed_differences(name: str, before: str, after: str, declared: set[str]) -> Iterator[Difference]:
    """Of two "NAME=value; NAME=value" texts; what a recipe declares is listed among the overrides."""
    one, other = (dict(entry.split("=", 1) for entry in text.split("; ") if "=" in entry) for text in (before, after))
    singular = {"switches": "switch", "variables": "variable"}[name]
    for key in sorted(one.keys() | other.keys(), key=lambda key: (key.endswith(HARMLESS_ENDINGS), key)):
        if one.get(key) != other.get(key) and key not in declared:
            yield Difference("environment", f"{singular} {key}", one.get(key, "unset"), other.get(key, "unset"))


def overrides_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    before, after = declared_values(a), declared_values(b)
    for switch in sorted(before.keys() | after.keys()):
        one, other = before.get(switch, "not declared"), after.get(switch, "not declared")
        if one != other:
            yield Difference("overrides", switch, one, other)


def declared_values(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {entry["switch"]: str(entry["value"]) for entry in recipe.get("overrides", [])}


def data_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Of what the target and the files turned out to be: their hashes."""
    for name, text in (("data", "content of the packed rows"), ("weights", "the target's weights")):
        before, after = str(a.get(name, NOTHING)), str(b.get(name, NOTHING))
        if before != after:
            yield Difference("data", text, before, after)


def without_common_hash(before: str, after: str) -> tuple[str, str]:
    """torch's text is "version (commit of torch)"; the commits say nothing where the versions differ already."""
    one, other = before.partition(" ("), after.partition(" (")
    return (one[0], other[0]) if one[0] != other[0] and one[1] and other[1] else (before, after)


def flat(recipe: Mapping[str, Any]) -> dict[str, str]:
    """section.key -> value as text; the overrides have a comparison of their own."""
    return {
        f"{section}.{key}": str(value)
        for section, values in recipe.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }


def environment_rank(name: str) -> tuple[int, str]:
    order = ENVIRONMENT_ORDER.index(name) if name in ENVIRONMENT_ORDER else len(ENVIRONMENT_ORDER)
    return order, name


def recipe_rank(key: str) -> tuple[int, str]:
    section = key.partition(".")[0]
    return (RECIPE_ORDER.index(section) if section in RECIPE_ORDER else len(RECIPE_ORDER)), key


def compare(one: Path, other: Path, notices: Notices) -> None:
    """Print both runs' figures side by side, then what differs."""
    a, b = read_run(one), read_run(other)
    found = differences(a, b)
    notices.say(headline(a, b, found))
    notices.section("side by side")
    notices.facts({"A": a.name, "B": b.name})
    notices.table(["", "A", "B", "B / A"], figures(a, b))
    notices.section("what differs, from A to B; the likeliest cause of another rate first")
    notices.facts(
        {f"{d.kind:<11} {d.name}": d.change for d in found} or {"nothing": "same environment, recipe and data"}
    )
    for name, run in (("A", a), ("B", b)):
        changed = [difference for before, after in pairwise(run.attempts) for difference in between(before, after)]
        if changed:
            notices.section(f"what changed inside {name}, between its {len(run.attempts)} attempts")
            notices.facts(changes(changed))


def changes(found: list[Difference]) -> dict[str, str]:
    return {f"{difference.kind:<11} {difference.name}": difference.change for difference in found}


def headline(a: RunRecord, b: RunRecord, found: list[Difference]) -> str:
    """One sentence: how the rates differ, and the likeliest cause."""
    if not a.tokens_per_s or not b.tokens_per_s:
        return "one of the runs took no step: there is no rate to compare"
    ratio = b.tokens_per_s / a.tokens_per_s
    if abs(ratio - 1) <= ALIKE:
        return f"the rates are alike: B runs at {ratio:.0%} of A's"
    cause = f"{found[0].name} {found[0].change}" if found else "not in what was recorded: same environment and recipe"
    return f"B runs at {ratio:.0%} of A's rate; the likeliest cause: {cause}"


def figures(a: RunRecord, b: RunRecord) -> list[list[str]]:
    benchmarks = sorted(a.tau.keys() | b.tau.keys())
    rows = [
        row("tokens/s", a.tokens_per_s, b.tokens_per_s, ",.0f"),
        row("loss", a.recent("loss"), b.recent("loss"), ".4f"),
        row("proxy tau", a.recent("proxy_tau"), b.recent("proxy_tau"), ".3f"),
        *(row(f"tau ({name})", a.tau.get(name), b.tau.get(name), ".3f") for name in benchmarks),
        row("steps of this attempt", len(a.steps), len(b.steps), ",.0f"),
    ]
    names = sorted(a.alarms.keys() | b.alarms.keys())
    return rows + [[f"alarms: {name}", str(a.alarms[name]), str(b.alarms[name]), ""] for name in names]


def row(name: str, a: float | None, b: float | None, form: str) -> list[str]:
    cells = ["none" if value is None else format(value, form) for value in (a, b)]
    ratio = f"{b / a:.2f}" if a and b else ""
    return [name, *cells, ratio]
