"""What a process loads is what it needs: a second of start-up here is five from a cold disk.

What reads words and recipes does not load torch, so that --help and a bad recipe are answered at once. A launcher holds
no tensor and a step no target: neither loads transformers, nor torch's compiler, which would bring sympy.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import draftline
from draftline.environment import variables

LIGHT = [
    "draftline.cli", "draftline.config", "draftline.records", "draftline.errors", "draftline.train.plan",
    "draftline.train.prediction",
]  # fmt: skip
COMPILER = ["torch._dynamo", "torch._inductor", "sympy"]
STAGES = ["transformers", "accelerate", "matplotlib", "draftline.train.run"]
HEAVY = ["torch", "transformers", "matplotlib", "safetensors"]
TINY_TARGET = Path(draftline.__file__).parent / "assets" / "tiny_target"


def loaded_by(code: str, names: list[str], *words: str, code_of_exit: int = 0) -> list[str]:
    """Those of `names` that a new process has loaded when `code` has ended, however it ends."""
    told = f"import atexit, sys; atexit.register(lambda: print([n for n in {names} if n in sys.modules]))\n{code}"
    environment = variables.for_child(dict.fromkeys(variables.compiler_switches()))
    done = subprocess.run([sys.executable, "-c", told, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == code_of_exit, done.stderr
    return json.loads(done.stdout.splitlines()[-1].replace("'", '"'))


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}", HEAVY) == []


def test_a_launcher_loads_torch_alone(tmp_path: Path) -> None:
    """A whole launcher, up to the end of its rank, which refuses the data."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {{path: {TINY_TARGET}}}\ndata: {{train: {tmp_path / 'missing.jsonl'}}}\n")
    settings = (f"train.out={tmp_path / 'run'}", "placement.device=cpu", "placement.max_restarts=1")
    words = ("train", str(recipe), *settings)
    found = loaded_by("from draftline.cli import main; main()", ["torch", *COMPILER, *STAGES], *words, code_of_exit=2)
    assert found == ["torch"]
    assert list((tmp_path / "run" / "ranks").rglob("stderr.log")), "no rank was started"


def test_a_step_without_a_target_loads_neither_transformers_nor_a_compiler() -> None:
    """`draftline bench step`, whose time to the first step is a published figure."""
    words = ("bench", "step", "--shape", "tiny", "--json")
    found = loaded_by("from draftline.cli import main; main()", ["torch", *COMPILER, *STAGES], *words)
    assert found == ["torch"]


def test_what_watches_the_compiler_does_not_load_it() -> None:
    """Of a run on a GPU; on a CPU torch loads it when it is told to be deterministic."""
    code = """
import torch
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.fingerprint import fingerprint
from draftline.environment.switches import configure_torch
configure_torch(torch.device("cuda"))
use_compile_cache()
guard = CompileGuard()
with guard.steady(lambda: "no shapes"):
    pass
assert fingerprint()["switches"] == "none", fingerprint()["switches"]
"""
    assert loaded_by(code, COMPILER) == []


def test_a_compiler_that_is_loaded_in_a_step_is_seen() -> None:
    """Nothing had loaded it before, so the guard counted from nothing; and a switch changed then is in the list."""
    code = """
import torch
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.switches import changed_switches
from draftline.errors import RunError
guard = CompileGuard()
assert changed_switches() == {}
try:
    with guard.steady(lambda: "ids [4, 512]"):
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
except RunError as error:
    assert str(error).startswith("a step of ids [4, 512] made torch compile: 1 graphs"), error
else:
    raise AssertionError("not seen")
torch._dynamo.config.recompile_limit = 99
assert changed_switches() == {"torch._dynamo.config.recompile_limit": 99}, changed_switches()
"""
    assert loaded_by(code, COMPILER) == COMPILER
