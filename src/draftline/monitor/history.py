"""What each recipe has reached on this machine: a small file of finished runs under the cache home."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

KEPT_RUNS = 500
KEPT_PER_KEY = 20
NO_INFLUENCE = {  # sections and keys of a recipe that do not alter its rate
    "train": {
        "out", "seed", "epochs", "max_steps", "checkpoint_every", "keep_checkpoints", "log_every", "on_alarm",
        "max_skipped_steps",
    },
    "data": {"train", "max_unusable_share"},
    "optim": {"lr", "betas", "weight_decay", "warmup_share", "clip_norm"},
}  # fmt: skip
# `overrides` alter a rate, and that is what a run is to be held against: its best without them, or with others.
OTHER_SECTIONS = ("eval", "export", "monitor", "overrides")


@dataclass(frozen=True, slots=True)
class PastRun:
    key: str  # of recipe, kind of device and number of ranks
    time_s: float
    tokens_per_s: float
    run: str
    fingerprint: dict[str, str]


@dataclass(frozen=True, slots=True)
class KnownGood:
    """The best that a recipe has reached on this kind of device, and the environments of then and of now."""

    tokens_per_s: float
    run: str
    fingerprint: dict[str, str]
    now: dict[str, str]


def key_of(recipe: Mapping[str, Any], device_kind: str, ranks: int) -> str:
    """Of what decides a run's rate. Two recipes that differ in names, seeds or lengths only share their history."""
    kept = {
        name: {key: value for key, value in section.items() if key not in NO_INFLUENCE.get(name, ())}
        for name, section in recipe.items()
        if name not in OTHER_SECTIONS
    }
    text = json.dumps([kept, device_kind, ranks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def device_kind(fingerprint: Mapping[str, str], on_gpu: bool) -> str:
    """The GPUs' names, or the CPU's kind and number of cores."""
    return fingerprint["gpus"] if on_gpu else f"cpu, {os.cpu_count()} cores"


def history_path(cache_home: Path) -> Path:
    return cache_home / "draftline" / "history.jsonl"


def record_run(path: Path, run: PastRun) -> None:
    """Add a finished run. The file is replaced whole under a lock, so that no reader or second writer sees half of it;
    the newest of a key are kept, and its best."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = bounded([*read_history(path), run])
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in kept), encoding="utf-8")
        os.replace(partial, path)


def bounded(runs: list[PastRun]) -> list[PastRun]:
    kept: list[PastRun] = []
    for key in dict.fromkeys(run.key for run in runs):
        own = [run for run in runs if run.key == key]
        best = max(own, key=lambda run: run.tokens_per_s)
        newest = own[-KEPT_PER_KEY:]
        kept += newest if best in newest else [best, *newest[1:]]
    return sorted(kept, key=lambda run: run.time_s)[-KEPT_RUNS:]


def read_history(path: Path) -> list[PastRun]:
    """Oldest first; empty where there is none. A line that another version wrote is left out: it is only a memory."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    adapter, runs = TypeAdapter(PastRun), []
    for line in lines:
        try:
            runs.append(adapter.validate_json(line))
        except ValidationError:
            continue
    return runs


def known_good(path: Path, key: str, now: dict[str, str]) -> KnownGood | None:
    """The fastest run of `key`, beside the present environment `now`."""
    runs = [run for run in read_history(path) if run.key == key]
    if not runs:
        return None
    best = max(runs, key=lambda run: run.tokens_per_s)
    return KnownGood(best.tokens_per_s, best.run, best.fingerprint, now)


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What of the environment has changed, such as "torch 2.11.0+cu130 -> 2.11.0+cu128"; empty where nothing has."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {short(before.get(name))} -> {short(now.get(name))}" for name in names)


def short(value: str | None) -> str:
    """A commit by its first ten digits."""
    return "unknown" if value is None else re.sub(r"\b([0-9a-f]{10})[0-9a-f]{10,}\b", r"\1", value)


def past_run(key: str, tokens_per_s: float, run: str, fingerprint: dict[str, str]) -> PastRun:
    return PastRun(key, time.time(), tokens_per_s, run, fingerprint)
