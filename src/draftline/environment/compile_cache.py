"""The compile cache: one folder for each compiler stack, so that no kernel is taken over by another one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from draftline.environment import variables
from draftline.environment.fingerprint import compiler_stack

DIGEST_CHARACTERS = 16


def use_compile_cache() -> Path:
    """Point torch's compiler, here and in child processes, at this stack's folder; returns it, absolute.

    A folder that the caller's environment already names is kept. Call it before the first compilation.
    """
    folder = variables.inductor_cache() or cache_folder(variables.cache_home(), compiler_stack())
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    variables.set_inductor_cache(folder)
    return folder


def cache_folder(home: Path, stack: dict[str, str]) -> Path:
    """Folder under `home` named by a hash of `stack` (torch, CUDA, driver, GPUs, Triton), whatever its order."""
    digest = hashlib.sha256(json.dumps(stack, sort_keys=True).encode()).hexdigest()
    return home / "draftline" / "compile" / digest[:DIGEST_CHARACTERS]
