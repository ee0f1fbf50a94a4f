"""What a target's parts are replaced by is what they were, family by family; what cannot be proven stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from torch import Tensor, nn

from builders import open_target
from draftline.kernels import inference, pointwise
from draftline.target import fast_parts
from draftline.target.capture import FeatureCapture
from draftline.target.fast_parts import FastParts, activation_of, fuse_parts
from draftline.target.load import Target, at_best_speed
from draftline.target.packing import UNLIMITED_TOKENS, Packing
from family_models import DEPTH, save_family

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EXPECTED = {
    "llama": FastParts(2 * DEPTH + 1, DEPTH, DEPTH),
    "qwen3": FastParts(4 * DEPTH + 1, DEPTH, DEPTH),
    "gemma2": FastParts(4 * DEPTH + 1, DEPTH, DEPTH),  # norms store their weight less one; gated by GELU
    "phi": FastParts(0, 0, DEPTH),  # LayerNorms and a plain MLP; half of each head is turned, cut out beforehand
    "phi3": FastParts(2 * DEPTH + 1, 0, DEPTH),  # gate and up in one matrix; its function turns the half itself
    "cohere": FastParts(0, DEPTH, 0),  # neighbours are turned, not halves
    "qwen3_moe": FastParts(4 * DEPTH + 1, 0, DEPTH),
    "qwen3_next": FastParts(2 * DEPTH + 1 + DEPTH, DEPTH, DEPTH // 2),  # recurrent layers turn nothing
}


def opened(family: str, folder: Path) -> Target:
    return at(open_target(save_family(family, folder)))


def at(target: Target) -> Target:
    target.model.to(DEVICE)
    return replace(target, device=DEVICE)


@torch.no_grad()
def states(target: Target) -> Tensor:
    ids = torch.randint(5, 19, (3, 21), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    state: Tensor = target.parts.decoder(input_ids=ids, use_cache=False).last_hidden_state
    return state


def replaced(target: Target) -> list[str]:
    return [name for name, module in target.model.named_modules() if "forward" in vars(module)]


def counting(ran: Counter[str], part: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        ran[part] += 1
        return kernel(*args)

    return run


@pytest.mark.parametrize("family", EXPECTED)
def test_a_familys_states_with_its_parts_replaced(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = opened(family, tmp_path)
    before, weights = states(target), {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    found = fuse_parts(target.parts, DEVICE)
    assert found == EXPECTED[family]
    assert len(replaced(target)) == found.norms + found.mlps + found.rotations
    ran = Counter[str]()
    for part, (module, name, _) in WRONG.items():
        monkeypatch.setattr(module, name, counting(ran, part, getattr(module, name)))
    torch.testing.assert_close(states(target), before, rtol=1e-4, atol=1e-4)
    assert FastParts(**ran) == found
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.model.state_dict().items())


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3"])
def test_a_capture_at_best_speed_is_the_capture_of_each_text_alone(family: str, tmp_path: Path) -> None:
    plain = open_target(save_family(family, tmp_path))
    spans, ids = (
        [(0, 30), (30, 2), (33, 17)],
        np.random.default_rng(0).integers(5, 19, 50),
    )
    expected = FeatureCapture(plain, (0, 2), want_final=True, tokens_per_forward=1).capture(ids, spans)
    fast = at_best_speed(at(plain))
    assert fast.fast.rotations == DEPTH
    if DEVICE.type == "cpu":  # the GPU's attention takes no float32
        assert fast.packing == Packing(UNLIMITED_TOKENS)
    found = FeatureCapture(fast, (0, 2), want_final=True, tokens_per_forward=64).capture(ids, spans)
    for mine, own in ((found.taps.cpu(), expected.taps), (found.final.cpu(), expected.final)):
        assert float((mine - own).norm() / own.norm()) < 1e-5 and not mine[32].any()


def test_the_familys_own_module_and_other_models_of_it_are_as_before(tmp_path: Path) -> None:
    own, forward = llama.apply_rotary_pos_emb, llama.LlamaAttention.forward
    one, other = opened("llama", tmp_path / "one"), opened("llama", tmp_path / "other")
    assert fuse_parts(one.parts, DEVICE).rotations == DEPTH
    assert llama.apply_rotary_pos_emb is own and llama.LlamaAttention.forward is forward
    assert replaced(other) == [] and other.parts.layers[0].self_attn.forward.__func__ is forward


def wrong_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotation(q, k, cos, -sin)


def wrong_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return product(gate, up, activation).mul_(1.03)


def wrong_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return norm(x, weight, eps + 0.1, offset)


rotation, product, norm = inference.rotate, inference.gated, pointwise.rms_norm
WRONG = {
    "rotations": (inference, "rotate", wrong_rotation),
    "mlps": (inference, "gated", wrong_product),
    "norms": (pointwise, "rms_norm", wrong_norm),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_kernel_that_gives_something_else_is_not_used(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened("qwen3", tmp_path)
    before = states(target)
    monkeypatch.setattr(*WRONG[part])
    assert fuse_parts(target.parts, DEVICE) == replace(EXPECTED["qwen3"], **{part: 0})
    torch.testing.assert_close(states(target), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", WRONG)
def test_what_no_trial_of_a_part_noticed_is_taken_back(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = opened("qwen3", tmp_path)
    before = states(target)
    monkeypatch.setattr(*WRONG[part])
    monkeypatch.setattr(fast_parts, "alike", lambda _found, _expected: True)
    found = fuse_parts(target.parts, DEVICE)
    assert (found.norms, found.mlps, found.rotations) == (0, 0, 0)
    assert found.text.startswith("none: together they change its states by ")
    assert replaced(target) == [] and torch.equal(states(target), before)


def test_the_two_kinds_of_gelu_are_told_apart(tmp_path: Path) -> None:
    kinds = (nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU())
    assert [activation_of(kind, DEVICE) for kind in kinds] == [None, "gelu_tanh", None, "silu"]
    target = opened("llama", tmp_path)
    for layer, act in zip(target.parts.layers, kinds, strict=True):
        layer.mlp.act_fn = act
    before = states(target)
    assert fuse_parts(target.parts, DEVICE).mlps == 2
    assert ["forward" in vars(layer.mlp) for layer in target.parts.layers] == [False, True, False, True]
    torch.testing.assert_close(states(target), before, rtol=1e-4, atol=1e-4)


def test_linears_that_are_not_plain_are_left_alone(tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        """As an adapter or a quantised layer is one."""

    target = opened("llama", tmp_path)
    layers: Any = target.parts.layers
    layers[0].mlp.up_proj.__class__ = Adapted
    layers[1].mlp.down_proj.bias = nn.Parameter(torch.ones(64, device=DEVICE), requires_grad=False)
    layers[2].self_attn.forward = layers[2].self_attn.forward  # as accelerate wraps it
    assert fuse_parts(target.parts, DEVICE) == replace(EXPECTED["llama"], mlps=DEPTH - 2, rotations=DEPTH - 1)
