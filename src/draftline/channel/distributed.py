"""Features through torch.distributed, between hosts: words over gloo, features over NCCL on a GPU and gloo on a CPU.

Each pair of ranks has a process group of its own, so that features never queue behind the gradients' all-reduce.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from draftline.channel.flow import FeatureLayout, Features
from draftline.errors import PeerLost
from draftline.records import FeatureBatch


class DistributedEnd:
    """Words between this rank and `rank` over `group`, which holds just the two.

    gloo keeps a message until the other end asks for it, and its memory must stay: `sent` holds the newest. Of those
    further back than a whole flow's slots the other end has already answered, so waiting for them is short.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, peer: str, slots: int) -> None:
        self.group = group
        self.rank = rank
        self.peer = peer
        self.sent: deque[tuple[dist.Work, Tensor]] = deque()
        self.kept = 3 * (slots + 2)  # a batch is a word and up to two tensors

    def lost(self, error: RuntimeError) -> PeerLost:
        return PeerLost(f"{self.peer} is gone ({str(error).splitlines()[0]})")

    def send(self, tensor: Tensor) -> None:
        try:
            work = dist.isend(tensor, self.rank, group=self.group)
            assert work is not None
            self.sent.append((work, tensor))
            while len(self.sent) > self.kept:
                self.sent.popleft()[0].wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def receive(self, into: Tensor) -> None:
        """On a GPU the current stream waits for the data; the host does not."""
        try:
            work = dist.irecv(into, self.rank, group=self.group)
            assert work is not None
            work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def send_word(self, word: int) -> None:
        self.send(torch.tensor([word]))

    def receive_word(self) -> int:
        word = torch.zeros(1, dtype=torch.int64)
        self.receive(word)
        return int(word)

    def word_pending(self) -> bool:
        return False  # gloo cannot be asked without waiting

    def close(self) -> None:
        try:
            for work, _ in self.sent:
                work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error


class DistributedSender(DistributedEnd):
    """The capturing rank's end."""

    def place(self, slot: int, index: int, batch: FeatureBatch) -> None:
        self.send_word(index)
        for part in (batch.taps, batch.final):
            if part is not None:
                self.send(part.contiguous())

    def flush(self) -> None:
        pass


class DistributedReceiver(DistributedEnd):
    """The training rank's end."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, peer: str, layout: FeatureLayout, slots: int, device: torch.device
    ) -> None:
        super().__init__(group, rank, peer, slots)
        self.layout = layout
        self.device = device

    def take(self, slot: int) -> Features:
        """Into new memory: what waits its turn does so on the sender."""
        size = self.layout.slot_bytes // self.layout.dtype.itemsize
        features = self.layout.views(torch.empty(size, dtype=self.layout.dtype, device=self.device))
        for part in features:
            if part is not None:
                self.receive(part)
        return features

    def settle(self, slot: int) -> None:
        pass
