"""Compiling without launching: nothing is written, and afterwards kernels run again."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch
import triton

from draftline.kernels.launch import compiled, compiling_together
from draftline.kernels.pointwise import swiglu_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def written() -> bool:
    """Whether a kernel that overwrites its inputs changed them."""
    gate_up = torch.arange(32, dtype=torch.float32, device=DEVICE).view(2, 16)
    dh = torch.ones(2, 8, device=DEVICE)
    before = gate_up.clone()
    swiglu_backward(gate_up, dh)
    return not torch.equal(gate_up, before)


def test_inside_kernels_are_compiled_and_write_nothing() -> None:
    assert written()
    with compiling_together():
        assert not written()
    assert written()


def test_another_thread_goes_on_launching() -> None:
    """What torch's tracing flag got wrong in the incident: one thread's mode is no other's."""
    seen: list[bool] = []
    with compiling_together():
        thread = threading.Thread(target=lambda: seen.append(written()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_failure_inside_leaves_the_mode() -> None:
    with pytest.raises(ValueError, match="on purpose"), compiling_together():
        raise ValueError("on purpose")
    assert compiled.get() is None and written()


def compile_and_note(folder: str, notes: str) -> None:
    triton.knobs.cache.dir = folder
    with compiling_together():
        with Path(notes).open("a") as file:
            file.write("in\n")
        time.sleep(0.3)
        with Path(notes).open("a") as file:
            file.write("out\n")


def test_processes_of_one_cache_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "notes"))
    processes = [context.Process(target=compile_and_note, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "notes").read_text().split() == ["in", "out"] * 3
