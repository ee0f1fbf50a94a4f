"""The training loop: periodic work, one step, log, state."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from draftline.drafter.anchors import to_device
from draftline.drafter.step import MicroStep
from draftline.errors import Interrupted, RunError
from draftline.monitor.events import EventLog, Step
from draftline.monitor.progress import Progress
from draftline.records import StepReport
from draftline.train.checkpoint import Checkpoint
from draftline.train.folder import RunFolder
from draftline.train.interruption import Interruption
from draftline.train.job import Job
from draftline.train.memory import memory_told
from draftline.train.snapshot import CheckpointWriter, restore_snapshot, take_snapshot


@dataclass(frozen=True)
class Launched:
    """A step whose work is queued; its numbers are on their way to the host."""

    step: int
    numbers: HostNumbers
    lr: float


@dataclass
class Loop:
    """Runs a job from `step` to its end. The cursor is the step alone: every random draw is a function of it.

    With several drafter ranks each runs this loop over its own micro-batches; sums are the whole step's on every rank,
    a signal to any of them included, so that all leave at the same step.
    """

    job: Job
    folder: RunFolder
    log: EventLog
    progress: Progress
    step: int = 0
    tokens: int = 0
    tokens_this_attempt: int = 0
    last_report: StepReport | None = None
    clock: float = 0.0  # when the last report was made
    saved_step: int | None = None  # of the newest checkpoint, which is never written again
    stopping: bool = False  # some rank was asked to end
    interruption: Interruption = field(default_factory=Interruption)

    def __post_init__(self) -> None:
        self.writer = CheckpointWriter(self.folder.checkpoints, self.job.recipe.train.keep_checkpoints)

    def run(self) -> None:
        """Train to the end, or to the first signal; either way the last thing is a checkpoint. Raises Interrupted."""
        with self.interruption:
            self.steps()
            self.job.features.close()
            with self.job.ranks.heart.phase("last checkpoint"):
                self.checkpoint()
                self.note_checkpoint(wait=True)
        if self.stopping:
            received = self.interruption.received or signal.SIGTERM  # another rank's
            raise Interrupted(
                received.name,
                received,
                f"checkpoint of step {self.step} of {self.job.total_steps} saved: go on with --resume",
            )

    def steps(self) -> None:
        job: Job = self.job
        waiting: Launched | None = None  # settled one step late: a GPU never idles while the host reads its numbers
        self.clock = time.perf_counter()
        while self.step < job.total_steps and not self.stopping:
            if self.step and self.step % job.recipe.train.checkpoint_every == 0:
                self.settle(waiting)
                waiting = None
                self.checkpoint()
            launched = self.train_step()
            self.prefetch(self.step + 1)
            self.settle(waiting)
            waiting = launched
            self.step += 1
            self.note_checkpoint(wait=False)
            if job.ranks.drafters is None:
                self.stopping = self.interruption.received is not None
        self.settle(waiting)

    def prefetch(self, step: int) -> None:
        following = self.job.own_micro_batches(step)
        if following:
            ahead = self.job.ranks.heart.phase("features", f"of micro-batch {following[0]}, ahead")
            with ahead, memory_told("capture", self.job.setting):
                self.job.features.prefetch(following[0])

    def settle(self, launched: Launched | None) -> None:
        """Wait for a launched step's numbers, then report, log and show them."""
        if launched is None:
            return
        # with other drafters' sums in it, one of whom may be copying a checkpoint
        patience = 1.0 if self.job.ranks.drafters is None else 3.0
        with self.job.ranks.heart.phase("step", f"{launched.step} on the device", patience):
            numbers = launched.numbers.result()
        now = time.perf_counter()
        report = self.report(launched, numbers, now - self.clock)
        self.clock = now
        self.stopping = self.stopping or bool(numbers[STOP])
        self.tokens += report.tokens
        self.tokens_this_attempt += report.tokens
        self.last_report = report
        self.log.write(Step(report))
        self.progress.advance(
            tokens=report.tokens, loss=report.loss, proxy_tau=report.proxy_tau, grad_norm=report.grad_norm
        )

    def train_step(self) -> Launched:
        job = self.job
        job.reduction.begin()
        own = self.own_sums()
        with job.ranks.heart.phase("optimizer step", str(self.step)):
            stop = job.ranks.drafters is not None and self.interruption.received is not None
            sums = host_sums(own, stop)
            job.ranks.sum_over_drafters(sums)
            job.reduction.reduce()
            weight_sum = own.micro.weight_sum if job.ranks.drafters is None else sums[WEIGHT_SUM].float()
            lr = job.optimizer.lr
            norm = job.optimizer.finish(weight_sum)
        return Launched(self.step, HostNumbers(torch.cat([sums, norm.double()[None]])), lr)

    def own_sums(self) -> OwnSums:
        """This rank's micro-batches of the step: their sums, and their gradients in the drafter."""
        job, heart, device = self.job, self.job.ranks.heart, self.job.target.device
        micro, tokens, supervised = MicroStep.zero(job.spec.block_size - 1, device), 0, 0
        own = job.own_micro_batches(self.step)
        for index in own:
            with heart.phase("features", f"of micro-batch {index}"), memory_told("capture", job.setting):
                batch = job.features.get(index)
            with heart.phase("forward and backward", f"of micro-batch {index}"), memory_told("training", job.setting):
                micro = micro + job.step.forward_backward(batch)
            tokens += batch.packed.tokens
            supervised += int(batch.packed.loss_mask.sum())
        if job.reduction.in_lockstep and len(own) < job.most_micro_batches(self.step):
            job.step.forward_backward(job.empty_batch())
        return OwnSums(micro, tokens, supervised)

    def report(self, launched: Launched, numbers: Tensor, seconds: float) -> StepReport:
        """Turn a step's sums into its report; raises RunError where the loss or the gradient is not finite."""
        loss_sum, weight_sum, committed, verify_steps, blocks, tokens, supervised, _ = numbers[:SINGLE].tolist()
        correct, count = numbers[SINGLE:-1].chunk(2)
        norm = float(numbers[-1])
        if not math.isfinite(norm) or not math.isfinite(loss_sum):
            raise RunError(
                f"step {launched.step}: loss sum {loss_sum} or gradient norm {norm} is not finite; it was not taken",
                f"start a new run with a lower optim.lr, in another train.out (micro-batches "
                f"{launched.step * self.job.micro_batches_per_step} onward hold the rows)",
            )
        return StepReport(
            step=launched.step,
            loss=loss_sum / weight_sum if weight_sum else 0.0,
            proxy_tau=committed / verify_steps if verify_steps else 0.0,
            slot_accuracy=tuple((correct / count.clamp(min=1)).tolist()),
            blocks=int(blocks),
            tokens=int(tokens),
            supervised_tokens=int(supervised),
            grad_norm=norm,
            lr=launched.lr,
            seconds=seconds,
        )

    def checkpoint(self) -> None:
        """Copy the state to the host now; rank 0 writes it while training goes on."""
        if self.step == self.saved_step:
            return
        self.note_checkpoint(wait=True)
        job = self.job
        state = {
            "step": self.step,
            "spec": asdict(job.spec),
            "provenance": asdict(job.provenance),
            "tokens": self.tokens,
            "identity": job.identity,
            "recipe": job.recipe.model_dump(mode="json"),
        }
        with job.ranks.heart.phase("checkpoint", f"of step {self.step} copied"):
            snapshot = take_snapshot(job.drafter, job.optimizer, job.reduction, keep=job.ranks.first)
        self.saved_step = self.step
        if job.ranks.first:
            self.writer.start(snapshot, state)

    def note_checkpoint(self, wait: bool) -> None:
        written = self.writer.finished(wait)
        if written is not None:
            self.log.write(written)

    def restore(self, checkpoint: Checkpoint) -> None:
        restore_snapshot(checkpoint, self.job.drafter, self.job.optimizer, self.job.reduction)
        self.step = self.saved_step = checkpoint.step
        self.tokens = checkpoint.state["tokens"]
        self.progress.done = self.step


@dataclass(frozen=True)
class OwnSums:
    micro: MicroStep
    tokens: int
    supervised_tokens: int


SINGLE = 8  # numbers of a step that are not per slot, in the order of `host_sums`
WEIGHT_SUM, STOP = 1, 7


def host_sums(own: OwnSums, stop: bool) -> Tensor:
    """A step's sums as one float64 vector on their device: [SINGLE], then correct and counted slots [K] each."""
    micro = own.micro
    counted = torch.tensor([own.tokens, own.supervised_tokens, stop], dtype=torch.float64)
    single = (micro.loss_sum, micro.weight_sum, micro.committed, micro.verify_steps, micro.blocks)
    return torch.cat(
        [
            torch.stack([value.double() for value in single]),
            to_device(counted, micro.loss_sum.device),
            micro.slot_correct.double(),
            micro.slot_count.double(),
        ]
    )


class HostNumbers:
    """A step's sums on their way to the host, without stopping what is queued after them."""

    def __init__(self, packed: Tensor) -> None:
        self.done: torch.cuda.Event | None = None
        if packed.is_cuda:
            self.host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record()
        else:
            self.host = packed

    def result(self) -> Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.host
