"""Short-lived processes of this interpreter, several at once, and what became of each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.environment import variables

EXCEPTION = re.compile(r"[\w.]+: \S")  # "RuntimeError: what", which torch follows up with hints


@dataclass(frozen=True)
class Ended:
    """A process that ended, or was ended after its time (`code` None)."""

    code: int | None
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any] | None:
        """The JSON object on its last line of output; None where it failed."""
        lines = self.out.splitlines()
        return dict(json.loads(lines[-1])) if self.code == 0 and lines else None

    @property
    def last_words(self) -> str:
        """Why it failed: the last exception that its standard error names, else the last line, or its signal."""
        if self.code is None:
            return "it did not end in time"
        if self.code < 0:
            return f"it was killed by signal {-self.code}"
        lines = [line for line in self.err.splitlines() if line.strip()]
        named = [line for line in lines if EXCEPTION.match(line)]
        return (named or lines or [f"exit code {self.code}"])[-1].strip()[:300]


def run_together(
    commands: Sequence[Sequence[str]], changes: Sequence[Mapping[str, str | None]], limit_s: float
) -> list[Ended]:
    """Run `python *command` for every command at once, each with its changes to the environment (None removes)."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env=variables.for_child(change),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, change in zip(commands, changes, strict=True)
    ]
    deadline = time.monotonic() + limit_s
    return [collect(process, deadline) for process in started]


def collect(process: subprocess.Popen[str], deadline: float) -> Ended:
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Ended(None, out, err)
    return Ended(process.returncode, out, err)
