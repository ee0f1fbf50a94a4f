"""Features through shared memory, between two processes of one host.

The receiver owns an anonymous memory file (it has no name, so nothing is left behind whatever dies) and hands it to the
sender over a Unix socket, which then carries the words of `flow.py`. The kernel closes the socket of a process that
dies, so the other end learns of it at once. On a GPU the memory is pinned and copies run on a stream of their own.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from pathlib import Path

import torch
from torch import Tensor

from draftline.channel.flow import FeatureLayout, Features
from draftline.errors import InputError, PeerLost
from draftline.records import FeatureBatch

WORD = struct.Struct("<q")
CONNECT_S = 60.0


class Words:
    """64-bit words over a connected stream socket."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection = connection
        self.peer = peer

    def send_word(self, word: int) -> None:
        try:
            self.connection.sendall(WORD.pack(word))
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone ({error.strerror})") from error

    def receive_word(self) -> int:
        try:
            data = self.connection.recv(WORD.size, socket.MSG_WAITALL)
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone ({error.strerror})") from error
        if len(data) < WORD.size:
            raise PeerLost(f"{self.peer} is gone: its end of the channel was closed")
        word: int = WORD.unpack(data)[0]
        return word

    def word_pending(self) -> bool:
        try:
            return len(self.connection.recv(WORD.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == WORD.size
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone ({error.strerror})") from error

    def close(self) -> None:
        self.connection.close()


class SlotMemory:
    """The slots of one flow as tensors over a shared memory file."""

    def __init__(self, descriptor: int, layout: FeatureLayout, slots: int, pinned: bool) -> None:
        stride = -(-layout.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(descriptor, stride * slots)
        os.close(descriptor)
        self.flat = torch.frombuffer(self.map, dtype=torch.uint8)
        if pinned:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), len(self.flat), 0)))
        parts = [self.flat[n * stride : n * stride + layout.slot_bytes].view(layout.dtype) for n in range(slots)]
        self.slots: list[Features] = [layout.views(part) for part in parts]

    @staticmethod
    def create(layout: FeatureLayout, slots: int) -> int:
        """File descriptor of an anonymous memory file, reserved in full. InputError where there is no room for it."""
        size_bytes = -(-layout.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE * slots
        descriptor = os.memfd_create("draftline-features")
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise InputError(
                f"placement.channel_gib: {size_bytes / 2**30:.2g} GiB of shared memory refused ({error.strerror})",
                "lower placement.channel_gib, or give the container more memory",
            ) from error
        return descriptor


class SharedSender(Words):
    """The capturing rank's end."""

    def __init__(self, address: Path, layout: FeatureLayout, slots: int, device: torch.device, peer: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(str(address))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise PeerLost(f"{peer} is gone ({error.strerror})") from error
        connection.settimeout(None)
        super().__init__(connection, peer)
        self.memory = SlotMemory(descriptors[0], layout, slots, device.type == "cuda")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.unannounced: tuple[int, torch.cuda.Event | None] | None = None

    def place(self, slot: int, index: int, batch: FeatureBatch) -> None:
        """Copy, and announce the batch *before*, whose copy has had a capture's time to end on a GPU. A CPU's copy has
        ended when this returns, and yet waits for its announcement too: one order of words, tested without a GPU."""
        pairs = list(zip(self.memory.slots[slot], (batch.taps, batch.final), strict=True))
        copied = None
        if self.stream is None:
            for there, here in pairs:
                if there is not None and here is not None:
                    there.copy_(here)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for there, here in pairs:
                    if there is not None and here is not None:
                        there.copy_(here, non_blocking=True)
                        here.record_stream(self.stream)
                copied = torch.cuda.Event()
                copied.record()
        self.flush()
        self.unannounced = (index, copied)

    def flush(self) -> None:
        if self.unannounced is not None:
            index, copied = self.unannounced
            if copied is not None:
                copied.synchronize()
            self.send_word(index)
            self.unannounced = None


class SharedReceiver(Words):
    """The training rank's end: listens first, is connected by `accept`."""

    def __init__(self, address: Path, layout: FeatureLayout, slots: int, device: torch.device, peer: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = address
        self.listener.bind(str(address))
        self.listener.listen(1)
        self.listener.settimeout(CONNECT_S)
        self.peer = peer
        self.descriptor = SlotMemory.create(layout, slots)
        self.memory = SlotMemory(os.dup(self.descriptor), layout, slots, device.type == "cuda")
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: dict[int, torch.cuda.Event] = {}

    def accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
            connection.settimeout(None)
            socket.send_fds(connection, [b"f"], [self.descriptor])
        except OSError as error:
            raise PeerLost(f"{self.peer} is gone: it did not connect within {CONNECT_S:g} s") from error
        os.close(self.descriptor)
        self.listener.close()
        self.address.unlink()
        super().__init__(connection, self.peer)

    def take(self, slot: int) -> Features:
        """The slot itself on a CPU; on a GPU a device copy that the current stream waits for."""
        taps, final = self.memory.slots[slot]
        if self.stream is None:
            return taps, final
        with torch.cuda.stream(self.stream):
            on_device = tuple(
                None if host is None else host.to(self.device, non_blocking=True) for host in (taps, final)
            )
            self.copied[slot] = torch.cuda.Event()
            self.copied[slot].record()
        current = torch.cuda.current_stream()
        current.wait_stream(self.stream)
        for tensor in on_device:
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)
        assert on_device[0] is not None
        return on_device[0], on_device[1]

    def settle(self, slot: int) -> None:
        """Before its credit is given a slot must have been copied: a step later it has, so this does not wait."""
        if slot in self.copied:
            self.copied.pop(slot).synchronize()
