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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from command import draftline_here
from draftline.drafter.step import DrafterStep
from runs import write_recipe

ONE_FLAG = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14)

CASES = """
import json, threading, torch
from draftline.environment.compile_guard import compiled_only
from draftline.environment.switches import changed_switches
from draftline.errors import RunError

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
    except (RuntimeError, RunError) as error:
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
ours = torch.compile(compiled_only(body), backend="eager", fullgraph=True)
warm(torch.ones(4)), ours(torch.ones(4))
config = torch._dynamo.config
found = {"plain": while_another_thread_traces(warm)}
with config.patch(error_on_nested_fx_trace=False):
    found["silenced"] = while_another_thread_traces(warm)
    found["silenced, ours"] = while_another_thread_traces(ours)
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
def test_what_draftline_compiles_does_not_run_eagerly_even_then_and_a_leaked_flag_is_told(
    found: dict[str, Any],
) -> None:
    assert found["silenced, ours"].startswith("RunError: body was compiled, and torch ran it eagerly")
    assert found["changed"] == ["torch.fx is tracing"]


@pytest.mark.skipif(ONE_FLAG, reason="up to torch 2.13 the tracing flag is the process's")
def test_with_a_flag_for_each_thread_nothing_breaks(found: dict[str, Any]) -> None:
    assert [found[case] for case in ("plain", "silenced", "silenced, ours", "forced", "leaked")] == ["compiled"] * 5
    assert found["changed"] == []


def test_in_a_run_one_thread_calls_and_traces_everything_compiled(tmp_path: Path, monkeypatch) -> None:
    """A whole run with its step compiled: every trace and every execution of a graph, forward and backward, in the
    main thread. One process trains on one device, so no other thread can set the flag under it."""
    torch._dynamo.reset()
    seen: list[tuple[str, threading.Thread]] = []

    def recorder(what: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            seen.append((f"trace {what}", threading.current_thread()))

            def run(*inputs: Any) -> Any:
                seen.append((f"run {what}", threading.current_thread()))
                return graph(*inputs)

            return make_boxed_func(run)

        return compiler

    backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"))
    plain = DrafterStep.__init__

    def compiled(step: DrafterStep, *words: Any) -> None:
        plain(step, *words)
        step.compile(backend)

    monkeypatch.setattr(DrafterStep, "__init__", compiled)
    done = draftline_here("train", write_recipe(tmp_path, train={"max_steps": 4}))
    assert done.code == 0, done.err
    assert "  compiled  forward and backward in " in done.out
    counts = {what: sum(1 for name, _ in seen if name == what) for what, _ in seen}
    # one graph for the layer and one for the loss; 4 steps of 2 micro-batches, and the warm-up
    assert counts == {"trace forward": 2, "trace backward": 1, "run forward": 18, "run backward": 9}
    assert {thread for _, thread in seen} == {threading.main_thread()}
