"""A capturing rank of a split: every micro-batch of its target replica, captured and handed on in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftline.channel.routes import FeatureOutbox
from draftline.monitor.events import EventLog
from draftline.monitor.phases import Lap
from draftline.monitor.trace import Trace
from draftline.records import FeatureBatch, PackedBatch
from draftline.train.interruption import Interruption
from draftline.train.job import Setting
from draftline.train.memory import memory_told
from draftline.train.monitoring import timed


@dataclass(frozen=True)
class Handed:
    """A micro-batch on its way: its lap, its tokens, and how many batches were in flight then."""

    lap: Lap
    tokens: int
    in_flight: int


@dataclass
class Feeder:
    """`outbox` is None on the shards of a replica that take part in its forward and send nothing."""

    setting: Setting
    capture: Callable[[PackedBatch], FeatureBatch]
    outbox: FeatureOutbox | None
    log: EventLog | None = None
    before: Handed | None = None
    trace: Trace | None = None

    def hand_on_for_preflight(self) -> None:
        """The first micro-batch of each drafter, before the run: their gates are passed on what the channel brings."""
        plan, heart = self.setting.ranks.plan, self.setting.ranks.heart
        for index in range(plan.drafters):
            if index % plan.targets == self.setting.ranks.role.target:
                phase = heart.phase("capture", f"of micro-batch {index}, for the preflight")
                with phase, memory_told("capture", self.setting):
                    batch = self.capture(self.setting.stream.batch(index))
                self.hand_on(batch)
        if self.outbox is not None:
            self.outbox.flush()  # nothing follows until the drafters have it

    def run(self, first_step: int) -> None:
        """Capture from a step on until the end, or until the drafters want no more. Signals are for them to answer."""
        setting, heart, clock = self.setting, self.setting.ranks.heart, self.setting.clock
        targets, mine = setting.ranks.plan.targets, setting.ranks.role.target
        first = first_step * setting.micro_batches_per_step
        with Interruption(), heart.between("capturing, between two phases"):
            for index in range(first, setting.total_micro_batches):
                if index % targets != mine:
                    continue
                with heart.phase("capture", f"of micro-batch {index}"), memory_told("capture", setting):
                    with clock.phase("capture", index):
                        batch = self.capture(setting.stream.batch(index))
                    if self.outbox is not None:
                        self.outbox.flush()
                    if self.before is not None:
                        self.before.lap.wait()  # at most one capture is queued ahead; a hung GPU has a limit here
                with clock.phase("put", index):
                    wanted = self.hand_on(batch)
                self.note(batch.packed.tokens)
                if not wanted:
                    break
            if self.outbox is not None:
                self.outbox.close()

    def note(self, tokens: int) -> None:
        """The micro-batch before this one, which a GPU has passed."""
        assert self.log is not None
        slot_bytes, slots = self.setting.layout.slot_bytes, 0 if self.outbox is None else self.outbox.slots
        if self.before is not None:
            lap, used = self.before.lap, self.before.in_flight * slot_bytes
            self.log.write(timed(lap, "target", self.before.tokens, used, slots * slot_bytes))
            if self.trace is not None:
                self.trace.write(lap)
        self.before = Handed(self.setting.clock.lap(), tokens, 0 if self.outbox is None else self.outbox.in_flight)

    def hand_on(self, batch: FeatureBatch) -> bool:
        """Whether more is wanted; the shards of a replica decide together."""
        wanted = True if self.outbox is None else self.outbox.put(batch)
        return self.setting.ranks.replica_agrees(wanted)
