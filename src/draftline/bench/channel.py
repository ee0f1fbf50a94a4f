"""The rate of the channel alone: shared memory between two processes of one host, as a split uses it."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from draftline.channel.flow import FeatureLayout, Receiver, Sender
from draftline.channel.shared import SharedReceiver, SharedSender
from draftline.errors import RunError
from draftline.records import FeatureBatch, PackedBatch

SLOTS = 3
WARM = 2 * SLOTS  # batches in which every page of the slots is touched for the first time
MOVED_BYTES = {"cpu": 2**28, "cuda": 2**32}
FEWEST, MOST = 8, 2000  # batches timed
LISTENS_WITHIN_S = 120.0  # of its start, which imports torch


@dataclass(frozen=True)
class ChannelRate:
    """Bytes a second through one channel, and what of the two processes' CPU time each byte took."""

    bytes_per_s: float
    cpu_s_per_byte: float


def measure_channel(layout: FeatureLayout, device: str) -> ChannelRate:
    """Batches of `layout` one after the other. device: "cpu" or "cuda", where the sender is on the last GPU in view and
    the receiver on the first."""
    count = min(max(MOVED_BYTES[device] // layout.slot_bytes, FEWEST), MOST)
    with (
        tempfile.TemporaryDirectory(prefix="draftline-") as folder,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
    ):
        address = Path(folder) / "socket"
        receiving = pool.submit(receive, address, layout, device, count)
        sending = pool.submit(send, address, layout, device, count)
        seconds, received_cpu_s = receiving.result()
        cpu_s = received_cpu_s + sending.result()
    moved_bytes = count * layout.slot_bytes
    return ChannelRate(moved_bytes / seconds, cpu_s / moved_bytes)


def receive(address: Path, layout: FeatureLayout, device: str, count: int) -> tuple[float, float]:
    """(seconds, CPU seconds) in which `count` batches came after the warm-up."""
    here = this_device(device, 0)
    end = SharedReceiver(address, layout, SLOTS, here, "the sender")
    end.accept()
    receiver = Receiver(end, SLOTS)
    for index in range(WARM):
        receiver.get(index)
    started, cpu = settled(here), time.process_time()
    for index in range(WARM, WARM + count):
        receiver.get(index)
    seconds, cpu_s = settled(here) - started, time.process_time() - cpu
    receiver.close()
    return seconds, cpu_s


def send(address: Path, layout: FeatureLayout, device: str, count: int) -> float:
    """CPU seconds in which `count` batches were put after the warm-up."""
    here = this_device(device, -1)
    until = time.monotonic() + LISTENS_WITHIN_S
    while not address.exists():
        if time.monotonic() > until:
            raise RunError(f"nobody listened on the channel within {LISTENS_WITHIN_S:g} s")
        time.sleep(0.01)
    sender = Sender(SharedSender(address, layout, SLOTS, here, "the receiver"), SLOTS)
    flat = torch.randn(layout.slot_bytes // layout.dtype.itemsize, device=here).to(layout.dtype)
    nothing = np.zeros((layout.rows, layout.length), dtype=np.int64)
    cpu = time.process_time()
    for index in range(WARM + count):
        if index == WARM:
            cpu = time.process_time()
        packed = PackedBatch(index, nothing, nothing.astype(bool), nothing, nothing, nothing)
        sender.put(FeatureBatch(packed, *layout.views(flat)))
    cpu_s = time.process_time() - cpu
    sender.close()
    return cpu_s


def this_device(name: str, number: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    index = number % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def settled(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
