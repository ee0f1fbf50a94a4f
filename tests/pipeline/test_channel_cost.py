"""What the channel costs: under 3% of training, and no more memory than its slots."""

from __future__ import annotations

import ctypes
import os
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import torch

from draftline.bench.channel import measure_channel
from draftline.bench.shapes import Shape, drafter
from draftline.bench.step import random_features, random_step
from draftline.channel.flow import FeatureLayout, Receiver, Sender
from draftline.channel.shared import SharedReceiver, SharedSender
from draftline.drafter.losses import LossKind
from draftline.records import FeatureBatch, PackedBatch

CPU = torch.device("cpu")
FORK = get_context("fork")
TARGET_TOKENS_PER_S = 12_800  # of the incident's eight GPUs, at their known good
MIB = 2**20


def test_moving_features_costs_under_3_percent_at_50_kb_a_token() -> None:
    """In CPU time, which other processes do not change: both ends' for a token, beside the smallest drafter step that
    has so wide features. And one channel carries the incident's whole rate: 12,800 tokens/s, 0.63 GB/s."""
    spec = drafter(
        hidden_size=2048, intermediate_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        vocab_size=64, target_layer_ids=(1, 2, 3, 4, 5), num_target_layers=8, num_hidden_layers=1,
        layer_types=("full_attention",),
    )  # fmt: skip
    shape = Shape("wide", spec, sequence=128, anchors=8)
    batch = random_features(shape, CPU, torch.float32)
    assert batch.final is not None
    bytes_per_token = (batch.taps.nbytes + batch.final.nbytes) // shape.sequence
    assert bytes_per_token == 6 * 2048 * 4 == 49_152
    step = random_step(shape, LossKind("kl", "dpace", 7.0, 0.5), CPU, torch.float32)
    step.forward_backward(batch)
    started = time.process_time()
    step.forward_backward(batch)
    step_s = (time.process_time() - started) / shape.sequence

    layout = FeatureLayout(rows=1, length=512, tap_width=5 * 2048, final_width=2048, dtype=torch.float32)
    rate = measure_channel(layout, "cpu")
    assert rate.cpu_s_per_byte * bytes_per_token < 0.03 * step_s
    assert 1 / rate.cpu_s_per_byte > TARGET_TOKENS_PER_S * bytes_per_token


LAYOUT = FeatureLayout(rows=1, length=MIB, tap_width=2, final_width=0, dtype=torch.float32)  # 8 MiB a batch
SLOTS = 4
SLACK = 3 * LAYOUT.slot_bytes  # the batch at hand, the one before it, and one more for whatever else is made meanwhile
M_MMAP_THRESHOLD = -3  # of malloc.h


def put_for_ever(address: Path, counter: Path, held: Path) -> None:
    """New memory for each batch, as a target's forward makes it; what the process holds before the first goes to
    `held`. glibc would keep up to a dozen freed batches on its heap: here it maps and unmaps each."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB) == 1
    held.write_text(str(held_bytes(os.getpid())))
    sender = Sender(SharedSender(address, LAYOUT, SLOTS, CPU, "the receiver"), SLOTS)
    nothing = np.zeros((1, 1), dtype=np.int64)
    for index in range(10**6):
        packed = PackedBatch(index, nothing, nothing.astype(bool), nothing, nothing, nothing)
        flat = torch.full((LAYOUT.slot_bytes // 4,), float(index))
        sender.put(FeatureBatch(packed, *LAYOUT.views(flat)))
        counter.write_text(str(index + 1))


def held_bytes(pid: int) -> int:
    """Resident memory that no file lies behind, shared memory included: what a process has taken, not what it runs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return sum(int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def test_memory_stays_bounded_while_the_channel_is_full_and_after(tmp_path: Path) -> None:
    """400 MiB go through 32. The sender stands still while nobody reads, and neither end ever holds more than that."""
    here = psutil.Process().pid
    before = held_bytes(here)
    end = SharedReceiver(tmp_path / "s", LAYOUT, SLOTS, CPU, "the sender")
    process = FORK.Process(target=put_for_ever, args=(tmp_path / "s", tmp_path / "count", tmp_path / "held"))
    process.start()
    try:
        end.accept()
        receiver = Receiver(end, SLOTS)
        wait_for_count(tmp_path / "count", SLOTS)
        other_before = int((tmp_path / "held").read_text())
        time.sleep(0.3)
        full = held_bytes(process.pid)
        time.sleep(0.5)
        assert (tmp_path / "count").read_text() == str(SLOTS)  # it blocks
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
        assert held_bytes(process.pid) <= full + MIB
        most = other_most = 0
        for index in range(50):
            taps, _ = receiver.get(index)
            assert float(taps.min()) == float(taps.max()) == index
            most, other_most = max(most, held_bytes(here)), max(other_most, held_bytes(process.pid))
        slots_bytes = SLOTS * LAYOUT.slot_bytes
        for grown in (most - before, other_most - other_before):
            assert slots_bytes <= grown + MIB  # it is the slots that were measured
            assert grown <= slots_bytes + SLACK
    finally:
        process.kill()
        process.join()


def wait_for_count(path: Path, count: int) -> None:
    limit = time.monotonic() + 20
    while not path.exists() or path.read_text() != str(count):
        assert time.monotonic() < limit
        time.sleep(0.01)
