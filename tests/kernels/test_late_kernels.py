"""Triton tells draftline's guard of every kernel that it compiles, and a warm step compiles none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_fused import SPECS, random_batch, random_step, spec_of

from draftline.drafter.losses import LossKind
from draftline.environment.compile_guard import CompileGuard
from draftline.train.warm_up import compile_kernels, random_features, warm_up

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter compiles nothing")


@pytest.mark.parametrize("kind", [("ce", "exponential"), ("kl", "dpace"), ("tv", "exponential")], ids="-".join)
def test_after_the_warm_up_no_batch_compiles_a_kernel(kind: tuple[str, str]) -> None:
    """Batches with other numbers of live blocks, which is where a kernel's arguments could change their kind."""
    spec, guard = spec_of(**SPECS["full"]), CompileGuard()
    step = random_step(spec, LossKind(*kind, gamma=7.0, alpha=0.5), "cuda", torch.bfloat16, fused=True)
    warm_up(step, [random_batch(np.random.default_rng(0), 2, 128, spec).packed], torch.bfloat16, guard)
    for seed in range(1, 12):
        packed = random_batch(np.random.default_rng(seed), 2, 128, spec).packed
        with guard.steady(str):
            step.forward_backward(random_features(step, packed, torch.bfloat16))
    assert guard.late_kernels == []


@pytest.mark.parametrize("kind", [("ce", "exponential"), ("kl", "dpace"), ("tv", "exponential")], ids="-".join)
def test_a_step_needs_no_kernel_but_those_compiled_together(kind: tuple[str, str]) -> None:
    block_size = {"ce": 6, "kl": 10, "tv": 12}[kind[0]]  # blocks that no other test here has compiled for
    spec, guard = spec_of(block_size=block_size), CompileGuard()
    guard.watch_kernels()
    step = random_step(spec, LossKind(*kind, gamma=7.0, alpha=0.5), "cuda", torch.bfloat16, fused=True)
    packed = random_batch(np.random.default_rng(0), 2, 128, spec).packed
    compile_kernels(step, packed, torch.bfloat16)
    assert all(p.grad is None for p in step.drafter.parameters())
    assert guard.kernels >= 4  # attention's, of these blocks
    with guard.steady(str):
        step.forward_backward(random_features(step, packed, torch.bfloat16))
    assert guard.late_kernels == []


@pytest.mark.parametrize("kind", [("ce", "exponential"), ("kl", "dpace"), ("tv", "exponential")], ids="-".join)
def test_a_warm_step_does_not_wait_for_the_device(kind: tuple[str, str]) -> None:
    spec = spec_of(**SPECS["full"])
    step = random_step(spec, LossKind(*kind, gamma=7.0, alpha=0.5), "cuda", torch.bfloat16, fused=True)
    batch = random_features(step, random_batch(np.random.default_rng(0), 2, 128, spec).packed, torch.bfloat16)
    step.forward_backward(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.forward_backward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
