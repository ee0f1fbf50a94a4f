"""Where a run's numbers go besides its own event log. None is needed; each is one small class behind one contract.

A sink lives in rank 0, gets every event of every rank and takes from it what `scalars` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from draftline.config import MonitorSection
from draftline.errors import InputError
from draftline.monitor.events import Alarm, CheckpointWritten, Evaluation, LoggedEvent, Phases, Resources, Step
from draftline.monitor.prometheus import PrometheusSink

LIBRARIES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}


class Sink(Protocol):
    def write(self, logged: LoggedEvent) -> None:
        """Take one event. Must be quick: it is called from the training loop and from the threads beside it."""

    def close(self) -> None:
        """Hand over what is still held back. Called once."""


def scalars(logged: LoggedEvent) -> dict[str, float]:
    """The numbers of an event, under names that all sinks share; empty for events that hold none."""
    event = logged.event
    if isinstance(event, Step):
        report = event.report
        slots = {f"slot_accuracy/{slot}": value for slot, value in enumerate(report.slot_accuracy, start=1)}
        return {
            "loss": report.loss, "proxy_tau": report.proxy_tau, "grad_norm": report.grad_norm, "lr": report.lr,
            "tokens_per_s": report.tokens / report.seconds, "step_seconds": report.seconds, **slots,
        }  # fmt: skip
    if isinstance(event, Phases):
        return {f"phase_seconds/{name}": value for name, value in event.phases.items()} | {"graphs": event.graphs}
    if isinstance(event, Resources):
        return resource_scalars(event)
    if isinstance(event, Evaluation):
        return {f"tau/{event.report.benchmark}": event.report.tau}
    if isinstance(event, CheckpointWritten):
        return {"checkpoint_seconds": event.seconds}
    return {"alarms": 1.0} if isinstance(event, Alarm) else {}


def resource_scalars(event: Resources) -> dict[str, float]:
    values: dict[str, float] = {"busy_share": event.busy_share, "rss_bytes": event.rss_bytes}
    if event.gpu is not None:
        values |= {
            "gpu_utilisation": event.gpu.utilisation, "gpu_memory_bytes": event.gpu.memory_used_bytes,
            "gpu_power_w": event.gpu.power_w, "gpu_clock_mhz": event.gpu.clock_mhz,
        }  # fmt: skip
    return values


def ranked(logged: LoggedEvent) -> dict[str, float]:
    """The scalars, named by rank for every rank but 0: "rank3/phase_seconds/get"."""
    prefix = f"rank{logged.rank}/" if logged.rank else ""
    return {f"{prefix}{name}": value for name, value in scalars(logged).items()}


class LastStep:
    """The optimizer step that an event belongs to: its own, else the newest one seen."""

    def __init__(self) -> None:
        self.number = 0

    def of(self, logged: LoggedEvent) -> int:
        if isinstance(logged.event, Step):
            self.number = logged.event.report.step
        return self.number


class TensorBoardSink:
    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), flush_secs=10)
        self._last = LastStep()

    def write(self, logged: LoggedEvent) -> None:
        step = self._last.of(logged)
        for name, value in ranked(logged).items():
            self._writer.add_scalar(name, value, step, walltime=logged.time_s)

    def close(self) -> None:
        self._writer.close()


class TrackerSink:
    """wandb and trackio: both take `log(values, step)` on what `init` gives."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._last = LastStep()

    def write(self, logged: LoggedEvent) -> None:
        step, values = self._last.of(logged), ranked(logged)
        if values:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def open_wandb(project: str, run: Path, recipe: dict[str, Any]) -> TrackerSink:
    import wandb

    return TrackerSink(wandb.init(project=project, name=run.name, dir=str(run), config=recipe))


def open_trackio(project: str, run: Path, recipe: dict[str, Any]) -> TrackerSink:
    import trackio

    return TrackerSink(trackio.init(project=project, name=run.name, config=recipe))


class Sinks:
    """All of a recipe's sinks as one listener of an EventLog; closed in turn at the end, whatever one of them does."""

    def __init__(self, section: MonitorSection, run: Path, recipe: dict[str, Any]) -> None:
        self.section = section
        self.run = run
        self.opened: dict[str, Sink] = {}
        for name in section.sinks:
            if name == "tensorboard":
                self.opened[name] = TensorBoardSink(run)
            elif name == "prometheus":
                self.opened[name] = PrometheusSink(section.prometheus_port, scalars)
            else:
                opener = open_wandb if name == "wandb" else open_trackio
                self.opened[name] = opener(section.project, run, recipe)

    def __call__(self, logged: LoggedEvent) -> None:
        for sink in self.opened.values():
            sink.write(logged)

    def places(self) -> dict[str, str]:
        """Where each can be looked at, as facts for a person."""
        known = {"tensorboard": f"tensorboard --logdir {self.run / 'tensorboard'}"}
        other = f"project {self.section.project}"
        return {
            name: sink.url if isinstance(sink, PrometheusSink) else known.get(name, other)
            for name, sink in self.opened.items()
        }

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self.opened.values():
                stack.callback(sink.close)


def require(names: Sequence[str]) -> None:
    """Raises InputError for a sink whose library is not installed; called before the target is loaded."""
    for name in names:
        if name in LIBRARIES and find_spec(LIBRARIES[name]) is None:
            raise InputError(
                f"monitor.sinks: {name} is not installed here", f"pip install 'draftline[{name}]', or take it out"
            )
