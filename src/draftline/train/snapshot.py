"""A step's state copied to the host, whole whatever the ranks hold of it, and written while training goes on."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.drafter.model import Drafter
from draftline.monitor.events import CheckpointWritten
from draftline.train.checkpoint import Checkpoint, write_checkpoint
from draftline.train.optimizer import Optimizer
from draftline.train.reduction import Reduction


@dataclass(frozen=True)
class Snapshot:
    drafter: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@torch.no_grad()
def take_snapshot(drafter: Drafter, optimizer: Optimizer, reduction: Reduction, keep: bool) -> Snapshot:
    """Copies in host memory. Collective over drafter ranks that hold shards; `keep` is false on all but the writer."""
    weights: dict[str, Tensor] = {}
    for index, (name, parameter) in enumerate(drafter.named_parameters()):
        whole = reduction.whole(index, parameter.detach())
        if keep:
            weights[name] = host_copy(whole)
    moments: dict[str, Tensor] = {}
    for key, part in optimizer.state_tensors().items():
        whole = reduction.whole(int(key.split(".")[0]), part)
        if keep:
            moments[key] = host_copy(whole)
    return Snapshot(weights, moments)


def host_copy(tensor: Tensor) -> Tensor:
    """Never a view: the next step changes what was copied."""
    return tensor.detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def restore_snapshot(checkpoint: Checkpoint, drafter: Drafter, optimizer: Optimizer, reduction: Reduction) -> None:
    """Every drafter rank reads the checkpoint and keeps its own part. Raises InputError where it is not whole."""
    weights = checkpoint.drafter_tensors()
    for index, ((name, _), master) in enumerate(
        zip(drafter.named_parameters(), reduction.masters.parameters(), strict=True)
    ):
        master.copy_(reduction.part(index, weights[name]))
    moments = checkpoint.optimizer_tensors()
    parts = {key: reduction.part(int(key.split(".")[0]), whole) for key, whole in moments.items()}
    optimizer.load_state_tensors(parts, checkpoint.step)


class CheckpointWriter:
    """Writes one snapshot at a time in a thread of its own; a fault is raised where its result is asked for."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="draftline-checkpoint")
        self.writing: Future[CheckpointWritten] | None = None

    def start(self, snapshot: Snapshot, state: dict[str, Any]) -> None:
        """`finished` must have returned what was started before."""
        assert self.writing is None
        self.writing = self.pool.submit(self.write, snapshot, state)

    def write(self, snapshot: Snapshot, state: dict[str, Any]) -> CheckpointWritten:
        started = time.perf_counter()
        path = write_checkpoint(self.root, snapshot.drafter, snapshot.optimizer, state, self.keep)
        size_bytes = sum(file.stat().st_size for file in path.iterdir())
        return CheckpointWritten(state["step"], str(path), size_bytes, time.perf_counter() - started)

    def finished(self, wait: bool) -> CheckpointWritten | None:
        """What has been written since the last call; with `wait`, also what is being written. RunError if it failed."""
        if self.writing is None or not (wait or self.writing.done()):
            return None
        writing, self.writing = self.writing, None
        return writing.result()
