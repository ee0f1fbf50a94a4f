"""The channel between two processes: all arrives once, in order and whole; it is bounded; a dead peer ends it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.channel.flow import FeatureLayout, Receiver, Sender
from draftline.channel.shared import SharedReceiver, SharedSender
from draftline.errors import InputError, PeerLost, RunError
from draftline.records import FeatureBatch, PackedBatch

CPU = torch.device("cpu")
LAYOUT = FeatureLayout(rows=2, length=3, tap_width=4, final_width=2, dtype=torch.float32)
FORK = get_context("fork")


def batch(index: int, layout: FeatureLayout = LAYOUT) -> FeatureBatch:
    """Features that no other index has."""
    ids = np.zeros((layout.rows, layout.length), dtype=np.int64)
    packed = PackedBatch(index, ids, ids.astype(bool), ids, ids, ids)
    flat = torch.arange(layout.slot_bytes // layout.dtype.itemsize, dtype=layout.dtype) + 1000 * index
    return FeatureBatch(packed, *layout.views(flat))


def receiver_at(address: Path, slots: int) -> SharedReceiver:
    return SharedReceiver(address, LAYOUT, slots, CPU, "rank 1 (target 0)")


def sender_at(address: Path, slots: int) -> Sender:
    return Sender(SharedSender(address, LAYOUT, slots, CPU, "rank 0 (drafter 0)"), slots)


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    count=st.integers(0, 9),
    wanted=st.integers(0, 9),
    pauses=st.lists(st.sampled_from(["sender", "receiver", ""]), min_size=9, max_size=9),
)
def test_every_batch_arrives_once_in_order_and_whole(slots: int, count: int, wanted: int, pauses: list[str]) -> None:
    """Whatever the sizes, whoever is slow, and whether the receiver takes everything or leaves early."""
    wanted = min(wanted, count)
    with tempfile.TemporaryDirectory() as folder:
        end = receiver_at(Path(folder) / "s", slots)
        taken, ahead, accepted = [0], [0], [0]

        def send() -> None:
            sender = sender_at(Path(folder) / "s", slots)
            for index in range(count):
                if pauses[index] == "sender":
                    time.sleep(0.001)
                if not sender.put(batch(index)):
                    break
                accepted[0] += 1
                ahead[0] = max(ahead[0], accepted[0] - taken[0])
            sender.close()

        thread = in_background(send)
        end.accept()
        receiver = Receiver(end, slots)
        for index in range(wanted):
            if pauses[index] == "receiver":
                time.sleep(0.001)
            taps, final = receiver.get(index)
            taken[0] += 1
            expected = batch(index)
            assert torch.equal(taps, expected.taps) and expected.final is not None and final is not None
            assert torch.equal(final, expected.final)
        receiver.close()
        thread.join(10)
        assert not thread.is_alive()
        assert ahead[0] <= slots + 1  # the one in use has been counted as taken by the receiver only after `get`
        assert accepted[0] >= wanted and (wanted < count or accepted[0] == count)


def test_another_index_than_the_one_due_is_refused(tmp_path: Path) -> None:
    end = receiver_at(tmp_path / "s", 2)

    def send() -> None:
        sender = sender_at(tmp_path / "s", 2)
        sender.put(batch(4))
        with pytest.raises(PeerLost):
            sender.close()

    thread = in_background(send)
    end.accept()
    receiver = Receiver(end, 2)
    with pytest.raises(RunError, match=r"rank 1 \(target 0\) sent the features of micro-batch 4; 3 was due"):
        receiver.get(3)
    end.close()
    thread.join(10)


def put_for_ever(address: Path, counter: Path) -> None:
    sender = sender_at(address, 3)
    for index in range(1000):
        sender.put(batch(index))
        counter.write_text(str(index + 1))


@pytest.fixture
def flowing(tmp_path: Path):
    """(receiver with 3 slots, sending process, file that counts what it has handed over)."""
    end = receiver_at(tmp_path / "s", 3)
    process = FORK.Process(target=put_for_ever, args=(tmp_path / "s", tmp_path / "count"))
    process.start()
    end.accept()
    yield Receiver(end, 3), process, tmp_path / "count"
    process.kill()
    process.join()


def test_a_full_channel_blocks_its_sender(flowing) -> None:
    receiver, _, counter = flowing
    for taken in range(4):
        full = 3 + max(0, taken - 1)  # a slot is free once the next batch is asked for
        wait_until(partial(has_counted, counter, full))
        time.sleep(0.1)
        assert int(counter.read_text()) == full
        receiver.get(taken)


def has_counted(counter: Path, at_least: int) -> bool:
    return counter.exists() and int(counter.read_text() or 0) >= at_least


def wait_until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_dead_sender_ends_the_wait_with_its_name(flowing) -> None:
    receiver, process, _ = flowing
    threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"^rank 1 \(target 0\) is gone"):
        for index in range(1000):
            receiver.get(index)
            time.sleep(0.01)
    assert time.monotonic() - started < 5


def test_a_dead_receiver_ends_the_wait_for_room_with_its_name(tmp_path: Path) -> None:
    def take_one() -> None:
        end = receiver_at(tmp_path / "s", 1)
        (tmp_path / "listening").touch()
        end.accept()
        Receiver(end, 1).get(0)
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=take_one)
    process.start()
    wait_until((tmp_path / "listening").exists)
    sender = sender_at(tmp_path / "s", 1)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"^rank 0 \(drafter 0\) is gone"):
        for index in range(3):
            sender.put(batch(index))
    assert time.monotonic() - started < 5
    process.join()


def test_slots_follow_the_budget_and_one_must_fit() -> None:
    slot = LAYOUT.slot_bytes
    assert slot == 2 * 3 * (4 + 2) * 4
    assert LAYOUT.slots_within(5.9 * slot, senders=1) == 5
    assert LAYOUT.slots_within(5.9 * slot, senders=2) == 2
    assert LAYOUT.slots_within(1e12, senders=1) == 16
    with pytest.raises(InputError, match="2 capturing ranks each need room for one"):
        LAYOUT.slots_within(1.9 * slot, senders=2)
