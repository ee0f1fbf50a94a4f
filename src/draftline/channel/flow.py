"""The flow of feature batches from one capturing rank to one training rank: bounded, in order, whole.

Two words travel beside the features: the sender's number of the batch that it has just placed, and the receiver's
credit for a slot that it has emptied; STOP on either side ends the flow. A sender without credit waits, so what is in
flight never exceeds the slots. Transports (`shared.py`, `distributed.py`) carry words and batches and raise PeerLost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftline.errors import InputError, PeerLost, RunError
from draftline.records import FeatureBatch

STOP = -1
CREDIT = -2
MAX_SLOTS = 16  # more in flight hides nothing: capture is either ahead of training by now, or never


@dataclass(frozen=True)
class FeatureLayout:
    """Shapes of every feature batch of a run: taps [rows, length, tap_width], final [rows, length, final_width]."""

    rows: int
    length: int
    tap_width: int
    final_width: int  # 0 where the loss needs no final states
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        return self.rows * self.length * (self.tap_width + self.final_width) * self.dtype.itemsize

    def views(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """(taps, final) as views of one slot [slot_bytes / itemsize]."""
        split = self.rows * self.length * self.tap_width
        taps = flat[:split].view(self.rows, self.length, self.tap_width)
        return taps, flat[split:].view(self.rows, self.length, self.final_width) if self.final_width else None

    def slots_within(self, budget_bytes: float, senders: int) -> int:
        """Slots of each of a receiver's `senders` flows. Raises InputError where not even one fits the budget."""
        slots = int(budget_bytes // (self.slot_bytes * senders))
        if slots < 1:
            raise InputError(
                f"placement.channel_gib {budget_bytes / 2**30:g}: one micro-batch's features take "
                f"{self.slot_bytes / 2**30:.3g} GiB, and {senders} capturing ranks each need room for one",
                "raise placement.channel_gib, or lower train.rows_per_micro_batch",
            )
        return min(slots, MAX_SLOTS)


Features = tuple[Tensor, Tensor | None]  # taps and final


class SendingTransport(Protocol):
    peer: str  # the other end, by name

    def place(self, slot: int, index: int, batch: FeatureBatch) -> None: ...
    def flush(self) -> None: ...
    def send_word(self, word: int) -> None: ...
    def receive_word(self) -> int: ...
    def word_pending(self) -> bool: ...
    def close(self) -> None: ...


class ReceivingTransport(Protocol):
    peer: str

    def take(self, slot: int) -> Features: ...
    def settle(self, slot: int) -> None: ...
    def send_word(self, word: int) -> None: ...
    def receive_word(self) -> int: ...
    def word_pending(self) -> bool: ...
    def close(self) -> None: ...


class Sender:
    """`put` hands a batch over, waiting while the flow is full; False once the receiver wants no more."""

    def __init__(self, transport: SendingTransport, slots: int) -> None:
        self.transport = transport
        self.slots = slots
        self.credits = slots
        self.sent = 0
        self.stopped = False

    def put(self, batch: FeatureBatch) -> bool:
        while not self.stopped and (self.credits == 0 or self.transport.word_pending()):
            self.transport.flush()
            if self.transport.receive_word() == STOP:
                self.stopped = True
            else:
                self.credits += 1
        if self.stopped:
            return False
        self.transport.place(self.sent % self.slots, batch.packed.index, batch)
        self.sent += 1
        self.credits -= 1
        return True

    def close(self) -> None:
        """Say that no more will come, and wait until the receiver has taken leave too."""
        self.transport.flush()
        self.transport.send_word(STOP)
        while not self.stopped:
            self.stopped = self.transport.receive_word() == STOP
        self.transport.close()


class Receiver:
    """`get` waits for the batch of one index and refuses any other. What it returned is valid until the next `get`."""

    def __init__(self, transport: ReceivingTransport, slots: int) -> None:
        self.transport = transport
        self.slots = slots
        self.started: deque[tuple[int, Features]] = deque()  # announced, and on their way to the device
        self.taken = 0
        self.in_use: int | None = None  # slot of the batch that the last `get` returned
        self.ended = False  # the sender has said that no more will come

    def get(self, index: int) -> Features:
        self.release()
        if not self.started:
            self.start_next()
        if not self.started:
            raise PeerLost(f"{self.transport.peer} ended before it had sent micro-batch {index}")
        found, features = self.started.popleft()
        if found != index:
            raise RunError(f"{self.transport.peer} sent the features of micro-batch {found}; {index} was due")
        self.in_use = (self.taken - 1 - len(self.started)) % self.slots
        if not self.started and not self.ended and self.transport.word_pending():
            self.start_next()
        return features

    def start_next(self) -> None:
        """Wait for the sender's next word and bring its batch on the way."""
        word = STOP if self.ended else self.transport.receive_word()
        if word == STOP:
            self.ended = True
            return
        self.started.append((word, self.transport.take(self.taken % self.slots)))
        self.taken += 1

    def release(self) -> None:
        if self.in_use is not None:
            self.transport.settle(self.in_use)
            self.transport.send_word(CREDIT)
            self.in_use = None

    def close(self) -> None:
        """Take leave, and what is still under way with it."""
        self.transport.send_word(STOP)
        while not self.ended:
            self.transport.settle(self.taken % self.slots)
            self.start_next()
        self.started.clear()
        self.transport.close()
