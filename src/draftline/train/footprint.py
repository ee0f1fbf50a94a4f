"""What a run will need held against what there is: memory at its peak, and disk."""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch

from draftline.environment.memory import free_memory_bytes
from draftline.errors import InputError
from draftline.train.folder import RunFolder
from draftline.train.job import Job
from draftline.train.step_memory import FP32, Footprint, Sizes, footprint
from draftline.train.trial import kept_bytes

GIB = 2**30
MATRIX_BYTES = 1 << 20  # allocators round up and keep pieces: nothing smaller is worth a word


def predict(job: Job) -> Footprint:
    """On top of what the job holds already: weights, and of several drafter ranks the gradients' buffer."""
    train, plan = job.recipe.train, job.ranks.plan
    hidden, config = job.spec.hidden_size, job.target.parts.config.to_dict()
    sizes = Sizes(
        job.spec, train.rows_per_micro_batch, job.recipe.data.sequence_length, job.step.anchors,
        job.target.dtype.itemsize, job.target.device.type == "cuda", job.step.loss.needs_final,
        int(config.get("intermediate_size") or 4 * hidden), plan.drafters if plan.sharded else 1,
    )  # fmt: skip
    need = footprint(sizes)
    held = 0 if job.ranks.drafters is None else FP32 * sizes.parameters
    return replace(need, gradients=need.gradients - held)


def prove_memory(job: Job) -> str:
    need, free = predict(job), free_memory_bytes(job.target.device)
    parts = ", ".join(
        f"{name} {gib(value)}"
        for name, value in (
            ("gradients and moments", need.gradients + need.moments),
            ("features", need.features),
            ("activations and logits", need.activations + need.logits),
        )
    )
    if free is not None and need.peak > free:
        raise InputError(
            f"expected {gib(need.peak)} of memory beside what is loaded ({parts}), found {gib(free)} free on "
            f"{job.target.device}",
            "lower train.rows_per_micro_batch, train.anchors or data.sequence_length, or target.keep_features_gib",
        )
    left = "free memory unknown" if free is None else f"{gib(free)} free"
    return f"{gib(need.peak)} more at the peak ({parts}), {left}"


def copies_on(job: Job) -> torch.device:
    """Where the trial step keeps what it will take back: on the device, where that fits beside the step's own peak, for
    seconds go into copies of a wide drafter to the host; on the host otherwise."""
    device, kept = job.target.device, kept_bytes(job.drafter, job.optimizer)
    free = free_memory_bytes(device)
    return device if free is None or predict(job).peak + kept <= free else torch.device("cpu")


def disk_bytes(job: Job) -> int:
    """Checkpoints hold masters and two moments, 12 P; one more than are kept exists while it replaces the oldest. The
    export holds P elements of the target's dtype, and in the speculators format its embedding and head; it is written
    beside an earlier one."""
    parameters = sum(p.numel() for p in job.drafter.parameters())
    borrowed = 2 * job.spec.vocab_size * job.spec.hidden_size if job.recipe.export.format == "speculators" else 0
    checkpoint = 3 * FP32 * parameters + MATRIX_BYTES
    export = (parameters + borrowed) * job.target.dtype.itemsize + MATRIX_BYTES
    return checkpoint * (job.recipe.train.keep_checkpoints + 1) + 2 * export


def prove_disk(job: Job, folder: RunFolder) -> str:
    need, free = disk_bytes(job), shutil.disk_usage(folder.root).free
    if need > free:
        raise InputError(
            f"expected {gib(need)} of disk for checkpoints and export, found {gib(free)} free at {folder.root}",
            "free space, name a train.out on another disk, or lower train.keep_checkpoints",
        )
    return f"{gib(need)} for {job.recipe.train.keep_checkpoints} + 1 checkpoints and the export, {gib(free)} free"


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
