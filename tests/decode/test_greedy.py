"""Greedy speculative decoding writes what the target alone writes (SPEC 6), and ends where it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import spec_for
from drafter_samples import GEOMETRIES, random_drafter
from draftline.decode.chain import Decoded, Limits, Sampler, decode_plain, decode_speculative
from trained import CPU, NO_STOP, counting, overfitted

HALF = 60  # steps after which drafts are accepted about every other time


def both(target, drafter, prompt: list[int], limits: Limits) -> tuple[Decoded, Decoded]:
    return (
        decode_speculative(target, drafter, prompt, limits, Sampler(0, 0, CPU)),
        decode_plain(target, prompt, limits, Sampler(0, 0, CPU)),
    )


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 32, int(n)).tolist() for n in rng.integers(1, 20, count)]


@pytest.mark.parametrize("source", ["random", "half trained", "overfitted"])
def test_twenty_prompts_token_for_token(source: str) -> None:
    """Ten prompts of the training data and ten others, 24 tokens each, stop token 3 included."""
    sample = overfitted(300 if source == "overfitted" else HALF)
    target = sample.trained.target
    drafter = random_drafter(spec_for(target, mask_token_id=31)) if source == "random" else sample.trained.drafter
    counts: list[int] = []
    for prompt in sample.prompts + prompts(10, seed=5):
        speculative, plain = both(target, drafter, prompt, Limits(24, frozenset({3})))
        assert speculative.ids == plain.ids
        assert 1 + sum(speculative.committed) == len(speculative.ids)
        assert plain.committed == [1] * (len(plain.ids) - 1)
        counts += speculative.committed
    assert 1 <= min(counts) <= max(counts) <= 5
    if source == "half trained":
        assert set(counts) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", ["sliding", "mixed", "causal everywhere", "half rope"])
def test_any_geometry_of_drafter_leaves_the_text_alone(name: str) -> None:
    target = overfitted(HALF).trained.target
    drafter = random_drafter(spec_for(target, mask_token_id=31, **GEOMETRIES[name]))
    for prompt in prompts(3, seed=6):
        speculative, plain = both(target, drafter, prompt, Limits(20, NO_STOP))
        assert speculative.ids == plain.ids


@pytest.mark.parametrize("stop", range(7))
def test_a_stop_token_inside_accepted_drafts_ends_the_answer(stop: int) -> None:
    """After ... 5, 6 the target counts 0, 1, 2, ...; the drafter is always right, so most stops lie inside a draft."""
    speculative, plain = both(counting().target, counting().drafter, [*range(7)] * 2, Limits(30, frozenset({stop})))
    assert speculative.ids == plain.ids == list(range(stop + 1))
    assert speculative.committed == ([] if stop == 0 else [stop] if stop <= 5 else [5, 1])


@pytest.mark.parametrize("limit", range(1, 14))
def test_the_limit_cuts_accepted_drafts(limit: int) -> None:
    speculative, plain = both(counting().target, counting().drafter, [*range(7)] * 2, Limits(limit, NO_STOP))
    assert speculative.ids == plain.ids == [t % 7 for t in range(limit)]
    whole, rest = divmod(limit - 1, 5)
    assert speculative.committed == [5] * whole + [rest] * (rest > 0)


def test_a_right_draft_after_a_wrong_one_is_not_taken() -> None:
    """The target says 1, 2, 3, 4 after the anchor and the drafts."""
    sampler, target = Sampler(0, 0, CPU), torch.eye(10)[[1, 2, 3, 4]]
    assert sampler.verify([1, 2, 3], target[:3], target) == (3, 4)
    assert sampler.verify([1, 9, 3], target[:3], target) == (1, 2)
    assert sampler.verify([9, 2, 3], target[:3], target) == (0, 1)


def test_decoding_is_the_same_whatever_the_caches_held_before() -> None:
    """Every answer begins with caches of its own."""
    sample = overfitted(HALF).trained
    text = prompts(2, seed=7)
    alone = both(sample.target, sample.drafter, text[1], Limits(12, NO_STOP))[0]
    both(sample.target, sample.drafter, text[0], Limits(12, NO_STOP))
    again = both(sample.target, sample.drafter, text[1], Limits(12, NO_STOP))[0]
    assert alone == again
