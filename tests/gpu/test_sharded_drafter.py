"""A drafter spread over two GPUs: a replica's steps in bf16 to rounding, with less of it on each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftline.monitor.events import Step, read_events
from draftline.records import StepReport
from runs import write_recipe
from source_tree import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def trained(home: Path, name: str, dtype: str, sharded: bool) -> list[StepReport]:
    recipe = write_recipe(home, data={"sequence_length": 128}, target={"dtype": dtype})
    words = [f"train.out={home / name}", "placement.drafters=2", f"placement.sharded={str(sharded).lower()}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "draftline", "train", str(recipe), *words, "train.anchors=16"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(home / name / "events.jsonl").events
    return [logged.event.report for logged in events if isinstance(logged.event, Step)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_takes_the_steps_of_replicas(dtype: str, tmp_path: Path) -> None:
    whole, spread = (trained(tmp_path, name, dtype, name == "spread") for name in ("whole", "spread"))
    assert len(whole) == len(spread) == 8
    limit = 1e-2 if dtype == "bfloat16" else 1e-4
    assert [r.loss for r in spread] == pytest.approx([r.loss for r in whole], rel=limit)
    assert [r.grad_norm for r in spread] == pytest.approx([r.grad_norm for r in whole], rel=5 * limit)
    masters = load_file(tmp_path / "spread/checkpoints/step-0000008/drafter.safetensors")
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
