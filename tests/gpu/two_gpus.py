"""Runs of eight steps on two GPUs, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from draftline.monitor.events import Step, read_events
from draftline.records import StepReport
from runs import write_recipe
from source_tree import ROOT


def run(home: Path, name: str, dtype: str, *words: str, hook: str = "") -> subprocess.CompletedProcess[str]:
    """A run in home/name, with overrides `words`; data and target of all runs in `home` are the same.

    hook: Python that every process executes first, where a test breaks one on purpose.
    """
    recipe = write_recipe(home, data={"sequence_length": 128}, target={"dtype": dtype})
    hooks = home / f"hook-{name}"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(hook)
    own = [f"train.out={home / name}", "train.anchors=16", "train.epochs=12"]
    return draftline("train", recipe, *own, *words, first_on_path=str(hooks))


def draftline(*words: object, first_on_path: str = "") -> subprocess.CompletedProcess[str]:
    paths = [first_on_path, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "draftline", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)


def steps_of(home: Path, name: str, dtype: str, *words: str) -> list[StepReport]:
    """Those of a run that must end well."""
    done = run(home, name, dtype, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return logged_steps(home / name)


def logged_steps(out: Path) -> list[StepReport]:
    events = read_events(out / "events.jsonl").events
    return [logged.event.report for logged in events if isinstance(logged.event, Step)]
