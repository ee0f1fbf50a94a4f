"""What `train.products: fp8` needs of a drafter's sizes and of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftline.errors import InputError
from draftline.records import DrafterSpec

if TYPE_CHECKING:
    import torch

FP8_MULTIPLE = 16  # bytes: how far apart rows of FP8 matrices must begin for the tensor cores to load them
FP8_CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with FP8 tensor cores (Ada; Hopper is 9.0)
REMEDY = "train.products=plain computes in the target's dtype"


def refuse_fp8_sizes(spec: DrafterSpec) -> None:
    """Raises InputError naming the size where the operands of an FP8 product cannot be aligned."""
    sizes = {
        f"hidden_size {spec.hidden_size}": spec.hidden_size,
        f"intermediate_size {spec.intermediate_size}": spec.intermediate_size,
        f"attention_heads {spec.num_attention_heads} of head_dim {spec.head_dim}": spec.num_attention_heads
        * spec.head_dim,
        f"key_value_heads {spec.num_key_value_heads} of head_dim {spec.head_dim}": spec.num_key_value_heads
        * spec.head_dim,
    }
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            raise InputError(
                f"train.products fp8 needs sizes that are multiples of {FP8_MULTIPLE}, and the drafter has {name}"
                + (f" = {size}" if " of " in name else ""),
                REMEDY if name.startswith("hidden") else f"change it, or leave it: {REMEDY}",
            )


def refuse_fp8_device(device: torch.device) -> None:
    """Raises InputError where the device has no FP8 tensor cores."""
    import torch

    found = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= FP8_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} of capability {capability[0]}.{capability[1]}"
    raise InputError(
        f"train.products fp8 needs a GPU of compute capability 8.9 or later; this run is on {found}", REMEDY
    )
