"""Which slots the head is multiplied with, in which chunks, and where each finds its target's state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from builders import packed
from drafter_samples import blocks_at, features, make_spec, make_step, random_document
from draftline.bench.shapes import NAMED
from draftline.bench.step import packed_row
from draftline.drafter import head_rows as module
from draftline.drafter.anchors import copy_together, sample_blocks
from draftline.drafter.head_rows import chunk_rows, chunk_slices, head_rows, numbered
from draftline.drafter.losses import LossKind
from draftline.drafter.step import gather_teacher, host_slots
from draftline.records import FeatureBatch

CPU = torch.device("cpu")


def test_chunks_are_whole_tiles_alike_in_size_and_as_few_as_fit() -> None:
    for limit in (128, 1024, 1152):
        for rows in [*range(1, 300), 1023, 1024, 1025, 1152, 4097, 7680, 7679]:
            found = chunk_slices(rows, limit)
            assert [part.start for part in found] == [0, *(part.stop for part in found)][:-1]
            assert found[-1].stop == rows and all(part.start % 128 == 0 for part in found)
            sizes = [part.stop - part.start for part in found]
            assert max(sizes) <= limit and min(sizes) > 0 and len(found) == -(-rows // limit)
            assert len(sizes) == 1 or max(sizes[:-1]) - min(sizes[:-1]) <= 128
    assert chunk_slices(0, 1024) == []


def test_chunk_rows_by_hand() -> None:
    """160 Mi logits: 1,104 rows of Qwen3's vocabulary, of which 8 tiles of 128 are whole; one tile at least."""
    assert chunk_rows(151936) == 1024 and chunk_rows(10**9) == 128


def test_numbered_is_unique_with_its_inverse() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 5, 200):
        values = rng.integers(7, 90, count)
        unique, inverse = np.unique(values, return_inverse=True)
        found, number = numbered(values)
        assert found.tolist() == unique.tolist() and number.tolist() == inverse.tolist()


def test_parts_of_one_copy_are_aligned() -> None:
    parts = [np.arange(3), np.array([[True, False], [True, True]]), np.arange(0), np.arange(5), np.arange(2)]
    found = copy_together(parts, CPU)
    assert [t.tolist() for t in found] == [part.astype(int).tolist() for part in parts]
    assert {(t.data_ptr() - found[0].data_ptr()) % 16 for t in found} == {0}


KEEP = [[True, True], [True, False]]


def test_rows_by_hand() -> None:
    """Two packed rows of 10, blocks of 4. Row 0: anchor 2 has its three slots, anchor 5 two before the mask's hole; row
    1: anchor 3 has one before its document ends. Their target states stand one position before each label."""
    batch = packed([[([9] * 10, [0, 0, 1, 1, 1, 1, 1, 1, 0, 1])], [([9] * 5, [0, 0, 0, 1, 1]), ([9] * 4, [1] * 4)]], 10)
    blocks = blocks_at(FeatureBatch(batch, torch.zeros(2, 10, 1), None), [[2, 5], [3, 0]], KEEP)
    found = head_rows(host_slots(batch, blocks, 4), 10, 100, True, CPU)
    assert found.slot.tolist() == [0, 1, 2, 3, 4, 6]
    assert found.state.tolist() == [1, 2, 3, 5, 6, 9]
    assert found.position.tolist() == [2, 3, 4, 5, 6, 13]
    assert found.teacher.tolist() == [0, 1, 2, 3, 4, 5]
    assert not head_rows(host_slots(batch, blocks, 4), 10, 100, False, CPU).position.numel()


@pytest.mark.parametrize("tile", [4, 16, 1000])
def test_every_row_finds_its_teacher_and_no_chunk_has_one_twice(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_ROWS", tile)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 1)
    rng, spec = np.random.default_rng(1), make_spec(block_size=6)
    for seed in range(4):
        batch = features([[random_document(rng, spec, 20, 2)], [random_document(rng, spec, n, 1) for n in (7, 9)]], 24)
        slots = host_slots(batch.packed, sample_blocks(batch.packed, 12, seed), 6)
        supervised = slots.supervised.flatten()
        assert batch.final is not None
        teacher = gather_teacher(batch.final, slots).flatten(0, 1)[supervised]
        found = head_rows(slots, 24, 100, True, CPU)
        assert found.slot.tolist() == supervised.nonzero()[:, 0].tolist()
        assert sum(len(found.slot[chunk.rows]) for chunk in found.chunks) == len(found.slot)
        for chunk in found.chunks:
            position = found.position[chunk.positions]
            assert len(position.unique()) == len(position) <= len(found.slot[chunk.rows])
            states = batch.final.flatten(0, 1)[position][found.teacher[chunk.rows]]
            assert torch.equal(states, teacher[chunk.rows])


def test_the_work_of_a_row_is_counted() -> None:
    """One document of 12 answers after 2, and a row of 4 after 1; all eligible anchors, blocks of 4. Row 0: anchors 2
    to 12, three slots each but the last two's 2 and 1: 30, whose targets' states are at 2 to 12. Row 1: anchors 1 to 3,
    slots 3, 2 and 1, states at 1 to 3."""
    rng, spec = np.random.default_rng(0), make_spec(block_size=4)
    batch = features([[random_document(rng, spec, 14, 2)], [random_document(rng, spec, 5, 1)]], 16)
    for kind, compared in (("ce", 0), ("kl", (11 + 3) / 2)):
        work = make_step(spec, LossKind(kind, "dpace", 4.0, 0.5), anchors=64).work(batch.packed)
        assert (work.tokens, work.anchors, work.supervised, work.compared) == (16, 64, (30 + 6) / 2, compared)
        assert work.mean_context == pytest.approx((sum(range(2, 13)) + 1 + 2 + 3) / 14)


VIEWS = {"aten::view", "aten::detach", "aten::slice.Tensor", "aten::select.int", "aten::lift_fresh"}  # move nothing


class Operations(TorchDispatchMode):
    """Torch's operations on more values than it leaves to one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, torch.Tensor) and value.numel() > 32768 for value in args):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_is_prepared_without_torchs_pool_of_threads() -> None:
    """It has a thread for every core of the host, and a SmolLM2 step on an H200 waited for its host (docs/LOG.md)."""
    packed_batch = packed_row(NAMED["smollm2-135m"])
    blocks = sample_blocks(packed_batch, 512, 0)
    with Operations() as operations:
        slots = host_slots(packed_batch, blocks, 16)
        head_rows(slots, 2048, 49152, True, CPU)
    assert slots.supervised.numel() == 61440
    assert set(operations.seen) <= VIEWS
