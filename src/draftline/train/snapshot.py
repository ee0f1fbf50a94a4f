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
    names = [name for name, _ in drafter.named_parameters()]
    weights: dict[str, Tensor] = {}
    for key, whole in reduction.gathered(master_tensors(reduction)):
        if keep:
            weights[names[int(key.split(".")[0])]] = host_copy(whole)
    moments: dict[str, Tensor] = {}
    for key, whole in reduction.gathered(optimizer.state_tensors()):
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
    whole = {f"{number}.master": weights[name] for number, (name, _) in enumerate(drafter.named_parameters())}
    masters = master_tensors(reduction)
    for key, part in reduction.parts(whole).items():
        masters[key].copy_(part)
    reduction.renew()
    optimizer.load_state_tensors(reduction.parts(checkpoint.optimizer_tensors()), checkpoint.step)


def master_tensors(reduction: Reduction) -> dict[str, Tensor]:
    """The masters by "number.master"; writing into them changes the masters."""
    return {f"{number}.master": p.detach() for number, p in enumerate(reduction.masters.parameters())}


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
