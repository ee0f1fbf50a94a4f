"""What reads words and recipes does not load torch: an answer to --help or to a bad recipe comes at once."""

import importlib.util
import subprocess
import sys

import pytest

LIGHT = [
    "draftline.cli", "draftline.config", "draftline.records", "draftline.errors", "draftline.train.plan",
    "draftline.train.prediction",
]  # fmt: skip
HEAVY = ["torch", "transformers", "matplotlib", "safetensors"]


@pytest.mark.parametrize("module", [name for name in LIGHT if importlib.util.find_spec(name) is not None])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
