"""The device that a process works on."""

from __future__ import annotations

import torch

from draftline.environment import variables
from draftline.errors import InputError


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
