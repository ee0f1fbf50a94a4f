"""Warm-up: everything that a run will compile is compiled before its first step, and changes nothing in it."""

from __future__ import annotations

import time

import torch

from draftline.drafter.step import DrafterStep
from draftline.environment.compile_guard import CompileGuard
from draftline.records import FeatureBatch, PackedBatch


def warm_up(step: DrafterStep, batches: list[PackedBatch], dtype: torch.dtype, guard: CompileGuard) -> float:
    """Forward and backward of one batch of every shape, on random features of `dtype`; returns the seconds it took.
    Every kernel of the step is compiled then, or loaded from the compile cache.

    The features come from a generator of their own and the gradients are thrown away, so the run that follows is bit
    for bit the run without a warm-up, and a rank that holds no target can warm up too.
    """
    started = time.perf_counter()
    guard.refuse_other_thread()
    for packed in batches:
        compile_kernels(step, packed, dtype)
        step.forward_backward(random_features(step, packed, dtype))
    step.drafter.zero_grad(set_to_none=True)
    synchronize(step.head.weight.device)
    return time.perf_counter() - started


def compile_kernels(step: DrafterStep, packed: PackedBatch, dtype: torch.dtype) -> None:
    """Compile the CUDA step's kernels for batches of this shape, all at once, by a forward and backward that launches
    none: compiled one after the other, where a step first needs them, they take longer. A CPU's step has none."""
    if step.fused is None:
        return
    from draftline.kernels.launch import compiling_together  # needs Triton, which only CUDA builds of torch bring

    with compiling_together():
        step.forward_backward(random_features(step, packed, dtype))
    step.drafter.zero_grad(set_to_none=True)


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on a GPU, so that a clock read afterwards tells its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_features(step: DrafterStep, packed: PackedBatch, dtype: torch.dtype) -> FeatureBatch:
    """Features of the right shape: normal numbers, for zeros would be multiplied faster than real ones."""
    spec, device = step.drafter.spec, step.head.weight.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(*packed.ids.shape, width, generator=generator, device=device, dtype=dtype)

    taps = normal(len(spec.target_layer_ids) * spec.hidden_size)
    return FeatureBatch(packed, taps, normal(spec.hidden_size) if step.loss.needs_final else None)


def shapes_of(batch: FeatureBatch) -> str:
    """ "ids [4, 512], taps [4, 512, 960] float32"."""
    dtype = str(batch.taps.dtype).removeprefix("torch.")
    return f"ids {list(batch.packed.ids.shape)}, taps {list(batch.taps.shape)} {dtype}"
