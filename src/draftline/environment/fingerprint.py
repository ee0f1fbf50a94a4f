"""The fingerprint: everything outside the recipe that can make two runs differ, as text that goes into records."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pynvml
import torch

import draftline
from draftline.environment import variables
from draftline.environment.switches import changed_switches

ABSENT = "none"


def fingerprint() -> dict[str, str]:
    """Name -> value; every name is always present, and what this machine lacks is "none".

    Starts CUDA where there is a GPU (to ask for its name), so call it after the process has chosen its device.
    """
    return {
        "draftline": draftline.__version__,
        "commit": commit(Path(draftline.__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "os": platform.platform(),
        **compiler_stack(),
        "transformers": version_of("transformers"),
        "cpu": cpu(),
        "variables": listed(variables.relevant()),
        "switches": listed(changed_switches()),
    }


def listed(values: Mapping[str, object]) -> str:
    """One text that `monitor.compare` takes apart again: "NAME=value; NAME=value"."""
    return "; ".join(f"{name}={value}" for name, value in values.items()) or ABSENT


def cpu() -> str:
    """Model, usable cores and torch's threads: "AMD EPYC 7763, 8 cores, 8 threads"."""
    return f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def compiler_stack() -> dict[str, str]:
    """The part of the fingerprint that decides whether a compiled kernel may be used again."""
    return {
        "torch": f"{torch.__version__} ({torch.version.git_version})",
        "cuda": torch.version.cuda or ABSENT,
        "driver": driver(),
        "gpus": gpus(),
        "triton": version_of("triton"),
    }


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def driver() -> str:
    """Version of the NVIDIA driver; "none" where NVML finds neither library nor driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ABSENT
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def gpus() -> str:
    """Names of the GPUs this process can use, such as "NVIDIA H200 x2"; "none" without one."""
    if not torch.cuda.is_available():
        return ABSENT
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{name} x{names.count(name)}" for name in sorted(set(names)))


def commit(root: Path) -> str:
    """Commit of the checkout at `root`, with " (modified)" where tracked files differ; "none" outside a checkout."""
    if not (root / ".git").exists():
        return ABSENT
    head = git(root, "rev-parse", "HEAD")
    if head is None:
        return ABSENT
    return f"{head} (modified)" if git(root, "status", "--porcelain", "--untracked-files=no") else head


def git(root: Path, *words: str) -> str | None:
    """Output of a git command in `root`; None where git is missing or refuses (an empty or a foreign repository)."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
