"""A warm run compiles nothing more: other shapes, other threads and eager fallbacks of a step that torch compiled.

The graphs are captured, guarded and differentiated by torch's compiler and then run by its `aot_eager` back end, which
spares a minute of C++; tests/cold_start has the same step with kernels.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from drafter_samples import FULL, features, make_spec, make_step, random_document
from draftline.drafter.losses import LossKind
from draftline.drafter.step import DrafterStep
from draftline.environment.compile_guard import CompileGuard, compile_layer, compiled_only, graph_counts
from draftline.errors import RunError
from draftline.records import FeatureBatch
from draftline.train.warm_up import first_on_host, shapes_of, warm_up

SPEC = make_spec(num_hidden_layers=2, target_layer_ids=(1,), layer_types=(FULL,) * 2)
KIND = LossKind("kl", "dpace", 7.0, 0.5)


def batch(length: int, index: int = 0) -> FeatureBatch:
    rng = np.random.default_rng(index)
    return features([[random_document(rng, SPEC, 20, 4)]], length, index)


@pytest.fixture(scope="module")
def warm() -> tuple[DrafterStep, CompileGuard]:
    """A step warmed on one shape, with the guard of its run."""
    torch._dynamo.reset()
    step, guard = make_step(SPEC, KIND, anchors=8), CompileGuard()
    step.compile(backend="aot_eager")
    assert warm_up(step, [batch(32).packed], torch.float32, guard) > 0
    return step, guard


def test_warm_up_compiles_forward_and_backward_once_for_both_layers_and_leaves_nothing_behind(warm) -> None:
    step, guard = warm
    assert [name for name, p in step.drafter.named_parameters() if p.grad is not None] == []
    before = graph_counts()
    plain = make_step(SPEC, KIND, anchors=8)
    with guard.steady(str):
        micro = step.forward_backward(batch(32, index=5))
    expected = plain.forward_backward(batch(32, index=5))
    assert graph_counts() == before
    for one, other in zip(micro.values(), expected.values(), strict=True):
        torch.testing.assert_close(one, other)
    for (name, one), (_, other) in zip(step.drafter.named_parameters(), plain.drafter.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_another_shape_is_an_error_that_names_it_and_the_guard(warm) -> None:
    step, guard = warm
    longer = batch(48)
    with pytest.raises(RunError) as caught, guard.steady(partial(shapes_of, longer)):
        step.forward_backward(longer)
    assert caught.value.what == (
        "a step of ids [1, 48], taps [1, 48, 32] float32 has a shape that was not compiled in warm-up: "
        "forward: tensor 'z' requires_grad mismatch. expected requires_grad=1; "
        "tensor 'c' size mismatch at index 1. expected 32, actual 48"
    )
    with guard.steady(str):
        step.forward_backward(batch(32))


def test_a_new_graph_after_warm_up_is_an_error(warm) -> None:
    _, guard = warm
    with (
        pytest.raises(RunError, match="a step of 3 rows compiled 1 graphs after warm-up"),
        guard.steady(lambda: "3 rows"),
    ):
        torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))


def test_an_unfused_attention_is_an_error_each_time(warm) -> None:
    _, guard = warm
    q = torch.randn(1, 1, 16, 16)
    for context in (guard.warming(), guard.steady(str), guard.steady(str)):
        with pytest.raises(RunError, match="flex_attention was called outside compiled code"), context:
            flex_attention(q, q, q)


def test_another_thread_is_refused(warm) -> None:
    _, guard = warm
    said: list[str] = []

    def call() -> None:
        try:
            with guard.steady(str):
                said.append("entered")
        except RunError as error:
            said.append(error.what)

    thread = threading.Thread(target=call, name="prefetch")
    thread.start()
    thread.join()
    assert said == ["thread prefetch called the compiled step, which belongs to thread MainThread"]


def test_an_eager_fallback_of_what_was_compiled_is_an_error(warm) -> None:
    """As with TORCHDYNAMO_DISABLE, or past the recompile limit: torch itself says nothing."""
    step, _ = warm
    with torch.compiler.set_stance("force_eager"):
        with pytest.raises(RunError, match="DrafterLayer was compiled, and torch ran it eagerly"):
            step.forward_backward(batch(32))
        with pytest.raises(RunError, match="chunk_loss was compiled, and torch ran it eagerly"):
            step.chunk_loss(*[None] * 4, KIND)


def test_the_recompile_limit_cannot_be_passed_in_silence() -> None:
    """torch's own default past the limit is to run eagerly; compiled code of ours raises there."""
    torch._dynamo.reset()
    double = torch.compile(compiled_only(torch.nn.Identity().forward), backend="eager", dynamic=False)
    layer = torch.nn.Linear(4, 4)
    compile_layer(layer, "eager")
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(RunError, match="Identity.forward was compiled"):
        for rows in range(1, 9):
            double(torch.ones(rows, 4))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RunError, match="Linear was compiled"):
        layer(torch.ones(2, 4))


def test_the_first_rank_of_a_host_goes_alone() -> None:
    order: list[str] = []
    barrier = threading.Barrier(3)

    def rank(number: int) -> None:
        with first_on_host(number, lambda: barrier.wait(60)):
            order.append(f"{number} compiles")

    ranks = [threading.Thread(target=rank, args=(number,)) for number in (2, 1, 0)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert order[0] == "0 compiles" and sorted(order) == ["0 compiles", "1 compiles", "2 compiles"]
