"""Environment variables: the only file that reads or sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# What can change a result, a compiled kernel or where work lands. Shown in the fingerprint.
RELEVANT_PREFIXES = ("TORCH", "PYTORCH_", "INDUCTOR_", "TRITON_", "CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_", "ATEN_")
COMPILER_PREFIXES = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_ALLOW_TF32", "INDUCTOR_", "TRITON_")
HARMLESS_ENDINGS = ("_CACHE_DIR", "_COMPILE_THREADS")  # where compiled code lies and how fast it comes
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
OWN_LAUNCH = "draftline-"  # how the names of draftline's own launches begin


def relevant() -> dict[str, str]:
    """Variables that can change what a run computes or where, sorted by name. No other variable is recorded."""
    return with_prefixes(RELEVANT_PREFIXES)


def compiler_switches() -> dict[str, str]:
    """Variables that alter torch's compiler; the harmless ones alter no result and are left out."""
    found = with_prefixes(COMPILER_PREFIXES)
    return {name: value for name, value in found.items() if not name.endswith(HARMLESS_ENDINGS)}


def with_prefixes(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def value_of(name: str) -> str | None:
    """Value of a variable that a recipe's override names; None where it is not set."""
    return os.environ.get(name)


def set_declared(name: str, value: str) -> None:
    """Set a variable that a recipe's override declares, for this process and those it starts."""
    os.environ[name] = value


def rank() -> int:
    """Rank of this process as torchrun says it; 0 in a process that no launcher started."""
    return int(os.environ.get("RANK", "0"))


def launched() -> bool:
    """Whether a launcher (draftline's own, torchrun) started this process as one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restart_count() -> int:
    """How often torchrun has started this world again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def master() -> tuple[str, int]:
    """Host and port of the store where the ranks of a world meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def has_agent_store() -> bool:
    """Whether the launcher keeps that store, so that no rank does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def run_id() -> str | None:
    """Name of this launch where torchrun was given one (--rdzv-id): the same again for ranks that it starts again."""
    value = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if value == "none" else value


def launched_here() -> bool:
    """Whether draftline's own launcher started this rank: it then speaks for the run's end."""
    return (run_id() or "").startswith(OWN_LAUNCH)


def error_file() -> Path | None:
    """Where torch's launcher looks for the reason of this rank's end."""
    value = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(value) if value else None


def visible_gpus() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list; None where it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value.split(",") if value is not None else None


def missing(defaults: Mapping[str, str]) -> dict[str, str]:
    """Those of `defaults` that this process's environment does not set."""
    return {name: value for name, value in defaults.items() if name not in os.environ}


def cache_home() -> Path:
    """Absolute folder for caches: XDG_CACHE_HOME, where it is absolute as its specification demands, else ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def inductor_cache() -> Path | None:
    """Folder of torch's compile cache where one is set."""
    value = os.environ.get(INDUCTOR_CACHE)
    return Path(value) if value else None


def set_inductor_cache(folder: Path) -> None:
    """Make `folder` the compile cache of this process and of those it starts."""
    os.environ[INDUCTOR_CACHE] = str(folder)


def default_triton_cache(folder: Path) -> None:
    """Make `folder` Triton's cache, here and in processes started from here, unless the environment names one."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def vllm_python() -> str | None:
    """Interpreter of an environment that has vLLM, from DRAFTLINE_VLLM_PYTHON."""
    return os.environ.get("DRAFTLINE_VLLM_PYTHON") or None


def for_child(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment for a child, with `changes` made; a change to None removes the variable."""
    environment = {name: value for name, value in os.environ.items() if name not in changes}
    return environment | {name: value for name, value in changes.items() if value is not None}
