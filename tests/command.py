"""The command line inside the test's own process: as in a subprocess, without the seconds that torch takes to load."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from draftline.cli import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def draftline_here(*words: str | Path) -> Done:
    """Run a verb through `main`. Any exception but SystemExit is a traceback in a real process: it fails the test."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["draftline", *map(str, words)])
        for name, value in os.environ.items():
            patch.setenv(name, value)  # so that what the verb sets is taken back
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            torch.use_deterministic_algorithms(False)
    return Done(code, out.getvalue(), err.getvalue())
