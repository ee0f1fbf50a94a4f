"""Which flow a micro-batch takes: i comes from target replica i mod T and goes to drafter rank i mod D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from draftline.channel.flow import Receiver, Sender
from draftline.records import FeatureBatch, PackedBatch

Waiting = Callable[[str], AbstractContextManager[None]]  # entered while another rank is waited for


class FeatureSource(Protocol):
    """What the training loop reads: in-process capture, another rank's features, or a cache on disk."""

    def get(self, index: int) -> FeatureBatch:
        """Features of micro-batch `index`; valid until the next `get`."""

    def prefetch(self, index: int) -> None:
        """`index` will be asked for next."""

    def close(self) -> None:
        """Nothing more is wanted."""


class FeatureInbox:
    """A training rank's source: one receiver for each target replica."""

    def __init__(self, batch: Callable[[int], PackedBatch], receivers: Sequence[Receiver], waiting: Waiting) -> None:
        self.batch = batch
        self.receivers = receivers
        self.waiting = waiting

    def get(self, index: int) -> FeatureBatch:
        receiver = self.receivers[index % len(self.receivers)]
        with self.waiting(f"features of micro-batch {index} from {receiver.transport.peer}"):
            taps, final = receiver.get(index)
        return FeatureBatch(self.batch(index), taps, final)

    def prefetch(self, index: int) -> None:
        """The capturing ranks work ahead by themselves."""

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


class FeatureOutbox:
    """A capturing rank's sink: one sender for each drafter rank."""

    def __init__(self, senders: Sequence[Sender], waiting: Waiting) -> None:
        self.senders = senders
        self.waiting = waiting

    @property
    def in_flight(self) -> int:
        """Batches that the drafters have not given back yet, as far as this end has heard."""
        return sum(sender.slots - sender.credits for sender in self.senders)

    @property
    def slots(self) -> int:
        return sum(sender.slots for sender in self.senders)

    def flush(self) -> None:
        """Wait until what was put before has left the device. A GPU works on the batch after it meanwhile."""
        for sender in self.senders:
            sender.transport.flush()

    def put(self, batch: FeatureBatch) -> bool:
        """False once the drafters want no more."""
        sender = self.senders[batch.packed.index % len(self.senders)]
        with self.waiting(f"room for micro-batch {batch.packed.index} at {sender.transport.peer}"):
            return sender.put(batch)

    def close(self) -> None:
        self.flush()  # of all first: a drafter may take leave only once the others have theirs
        for sender in self.senders:
            sender.close()
