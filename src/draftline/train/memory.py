"""Out of memory, told so that it can be mended: which shapes, what was predicted, what was found, what to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftline.errors import RunError
from draftline.train.job import Setting
from draftline.train.prediction import GIB, count, memory_bytes, memory_text, read_target_shape

REMEDY = {
    "capture": "lower train.rows_per_micro_batch or data.sequence_length, or spread the target: "
    "placement.tensor_parallel of a split",
    "training": "lower train.rows_per_micro_batch, train.anchors or data.sequence_length, or use placement.kind=split",
}


@contextmanager
def memory_told(stage: str, setting: Setting) -> Iterator[None]:
    """Turn an allocation that failed in `stage` ("capture" or "training") into a RunError."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's allocator raises no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"out of memory in {stage} at {shapes(setting)}: {predicted(setting)}; {found(setting.target.device)}\n"
            f"  {str(error).splitlines()[0]}",
            REMEDY[stage],
        ) from error


def shapes(setting: Setting) -> str:
    train, data = setting.recipe.train, setting.recipe.data
    return (
        f"{train.rows_per_micro_batch} rows of {data.sequence_length} tokens, {train.anchors} anchors a row, "
        f"blocks of {setting.spec.block_size}"
    )


def predicted(setting: Setting) -> str:
    shape = read_target_shape(setting.recipe.target.path)
    if shape is None:
        return "nothing was predicted for a target of the hub"
    counted = count(setting.recipe, shape, setting.target.device.type)
    return f"predicted GiB {memory_text(memory_bytes(setting.ranks.role, setting.ranks.plan, counted))}"


def found(device: torch.device) -> str:
    if device.type != "cuda":
        return "the host has no more"
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    return f"found {peak / GIB:.3g} at its peak, {(total - free) / GIB:.3g} of {total / GIB:.3g} in use on {device}"
