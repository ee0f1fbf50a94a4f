"""The warm-up changes nothing, and what is compiled after it, or in another thread, is noticed by name."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
import torch

from drafter_samples import features, make_spec, make_step, random_document
from draftline.drafter.losses import LossKind
from draftline.environment.compile_guard import CompileGuard
from draftline.environment.switch_watch import SwitchWatch
from draftline.errors import RunError
from draftline.records import FeatureBatch
from draftline.train.process_alarms import ProcessAlarms
from draftline.train.warm_up import random_features, shapes_of, warm_up

SPEC = make_spec()
KIND = LossKind("kl", "dpace", None, 0.5)
KERNEL = "statistics_kernel[num_warps=4](LOGITS: ('*bf16', 'D'), LSE: ('*fp32', None))"


def batch(length: int, index: int = 0) -> FeatureBatch:
    rng = np.random.default_rng(index)
    return features([[random_document(rng, SPEC, 20, 4)]], length, index)


def test_the_step_after_a_warm_up_is_bit_for_bit_the_step_without_one() -> None:
    warmed, plain = make_step(SPEC, KIND, anchors=8), make_step(SPEC, KIND, anchors=8)
    state = torch.get_rng_state()
    assert warm_up(warmed, [batch(32).packed, batch(48).packed], torch.float32, CompileGuard()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, p in warmed.drafter.named_parameters() if p.grad is not None] == []
    found, expected = (step.forward_backward(batch(32, index=5)) for step in (warmed, plain))
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))
    pairs = zip(warmed.drafter.parameters(), plain.drafter.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def test_random_features_have_the_shapes_and_dtype_of_real_ones_and_are_not_zeros() -> None:
    real, made = batch(32), random_features(make_step(SPEC, KIND), batch(32).packed, torch.bfloat16)
    assert real.final is not None and made.final is not None
    assert (made.taps.shape, made.final.shape) == (real.taps.shape, real.final.shape)
    assert made.taps.dtype == torch.bfloat16
    assert (made.taps != 0).double().mean() > 0.99  # torch 2.11 draws bf16 coarsely
    assert (
        random_features(make_step(SPEC, LossKind("ce", "dpace", None, 0.5)), real.packed, torch.float32).final is None
    )


def test_a_step_in_which_torch_compiles_ends_the_run_and_names_its_shapes() -> None:
    guard, longer = CompileGuard(), batch(48)
    with pytest.raises(RunError) as caught, guard.steady(partial(shapes_of, longer)):
        torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
    assert caught.value.what == "a step of ids [1, 48], taps [1, 48, 96] float32 made torch compile: 1 graphs"
    with guard.steady(str):
        make_step(SPEC, KIND, anchors=8).forward_backward(longer)


def test_a_kernel_that_triton_compiles_in_a_warm_run_is_an_alarm_once_with_name_and_arguments() -> None:
    """The guard's side of Triton's hook; tests/kernels has the hook itself where there is a GPU."""
    guard, raised = CompileGuard(), []
    alarms = ProcessAlarms(SwitchWatch([], torch.device("cpu")), guard)
    alarms.start(raised.extend)
    guard.note_kernel(repr="rms_norm_kernel", key="k", already_compiled=False)  # in the warm-up
    alarms.look_at_kernels("by step 0")
    with guard.steady(str):
        guard.note_kernel(repr=KERNEL, key="k", already_compiled=False)
    alarms.look_at_kernels("by step 7")
    alarms.look_at_kernels("by step 8")
    (alarm,) = raised
    assert guard.kernels == 2
    assert (alarm.name, alarm.evidence) == (
        "late-kernels",
        f"1 kernels compiled by step 7, after the warm-up: {KERNEL}",
    )


def test_another_thread_is_refused() -> None:
    guard, said = CompileGuard(), []

    def call() -> None:
        try:
            with guard.steady(str):
                said.append("entered")
        except RunError as error:
            said.append(error.what)

    thread = threading.Thread(target=call, name="prefetch")
    thread.start()
    thread.join()
    assert said == ["thread prefetch took a training step, which belongs to thread MainThread"]
