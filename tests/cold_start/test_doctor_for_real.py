"""`draftline doctor` as a person starts it, and its trials of overrides, with everything compiled for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.environment import variables

pytestmark = pytest.mark.cold
STORAGE_WARNINGS = ("warn disk ", "warn compile cache ", "warn shared memory ")


def doctor(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(variables.COMPILER_PREFIXES)}
    command = [sys.executable, "-m", "draftline", "doctor", *words]
    return subprocess.run(command, env=kept | changes, capture_output=True, text=True, check=False)


def test_doctor_finds_this_machine_fit_and_says_so_in_json() -> None:
    done = doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["fit"] is True and told["environment"]["switches"] == "none"
    names = {check["name"] for check in told["checks"]}
    assert {
        "torch",
        "torch switches",
        "disk",
        "shared memory",
        "matrix rate",
        "flex_attention",
        "compiling at once",
    } <= names
    assert [check for check in told["checks"] if (check["status"] == "ok") == bool(check["remedy"])] == []


def test_a_cpu_machine_that_cannot_compile_is_warned_of_and_still_fit() -> None:
    """No compiler to be found: the same as an image without g++. draftline's CPU step needs none. What this machine's
    disks and shared memory hold is not the question here, and they may be warned of as well."""
    done = doctor(CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    warned = [line[:42] for line in lines if line.startswith(("warn", "fail"))]
    assert [line for line in warned if not line.startswith(STORAGE_WARNINGS)] == [
        "warn flex_attention does not compile here:",
        "warn compiling at once 3 of 3 processes on",
    ]
    assert "InvalidCxxCompiler: No working C++ compiler found" in done.stdout
    assert "install a C++ compiler (g++)" in done.stdout


def test_an_override_that_the_environment_needs_is_told_from_one_that_it_does_not(tmp_path: Path) -> None:
    """This environment disables the compiler, and one of the overrides takes that back; both are past their dates,
    which a trial does not mind."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "target: {path: t}\ndata: {train: a}\nplacement: {device: cpu}\noverrides:\n"
        "  - {switch: torch._dynamo.config.recompile_limit, value: 64, reason: x, until: 2020-01-31}\n"
        "  - {switch: TORCHDYNAMO_DISABLE, value: 0, reason: the image sets it, until: 2020-01-31}\n"
    )
    done = doctor("--overrides", str(recipe), "--json", TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stderr
    limit, disabled = json.loads(done.stdout)["overrides"]
    assert (limit["switch"], limit["expired"], disabled["answer"]) == (
        "torch._dynamo.config.recompile_limit",
        True,
        "needed",
    )
    assert "torch compiled nothing: its compiler is off here" in disabled["found"]
    assert limit["answer"] in ("not needed", "needed")  # by its time, which a busy machine blurs
    assert "ms without it" in limit["found"]
