"""The compile cache: one folder for each compiler stack, so that no kernel is taken over by another one."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from draftline.environment import variables
from draftline.environment.fingerprint import compiler_stack

DIGEST_CHARACTERS = 16


def use_compile_cache() -> Path:
    """Point torch's compiler and Triton, here and in child processes, at this stack's folder; returns it, absolute.

    A folder that the caller's environment names is kept; torch's default, which torch itself puts into the environment
    when parts of its compiler are imported, is not. Call it before the first compilation.
    """
    named = variables.inductor_cache()
    if named is None or is_torchs_default(named):
        named = cache_folder(variables.cache_home(), compiler_stack())
    folder = named.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    variables.set_inductor_cache(folder)
    variables.default_triton_cache(folder / "triton")
    return folder


def is_torchs_default(folder: Path) -> bool:
    """Whether torch would choose it: torchinductor_USER among the temporary files (`default_cache_dir`, which is not
    asked, because its package loads the whole compiler)."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def cache_folder(home: Path, stack: dict[str, str]) -> Path:
    """Folder under `home` named by a hash of `stack` (torch, CUDA, driver, GPUs, Triton), whatever its order."""
    digest = hashlib.sha256(json.dumps(stack, sort_keys=True).encode()).hexdigest()
    return home / "draftline" / "compile" / digest[:DIGEST_CHARACTERS]
