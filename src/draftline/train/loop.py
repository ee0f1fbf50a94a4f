"""The training loop: periodic work, one step, log, state."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from draftline.drafter.anchors import to_device
from draftline.drafter.step import MicroStep
from draftline.errors import Interrupted, RunError
from draftline.monitor.events import EventLog, Role, Step
from draftline.monitor.health import Watchman
from draftline.monitor.phases import Lap, PhaseClock
from draftline.monitor.progress import Progress
from draftline.monitor.trace import Trace
from draftline.records import StepReport
from draftline.train.checkpoint import Checkpoint
from draftline.train.folder import RunFolder
from draftline.train.interruption import Interruption
from draftline.train.job import Job
from draftline.train.memory import memory_told
from draftline.train.monitoring import timed
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.snapshot import CheckpointWriter, restore_snapshot, take_snapshot
from draftline.train.warm_up import shapes_of
from draftline.train.watch import Watch


@dataclass(frozen=True)
class Launched:
    """A step whose work is queued; its numbers are on their way to the host."""

    step: int
    numbers: HostNumbers
    lap: Lap
    tokens: int  # this rank's own
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
    watchman: Watchman | None  # rank 0's
    watch: Watch
    alarms: ProcessAlarms
    step: int = 0
    tokens: int = 0
    tokens_this_attempt: int = 0
    last_report: StepReport | None = None
    clock: float = 0.0  # when the last report was made
    saved_step: int | None = None  # of the newest checkpoint, which is never written again
    stopping: bool = False  # some rank was asked to end
    trace: Trace | None = None
    interruption: Interruption = field(default_factory=Interruption)

    def __post_init__(self) -> None:
        self.writer = CheckpointWriter(self.folder.checkpoints, self.job.recipe.train.keep_checkpoints)

    @property
    def end(self) -> str | None:
        """Why the run has to end: the watch's reason, or a severe verdict where the recipe wants it to stop the run."""
        severe = None if self.watchman is None else self.watchman.severe
        if severe is None or self.job.recipe.train.on_alarm != "stop" or self.step == self.job.total_steps:
            return self.watch.ended
        return f"{severe.name}: {severe.evidence}; {severe.remedy}"

    @property
    def phases(self) -> PhaseClock:
        return self.job.step.clock

    def run(self) -> None:
        """Train to the end, or to the first signal or alarm that ends it; the last thing is a checkpoint in any case.

        Raises Interrupted, or RunError with the watch's reason. Every rank comes here after the same step.
        """
        with self.interruption, self.job.ranks.heart.between("training, between two phases"):
            self.steps()
            self.job.features.close()
            with self.job.ranks.heart.phase("last checkpoint"):
                self.checkpoint()
                self.note_checkpoint(wait=True)
            self.job.ranks.leave()
        if self.end is not None:
            raise RunError(
                f"stopped at step {self.step} of {self.job.total_steps}: {self.end}",
                "a checkpoint is saved and events.jsonl holds the alarms; mend the cause and start a new run, or go on "
                "with --resume",
            )
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
        self.phases.lap()
        self.phases.step = self.step
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
            if self.watch.is_due(self.step):
                self.settle(waiting)
                waiting = None
                self.look()
            if job.ranks.drafters is None:
                self.stopping = self.wants_to_stop
        self.settle(waiting)

    def look(self) -> None:
        """The watch's own look at weights and decoding, by rank 0; what it takes is no step's time."""
        if self.job.ranks.first:
            busy = self.job.ranks.heart.phase("watch", f"after step {self.step}")
            with busy, self.phases.phase("evaluation"):
                self.watch.look(self.step)
                self.alarms.look(f"after the decoding at step {self.step}")
        self.clock = time.perf_counter()

    @property
    def wants_to_stop(self) -> bool:
        return self.interruption.received is not None or self.end is not None

    def prefetch(self, step: int) -> None:
        following = self.job.own_micro_batches(step)
        if following:
            ahead = self.job.ranks.heart.phase("features", f"of micro-batch {following[0]}, ahead")
            with ahead, self.getting(following[0]), memory_told("capture", self.job.setting):
                self.job.features.prefetch(following[0])

    def settle(self, launched: Launched | None) -> None:
        """Wait for a launched step's numbers, then report, log and show them."""
        if launched is None:
            return
        on_device = self.job.ranks.heart.phase("settling", f"step {launched.step}")
        with on_device, self.phases.phase("settle"):
            numbers = launched.numbers.result()
        now = time.perf_counter()
        report = self.report(launched, numbers, now - self.clock)
        self.clock = now
        self.stopping = self.stopping or bool(numbers[STOP])
        self.alarms.look_at_kernels(f"by step {launched.step}")
        self.log.write(timed(launched.lap, self.role, launched.tokens))
        if self.trace is not None:
            self.trace.write(launched.lap)
        if not self.watch.settled(report, int(numbers[DOCUMENTS])):
            return
        self.tokens += report.tokens
        self.tokens_this_attempt += report.tokens
        self.last_report = report
        if self.job.ranks.first:  # it is the same on every rank, and readers add up the tokens
            self.log.write(Step(report))
        shown = {"loss": report.loss, "proxy_tau": report.proxy_tau, "grad_norm": report.grad_norm} | self.watch.shown
        self.progress.advance(1, tokens=report.tokens, **shown)

    def train_step(self) -> Launched:
        job = self.job
        job.reduction.begin()
        own = self.own_sums()
        with job.ranks.heart.phase("optimizer step", str(self.step)):
            sums = host_sums(own, job.ranks.drafters is not None and self.wants_to_stop)
            with self.phases.phase("reduce"):
                job.ranks.sum_over_drafters(sums)
                job.reduction.reduce()
            weight_sum = own.micro.weight_sum if job.ranks.drafters is None else sums[WEIGHT_SUM].float()
            lr = job.optimizer.lr
            with self.phases.phase("optimizer"):
                norm = job.optimizer.finish(weight_sum)
                job.reduction.renew()
        lap = self.phases.lap()  # before the numbers: whoever has those can read the lap
        return Launched(self.step, HostNumbers(torch.cat([sums, norm.double()[None]])), lap, own.tokens, lr)

    @property
    def role(self) -> Role:
        return "colocated" if self.job.capture is not None else "drafter"

    def getting(self, index: int) -> AbstractContextManager[None]:
        """The phase of a batch that comes from another rank; one captured here tells its own."""
        return nullcontext() if self.job.capture is not None else self.phases.phase("get", index)

    def own_sums(self) -> OwnSums:
        """This rank's micro-batches of the step: their sums, and their gradients in the drafter."""
        job, heart, device = self.job, self.job.ranks.heart, self.job.target.device
        micro, tokens, supervised, documents = MicroStep.zero(job.spec.block_size - 1, device), 0, 0, 0
        own = job.own_micro_batches(self.step)
        for index in own:
            features = heart.phase("features", f"of micro-batch {index}")
            with features, self.getting(index), memory_told("capture", job.setting):
                batch = job.features.get(index)
            busy = heart.phase("forward and backward", f"of micro-batch {index}")
            steady = self.alarms.guard.steady(partial(shapes_of, batch))
            with busy, memory_told("training", job.setting), steady:
                micro = micro + job.step.forward_backward(batch)
            tokens += batch.packed.tokens
            supervised += int(batch.packed.loss_mask.sum())
            documents += int(((batch.packed.position == 0) & (batch.packed.document >= 0)).sum())
        return OwnSums(micro, tokens, supervised, documents)

    def report(self, launched: Launched, numbers: Tensor, seconds: float) -> StepReport:
        """Turn a step's sums into its report."""
        loss_sum, weight_sum, committed, verify_steps, blocks, tokens, supervised, *_ = numbers[:SINGLE].tolist()
        correct, count = numbers[SINGLE:-1].chunk(2)
        norm = float(numbers[-1])
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
        job = self.job
        self.alarms.look(f"at step {self.step}")
        with job.ranks.heart.phase("checkpoint", "before this one, being written"):
            self.note_checkpoint(wait=True)
        state = {
            "step": self.step,
            "spec": asdict(job.spec),
            "provenance": asdict(job.provenance),
            "tokens": self.tokens,
            "identity": job.identity,
            "recipe": job.recipe.model_dump(mode="json"),
        }
        with job.ranks.heart.phase("snapshot", f"of step {self.step}"), self.phases.phase("checkpoint"):
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
    documents: int


SINGLE = 9  # numbers of a step that are not per slot, in the order of `host_sums`
WEIGHT_SUM, DOCUMENTS, STOP = 1, 7, 8


def host_sums(own: OwnSums, stop: bool) -> Tensor:
    """A step's sums as one float64 vector on their device: [SINGLE], then correct and counted slots [K] each."""
    micro = own.micro
    counted = torch.tensor([own.tokens, own.supervised_tokens, own.documents, stop], dtype=torch.float64)
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
