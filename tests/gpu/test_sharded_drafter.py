"""A drafter spread over two GPUs: a replica's steps in bf16 to rounding, with less of it on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_gpus import steps_of

from runs import STEPS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(("dtype", "products"), [("bfloat16", "plain"), ("float32", "plain"), ("bfloat16", "fp8")])
def test_it_takes_the_steps_of_replicas(dtype: str, products: str, tmp_path: Path) -> None:
    words = ["placement.drafters=2", f"train.products={products}"]
    whole = steps_of(tmp_path, "whole", dtype, *words)
    spread = steps_of(tmp_path, "spread", dtype, *words, "placement.sharded=true")
    assert len(whole) == len(spread) == STEPS
    limit = 1e-2 if dtype == "bfloat16" else 1e-4
    assert [r.loss for r in spread] == pytest.approx([r.loss for r in whole], rel=limit)
    assert [r.grad_norm for r in spread] == pytest.approx([r.grad_norm for r in whole], rel=5 * limit)
    masters = load_file(tmp_path / "spread/checkpoints/step-0000008/drafter.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
