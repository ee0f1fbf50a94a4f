"""The device that a process works on."""

from __future__ import annotations

import torch

from draftline.errors import InputError


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Asking for CUDA without one is an InputError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("placement.device is cuda, but torch sees no CUDA device", "use placement.device=cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())
