"""A target at its best speed on a GPU, in bfloat16: as near to its own float32 forward as transformers' bfloat16 is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from draftline.environment.compile_guard import CompileGuard
from draftline.target.capture import FeatureCapture, FlatFeatures
from draftline.target.fast_parts import FastParts
from draftline.target.load import Target, at_best_speed
from draftline.target.packing import UNLIMITED_TOKENS, Packing
from draftline.target.parts import find_parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LAYERS, HIDDEN = 4, 512
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 64,
}  # fmt: skip
MODELS = {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
    "mistral, window 64": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=64)),
    "gemma3, window 64": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, sliding_window=64)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, sliding_window=64)),
}
FUSED = {
    "qwen3": FastParts(4 * LAYERS + 1, LAYERS, LAYERS),
    "mistral, window 64": FastParts(2 * LAYERS + 1, LAYERS, LAYERS),
    "gemma3, window 64": FastParts(6 * LAYERS + 1, LAYERS, LAYERS),
    "gemma2": FastParts(4 * LAYERS + 1, LAYERS, LAYERS),
}
LENGTHS = [300, 1, 77, 129, 5, 200, 1030]


def target_of(model: Any, dtype: torch.dtype) -> Target:
    device = torch.device("cuda", torch.cuda.current_device())
    model = model.to(device, dtype).eval().requires_grad_(False)
    return Target(model, None, find_parts(model, device), "random", "random", frozenset(), device, dtype)


def spans() -> list[tuple[int, int]]:
    return list(zip(np.cumsum([0, *LENGTHS])[:-1].tolist(), LENGTHS, strict=True))


def features(target: Target, lengths_together: int, how: Packing) -> FlatFeatures:
    ids = np.random.default_rng(0).integers(5, 1000, sum(LENGTHS))
    return FeatureCapture(target, (0, 1, 3), True, lengths_together, how).capture(ids, spans())


def worst(found: FlatFeatures, expected: FlatFeatures) -> float:
    """Of the documents' and taps' errors, each relative to the whole of what is expected."""
    errors = []
    for begin, length in spans():
        here = slice(begin, begin + length)
        sides = [(*side.taps[here].float().chunk(3, -1), side.final[here].float()) for side in (found, expected)]
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(*sides, strict=True)]
    return max(errors)


@pytest.mark.parametrize("name", MODELS)
def test_features_at_best_speed(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().bfloat16()
    exact = features(target_of(deepcopy(model), torch.float32), 1, Packing(0, "alone"))
    plain = target_of(model, torch.bfloat16)
    own = worst(features(plain, 1, Packing(0, "alone")), exact)
    fast = at_best_speed(plain)
    assert fast.fast == FUSED[name]
    assert fast.packing == (Packing(0, "attention with softcap") if name == "gemma2" else Packing(UNLIMITED_TOKENS))
    padded, packed = (worst(features(fast, 2048, how), exact) for how in (Packing(0, "padded"), fast.packing))
    print(
        f"\n{name}: from float32 {own:.4f} transformers, {padded:.4f} fused and padded, {packed:.4f} as a run does it"
    )
    assert own < 0.03 and padded < 1.3 * own + 1e-3 and packed < 1.3 * own + 1e-3


def test_rows_of_other_lengths_compile_no_kernel() -> None:
    fast = at_best_speed(target_of(MODELS["qwen3"](), torch.bfloat16))
    capture = FeatureCapture(fast, (0, 3), want_final=True)
    rng, guard = np.random.default_rng(1), CompileGuard()
    guard.watch_kernels()
    for tokens in (512, 511, 1, 17, 640, 1000):
        with guard.steady(str):
            capture.capture(rng.integers(5, 1000, tokens), [(0, tokens)])
    assert guard.late_kernels == []
