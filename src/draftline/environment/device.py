"""The device that a process works on."""

from __future__ import annotations

import torch

from draftline.environment import variables
from draftline.errors import InputError

OLDEST_CAPABILITY = (8, 0)  # the first with bf16 products: A100, RTX 30; kernels are compiled for it and later ones


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one: one device a rank, by its number on the host.

    A launcher that shows each rank only its own device makes that cuda:0, and compiled artifacts can be shared.
    Raises InputError where CUDA is asked for without one, or where ranks outnumber devices.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("placement.device is cuda, but torch sees no CUDA device", "use placement.device=cpu or auto")
    count, local = torch.cuda.device_count(), variables.local_rank()
    if count > 1 and local >= count:
        raise InputError(
            f"rank {variables.rank()} is number {local} on its host, which has {count} CUDA devices",
            "start one rank for each device: torchrun --nproc-per-node",
        )
    torch.cuda.set_device(local if count > 1 else 0)
    return torch.device("cuda", torch.cuda.current_device())


def training_device(name: str) -> torch.device:
    """`choose_device`, for what runs the training step: raises InputError for a GPU without kernels too."""
    device = choose_device(name)
    if device.type == "cuda":
        refuse_old_gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return device


def refuse_old_gpu(name: str, capability: tuple[int, int]) -> None:
    """Raises InputError for a GPU that the training step has no kernels for."""
    if capability < OLDEST_CAPABILITY:
        raise InputError(
            f"{name} has compute capability {capability[0]}.{capability[1]}: training on a GPU needs 8.0 or later "
            "(A100, RTX 30)",
            "train on another GPU, or on the CPU with placement.device=cpu",
        )
