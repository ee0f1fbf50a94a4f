"""A target whose layers lie on two GPUs is the same target: features, head and text are those of one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from builders import open_target, proven
from command import draftline_here
from draftline.config import TargetSection
from draftline.decode.chain import Limits, Sampler, decode_plain, decode_speculative
from draftline.decode.proofs import prove_cache
from draftline.evaluate.evaluation import load_drafter
from draftline.export.folder import read_drafter
from draftline.target.capture import FeatureCapture
from draftline.target.load import load_target
from family_models import DEPTH, save_family
from runs import write_recipe

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
FIRST = torch.device("cuda", 0)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "phi", "qwen3_5_text", "qwen2_5_vl"])
def test_layers_on_two_devices(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path / "target")
    alone = open_target(tmp_path / "target", dtype="float32")
    section = TargetSection(path=str(tmp_path / "target"), dtype="float32", device_map="auto")
    spread = load_target(section, FIRST)
    assert {next(layer.parameters()).device.index for layer in spread.parts.layers} == {0, 1}
    ids = np.random.default_rng(0).integers(5, 19, 40)
    assert proven(spread, ids.tolist()) < 1e-4
    assert prove_cache(spread, ids.tolist()) < 1e-4
    here, there = (
        FeatureCapture(target, tuple(range(DEPTH)), want_final=True).capture(ids, [(0, 25), (25, 15)])
        for target in (alone, spread)
    )
    assert there.taps.device == there.final.device == spread.parts.head.weight.device == FIRST
    torch.testing.assert_close(there.taps.cpu(), here.taps, rtol=1e-3, atol=1e-3)
    found, expected = spread.parts.head.logits(there.final), alone.parts.head.logits(here.final)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5_text"])
def test_a_run_on_a_spread_target(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path / "target")
    recipe = write_recipe(tmp_path, data={"sequence_length": 128}, target={"device_map": "auto", "dtype": "float32"})
    words = ["train.max_steps=2", "train.checkpoint_every=2", "train.anchors=16", "placement.device=cuda"]
    done = draftline_here("train", recipe, *words)
    assert done.code == 0, done.err
    section = TargetSection(path=str(tmp_path / "target"), dtype="float32", device_map="auto")
    target = load_target(section, FIRST)
    drafter = load_drafter(*read_drafter(tmp_path / "run" / "export")).to(FIRST)
    limits, sampler = Limits(24, target.stop_ids), Sampler(0, 0, FIRST)
    for prompt in ([5, 9, 11, 6], [7, 14]):
        plain = decode_plain(target, prompt, limits, sampler)
        assert decode_speculative(target, drafter, prompt, limits, sampler).ids == plain.ids
