"""The race of compiling in several threads of one process, shown for what it is, and why draftline's step is not in it.

Up to 2.13 torch has one flag "FX is tracing" for the whole process. Every trace sets it, and every call of a compiled
function looks at it: a thread that traces makes another thread's compiled call raise, or run eagerly where a switch
silences the error. From 2.14 on each thread has a flag of its own. Threads are parked with events; nothing in torch is
patched.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import draftline_here
from drafter_samples import features, make_spec, make_step, random_document
from draftline.drafter.losses import LossKind
from draftline.drafter.step import DrafterStep, MicroStep
from draftline.environment.compile_guard import graph_counts
from draftline.records import FeatureBatch
from runs import write_recipe

ONE_FLAG = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)

CASES = """
import json, threading, torch
from draftline.environment.switches import changed_switches

ran_eagerly = []
def body(x):
    if not torch.compiler.is_compiling():
        ran_eagerly.append(True)
    return x * 2

def while_another_thread_traces(call):
    "What `call` does in this thread while another one stands in the middle of a trace."
    tracing, go_on = threading.Event(), threading.Event()
    def traced(x):
        tracing.set()
        assert go_on.wait(60)
        return x + 1
    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    tracer.start()
    assert tracing.wait(60)
    ran_eagerly.clear()
    try:
        call(torch.ones(4))
        return "eager" if ran_eagerly else "compiled"
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        go_on.set()
        tracer.join()

def leaked_flag(call):
    "Two traces that interleave: the second saves the flag while the first has set it, and restores it after."
    events = [threading.Event() for _ in range(4)]
    def trace(entered, leave):
        def traced(x):
            entered.set()
            assert leave.wait(60)
            return x + 1
        torch.fx.symbolic_trace(traced)
    first, second = (threading.Thread(target=trace, args=events[i:i + 2]) for i in (0, 2))
    for thread, entered in ((first, events[0]), (second, events[2])):
        thread.start()
        assert entered.wait(60)
    for thread, leave in ((first, events[1]), (second, events[3])):
        leave.set()
        thread.join()
    try:
        call(torch.ones(4))
        return "compiled"
    except RuntimeError as error:
        return str(error)

warm = torch.compile(body, backend="eager")
warm(torch.ones(4))
config = torch._dynamo.config
found = {"plain": while_another_thread_traces(warm)}
with config.patch(error_on_nested_fx_trace=False):
    found["silenced"] = while_another_thread_traces(warm)
with config.patch(force_compile_during_fx_trace=True):
    found["forced"] = while_another_thread_traces(warm)
found["leaked"] = leaked_flag(warm)
found["changed"] = sorted(changed_switches())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not ONE_FLAG, reason="this torch has a tracing flag for each thread")
def test_a_thread_that_traces_breaks_the_compiled_calls_of_another(found: dict[str, Any]) -> None:
    detected = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
    assert found["plain"].startswith(f"RuntimeError: {detected}")
    assert found["silenced"] == "eager"  # without an error: the slow run
    assert found["forced"] == "compiled"
    assert found["leaked"].startswith(detected)  # though no thread traces any more


@pytest.mark.skipif(not ONE_FLAG, reason="this torch has a tracing flag for each thread")
def test_a_flag_that_was_left_on_is_told(found: dict[str, Any]) -> None:
    assert found["changed"] == ["torch.fx is tracing"]


@pytest.mark.skipif(ONE_FLAG, reason="up to torch 2.13 the tracing flag is the process's")
def test_with_a_flag_for_each_thread_nothing_breaks(found: dict[str, Any]) -> None:
    assert [found[case] for case in ("plain", "silenced", "forced", "leaked")] == ["compiled"] * 4
    assert found["changed"] == []


@contextmanager
def another_thread_that_traces() -> Iterator[None]:
    """While entered, another thread of this process stands in the middle of a trace."""
    tracing, go_on = threading.Event(), threading.Event()

    def traced(x: Any) -> Any:
        tracing.set()
        assert go_on.wait(60)
        return x + 1

    tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    tracer.start()
    assert tracing.wait(60)
    try:
        yield
    finally:
        go_on.set()
        tracer.join()


def test_beside_a_thread_that_traces_draftlines_step_raises_and_never_runs_other_code_in_silence() -> None:
    """Nothing in the step is compiled by torch, so there is no eager or dense path to fall back to. What a trace does
    reach, up to 2.13, is every call of a module, which it takes over in the whole process: an error, at once."""
    spec, kind = make_spec(), LossKind("kl", "dpace", None, 0.5)
    batch = features([[random_document(np.random.default_rng(0), spec, 20, 4)]], 32)
    alone, beside = make_step(spec, kind, anchors=8), make_step(spec, kind, anchors=8)
    expected = alone.forward_backward(batch)
    before = graph_counts()
    if ONE_FLAG:
        with another_thread_that_traces(), pytest.raises(NameError, match="module is not installed as a submodule"):
            beside.forward_backward(batch)
        found = beside.forward_backward(batch)
    else:
        with another_thread_that_traces():
            found = beside.forward_backward(batch)
    assert graph_counts() == before
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))
    pairs = zip(beside.drafter.parameters(), alone.drafter.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def test_in_a_run_one_thread_takes_every_step_and_torch_compiles_nothing(tmp_path: Path, monkeypatch) -> None:
    takers: list[threading.Thread] = []
    plain = DrafterStep.forward_backward

    def noted(step: DrafterStep, batch: FeatureBatch) -> MicroStep:
        takers.append(threading.current_thread())
        return plain(step, batch)

    monkeypatch.setattr(DrafterStep, "forward_backward", noted)
    before = graph_counts()
    done = draftline_here("train", write_recipe(tmp_path, train={"max_steps": 4}))
    assert done.code == 0, done.err
    assert len(takers) >= 8 and set(takers) == {threading.main_thread()}  # preflight takes one of its own
    assert graph_counts() == before
