"""Every family the whole way: parts proven, a few steps trained, exported, decoded; text equal to the target's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from builders import open_target, proven
from command import draftline_here
from draftline.decode.chain import Limits, Sampler, decode_plain, decode_speculative
from draftline.decode.models import CachedTarget
from draftline.decode.proofs import prove_cache
from draftline.drafter.model import Drafter
from draftline.evaluate.evaluation import load_drafter
from draftline.export.folder import read_drafter
from draftline.target.capture import FeatureCapture
from draftline.target.load import Target
from family_models import DEPTH, FAMILIES, GEMMA_ROPE, HALF_ROPE, LLAMA3_ROPE, ROPE, VOCABULARY, save_family
from runs import write_recipe

CPU = torch.device("cpu")
HALF = HALF_ROPE["rope_parameters"]
ROPES = {  # of full attention, and without what places images
    "llama": LLAMA3_ROPE, "gemma3_text": GEMMA_ROPE["full_attention"], "gemma3": GEMMA_ROPE["full_attention"],
    "phi": HALF, "phi3": HALF, "qwen3_next": HALF, "qwen3_5_text": HALF,
}  # fmt: skip
ANSWER_TOKENS = 24  # with the prompt more than twice the sliding windows of 8


@dataclass(frozen=True)
class Family:
    name: str
    target: Target
    drafter: Drafter  # of the export
    summary: dict


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory):
    """Trained once for all tests of a family."""

    @cache
    def family(name: str) -> Family:
        home = tmp_path_factory.mktemp(name)
        save_family(name, home / "target")
        recipe = write_recipe(home, eval={"prompts": str(home / "data.jsonl"), "max_prompts": 2, "max_new_tokens": 12})
        done = draftline_here("train", recipe, "train.max_steps=3", "train.checkpoint_every=3", "optim.lr=1.0e-2")
        assert done.code == 0, done.err
        spec, tensors = read_drafter(home / "run" / "export")
        summary = json.loads((home / "run" / "summary.json").read_text())
        return Family(name, open_target(home / "target"), load_drafter(spec, tensors), summary)

    return family


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, homes) -> Family:
    return homes(request.param)


def texts(count: int, seed: int, shortest: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 19, int(n)).tolist() for n in rng.integers(shortest, 20, count)]


def test_trained_exported_and_decoded(family: Family) -> None:
    assert family.summary["steps"] == 3
    [report] = family.summary["evaluations"]
    assert report["same_text_share"] == 1.0 and report["tokens"] > 2
    spec = family.drafter.spec
    words = len(family.target.tokenizer)
    assert (spec.num_target_layers, spec.hidden_size, spec.mask_token_id) == (DEPTH, 64, words)  # the first padding row
    assert spec.vocab_size == (VOCABULARY if words == 19 else 1700)
    assert spec.rope_parameters == ROPES.get(family.name, ROPE["rope_parameters"])


def test_parts_and_cache_are_proven(family: Family) -> None:
    target, (ids,) = family.target, texts(1, seed=1, shortest=14)
    assert len(target.parts.layers) == DEPTH
    assert proven(target, ids) < 1e-5
    assert prove_cache(target, ids) < 1e-4


def test_capture_is_what_the_model_says_of_each_text_alone(family: Family) -> None:
    """Three texts padded in one forward: taps of all layers but the last from the model's `hidden_states`, logits from
    its own forward."""
    target, documents = family.target, texts(3, seed=2)
    lengths = [len(ids) for ids in documents]
    spans = [(sum(lengths[:n]), lengths[n]) for n in range(3)]
    features = FeatureCapture(target, tuple(range(DEPTH)), want_final=True).capture(np.concatenate(documents), spans)
    for ids, (start, length) in zip(documents, spans, strict=True):
        here = slice(start, start + length)
        with torch.no_grad():
            own = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        for tap, state in zip(features.taps[here].chunk(DEPTH, -1)[:-1], own.hidden_states[1:-1], strict=True):
            assert distance(tap, state[0]) < 1e-4
        assert distance(target.parts.head.logits(features.final[here]), own.logits[0]) < 1e-4
        torch.testing.assert_close(target.embed(torch.tensor([ids])), own.hidden_states[0], rtol=1e-6, atol=1e-6)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of a token's vector, relative to its length."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def generated(target: Target, prompt: list[int]) -> list[int]:
    settings = GenerationConfig(do_sample=False, max_new_tokens=ANSWER_TOKENS, eos_token_id=3, pad_token_id=1)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = target.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt) :].tolist()


def test_text_is_transformers_own_greedy_text(family: Family) -> None:
    limits, distinct = Limits(ANSWER_TOKENS, family.target.stop_ids), set()
    for prompt in texts(3, seed=3):
        expected = generated(family.target, prompt)
        sampler = Sampler(0, 0, CPU)
        assert decode_plain(family.target, prompt, limits, sampler).ids == expected
        assert decode_speculative(family.target, family.drafter, prompt, limits, sampler).ids == expected
        distinct |= set(expected)
    assert len(distinct) > 3  # not one token over and over


def test_a_rejected_draft_leaves_no_trace(family: Family) -> None:
    """After each length of accepted prefix, the next logits and taps are those of a forward without a cache."""
    prompt, block, following = texts(1, seed=4)[0] + [7, 9], [5, 11, 8, 14, 6], [12, 10]
    verifier = CachedTarget(family.target, (0, DEPTH - 1))
    verifier.forward(prompt, logits_for=1)
    text = prompt
    for accepted in (0, 2, 4, 5, 1):
        verifier.forward(block, logits_for=len(block))
        verifier.drop_last(len(block) - accepted)
        text = text + block[:accepted]
        logits, taps = verifier.forward(following, logits_for=2)
        with torch.no_grad():
            own = family.target.model(input_ids=torch.tensor([text + following]), output_hidden_states=True)
        torch.testing.assert_close(logits, own.logits[0, -2:], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(taps[0, :, :64], own.hidden_states[1][0, -2:], rtol=1e-3, atol=2e-3)
        verifier.drop_last(1)
        text = text + following[:1]
