"""Triton's compiler for a GPU that need not be there, and what the compiled kernels take of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from draftline.kernels import launch

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class AbsentGpu:
    """What Triton's compiler asks of a driver. Devices are numbered by their capability: kernels are kept by device."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@dataclass(frozen=True)
class Taken:
    """What a kernel takes: bytes of shared memory a program, and of stack a thread where registers did not suffice."""

    name: str
    shared_bytes: int
    stack_bytes: int


def compiled_for(capability: int, call: Callable[[], Any]) -> list[Taken]:
    """The kernels that `call` launches, compiled for compute capability 8.9 (89) and so on, and not run."""
    before = driver.active if torch.cuda.is_available() else None
    driver.set_active(AbsentGpu(capability))
    kernels: list[Any] = []
    token = launch.compiled.set(kernels)
    try:
        call()
    finally:
        launch.compiled.reset(token)
        if before is not None:
            driver.set_active(before)
    return [Taken(kernel.metadata.name, kernel.metadata.shared, stack_bytes(kernel.asm["cubin"])) for kernel in kernels]


def stack_bytes(cubin: bytes) -> int:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", told.stdout)
    return int(stack)
