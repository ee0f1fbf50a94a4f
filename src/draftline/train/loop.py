"""The training loop: periodic work, one step, log, state."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from draftline.drafter.step import MicroStep
from draftline.errors import Interrupted, RunError
from draftline.monitor.events import CheckpointWritten, EventLog, Step
from draftline.monitor.health import Watchman
from draftline.monitor.phases import Lap, PhaseClock
from draftline.monitor.progress import Progress
from draftline.records import StepReport
from draftline.train.checkpoint import Checkpoint, write_checkpoint
from draftline.train.folder import RunFolder
from draftline.train.interruption import Interruption
from draftline.train.job import Job
from draftline.train.monitoring import timed
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.warm_up import shapes_of
from draftline.train.watch import Watch


@dataclass(frozen=True)
class Launched:
    """A step whose work is queued; its numbers are on their way to the host."""

    step: int
    numbers: HostNumbers
    lap: Lap
    tokens: int
    supervised_tokens: int
    documents: int
    lr: float


@dataclass
class Loop:
    """Runs a job from `step` to its end. The cursor is the step alone: every random draw is a function of it."""

    job: Job
    folder: RunFolder
    log: EventLog
    progress: Progress
    watchman: Watchman
    watch: Watch
    alarms: ProcessAlarms
    step: int = 0
    tokens: int = 0
    tokens_this_attempt: int = 0
    last_report: StepReport | None = None
    clock: float = 0.0  # when the last report was made
    saved_step: int | None = None  # of the newest checkpoint, which is never written again

    @property
    def end(self) -> str | None:
        """Why the run has to end: the watch's reason, or a severe verdict where the recipe wants it to stop the run."""
        severe = self.watchman.severe
        if severe is None or self.job.recipe.train.on_alarm != "stop" or self.step == self.job.total_steps:
            return self.watch.ended
        return f"{severe.name}: {severe.evidence}; {severe.remedy}"

    @property
    def phases(self) -> PhaseClock:
        return self.job.step.clock

    def run(self) -> None:
        """Train to the end, or to the first signal or alarm that ends it; the last thing is a checkpoint in any case.

        Raises Interrupted, or RunError with the watch's reason.
        """
        with Interruption() as interruption:
            self.steps(interruption)
            self.checkpoint()
        if interruption.received is not None:
            raise Interrupted(
                interruption.received.name,
                interruption.received,
                f"checkpoint of step {self.step} of {self.job.total_steps} saved: go on with --resume",
            )
        if self.end is not None:
            raise RunError(
                f"stopped at step {self.step} of {self.job.total_steps}: {self.end}",
                "a checkpoint is saved and events.jsonl holds the alarms; mend the cause and start a new run, or go on "
                "with --resume",
            )

    def steps(self, interruption: Interruption) -> None:
        job: Job = self.job
        waiting: Launched | None = None  # settled one step late: a GPU never idles while the host reads its numbers
        self.clock = time.perf_counter()
        self.phases.lap()
        self.phases.step = self.step
        while self.step < job.total_steps and interruption.received is None and self.end is None:
            if self.step and self.step % job.recipe.train.checkpoint_every == 0:
                self.settle(waiting)
                waiting = None
                self.checkpoint()
            launched = self.train_step()
            job.features.prefetch((self.step + 1) * job.micro_batches_per_step)
            self.settle(waiting)
            waiting = launched
            self.step += 1
            if self.watch.is_due(self.step):
                self.settle(waiting)
                waiting = None
                with self.phases.phase("evaluation"):
                    self.watch.look(self.step)
                self.clock = time.perf_counter()  # what the watch took is no step's time
        self.settle(waiting)

    def settle(self, launched: Launched | None) -> None:
        """Wait for a launched step's numbers, then report, log and show them."""
        if launched is None:
            return
        with self.phases.phase("settle"):
            numbers = launched.numbers.result()
        now = time.perf_counter()
        report = self.report(launched, numbers, now - self.clock)
        self.clock = now
        self.alarms.look_at_kernels(f"by step {launched.step}")
        self.log.write(timed(launched.lap, "colocated", launched.tokens))
        if not self.watch.settled(report, launched.documents):
            return
        self.tokens += report.tokens
        self.tokens_this_attempt += report.tokens
        self.last_report = report
        self.log.write(Step(report))
        shown = {"loss": report.loss, "proxy_tau": report.proxy_tau, "grad_norm": report.grad_norm} | self.watch.shown
        self.progress.advance(1, tokens=report.tokens, **shown)

    def train_step(self) -> Launched:
        job, micro, tokens, supervised, documents = self.job, None, 0, 0, 0
        for index in job.micro_batches(self.step):
            batch = job.features.get(index)
            with self.alarms.guard.steady(partial(shapes_of, batch)):
                sums = job.step.forward_backward(batch)
            micro = sums if micro is None else micro + sums
            tokens += batch.packed.tokens
            supervised += int(batch.packed.loss_mask.sum())
            documents += int(((batch.packed.position == 0) & (batch.packed.document >= 0)).sum())
        assert micro is not None
        lr = job.optimizer.lr
        with self.phases.phase("optimizer"):
            norm = job.optimizer.finish(micro.weight_sum)
        lap = self.phases.lap()  # before the numbers: whoever has those can read the lap
        return Launched(self.step, to_host(micro, norm), lap, tokens, supervised, documents, lr)

    def report(self, launched: Launched, numbers: Tensor, seconds: float) -> StepReport:
        """Turn a step's sums into its report."""
        loss_sum, weight_sum, committed, verify_steps, blocks, norm = numbers[:6].tolist()
        correct, count = numbers[6:].chunk(2)
        return StepReport(
            step=launched.step,
            loss=loss_sum / weight_sum if weight_sum else 0.0,
            proxy_tau=committed / verify_steps if verify_steps else 0.0,
            slot_accuracy=tuple((correct / count.clamp(min=1)).tolist()),
            blocks=int(blocks),
            tokens=launched.tokens,
            supervised_tokens=launched.supervised_tokens,
            grad_norm=norm,
            lr=launched.lr,
            seconds=seconds,
        )

    def checkpoint(self) -> None:
        if self.step == self.saved_step:
            return
        self.alarms.look(f"at step {self.step}")
        job, started = self.job, time.perf_counter()
        state = {
            "step": self.step,
            "spec": asdict(job.spec),
            "provenance": asdict(job.provenance),
            "tokens": self.tokens,
            "identity": job.identity,
            "recipe": job.recipe.model_dump(mode="json"),
        }
        with self.phases.phase("checkpoint"):
            path = write_checkpoint(
                self.folder.checkpoints, job.drafter.state_dict(), job.optimizer.state_tensors(), state,
                keep=job.recipe.train.keep_checkpoints,
            )  # fmt: skip
        size_bytes = sum(file.stat().st_size for file in path.iterdir())
        self.saved_step = self.step
        self.log.write(CheckpointWritten(self.step, str(path), size_bytes, time.perf_counter() - started))

    def restore(self, checkpoint: Checkpoint) -> None:
        self.job.drafter.load_state_dict(checkpoint.drafter_tensors())
        self.job.optimizer.load_state_tensors(checkpoint.optimizer_tensors(), checkpoint.step)
        self.step = self.saved_step = checkpoint.step
        self.tokens = checkpoint.state["tokens"]
        self.progress.done = self.step


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


def to_host(micro: MicroStep, norm: Tensor) -> HostNumbers:
    single = (micro.loss_sum, micro.weight_sum, micro.committed, micro.verify_steps, micro.blocks, norm)
    return HostNumbers(
        torch.cat([torch.stack([t.double() for t in single]), micro.slot_correct.double(), micro.slot_count.double()])
    )
