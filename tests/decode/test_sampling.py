"""Sampled speculative decoding leaves the target's distribution as it is (SPEC 6): chi-square tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from builders import open_target, save_target, spec_for
from drafter_samples import random_drafter
from draftline.decode.chain import Limits, Sampler, decode_plain, decode_speculative
from draftline.target.load import Target
from trained import CPU, NO_STOP

Probabilities = dict[tuple[int, ...], float]
Verify = Callable[[Sampler, list[int], Tensor, Tensor], tuple[int, int]]
VERIFY: Verify = Sampler.verify
PROMPT = [0, 2, 4]


def deviations(found: Iterable[tuple[int, ...]], expected: Probabilities) -> float:
    """Chi-square of counts against probabilities, as standard deviations of a normal variable (Wilson and Hilferty).

    Outcomes expected fewer than 5 times are counted as one.
    """
    counts = Counter(found)
    assert counts.keys() <= expected.keys()
    total = sum(counts.values())
    cells = [(counts[key], total * p) for key, p in expected.items() if total * p >= 5]
    rest = (total - sum(c for c, _ in cells), total - sum(e for _, e in cells))
    cells += [rest] if rest[1] > 1 else []
    chi, freedom = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    return ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def accept_always(sampler: Sampler, drafts: list[int], _q: Tensor, p: Tensor) -> tuple[int, int]:
    return len(drafts), sampler.choose(p[-1:])[0]


def resample_from_p(sampler: Sampler, drafts: list[int], q: Tensor, p: Tensor) -> tuple[int, int]:
    accepted, following = VERIFY(sampler, drafts, q, p)
    return accepted, following if accepted == len(drafts) else sampler.choose(p[accepted : accepted + 1])[0]


def accept_the_argmax(sampler: Sampler, drafts: list[int], q: Tensor, p: Tensor) -> tuple[int, int]:
    return VERIFY(Sampler(0, 0, CPU), drafts, q, p)


def q_of_the_next_slot(sampler: Sampler, drafts: list[int], q: Tensor, p: Tensor) -> tuple[int, int]:
    return VERIFY(sampler, drafts, q.roll(-1, 0), p)


BROKEN = [accept_always, resample_from_p, accept_the_argmax, q_of_the_next_slot]


def tiny_target(folder) -> Target:
    return open_target(
        save_target(folder, seed=3, vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                    num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False)
    )  # fmt: skip


def tiny_drafter(target: Target):
    return random_drafter(
        spec_for(target, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                 num_key_value_heads=1, block_size=4, target_layer_ids=(0,))
    )  # fmt: skip


@torch.no_grad()
def exact(target: Target, prompt: list[int], length: int, temperature: float) -> Probabilities:
    """The target's probability of every continuation of `length` tokens, by its own forward over all of them."""
    outcomes = list(product(range(5), repeat=length))
    logits = target.model(input_ids=torch.tensor([prompt + list(o) for o in outcomes])).logits.double()
    logp = (logits / temperature).log_softmax(-1)[:, len(prompt) - 1 : -1]
    chosen = logp.gather(-1, torch.tensor(outcomes)[..., None]).squeeze(-1).sum(-1).exp()
    assert float(chosen.sum()) == pytest.approx(1, rel=1e-5)
    return dict(zip(outcomes, chosen.tolist(), strict=True))


def decoded(target: Target, temperature: float, decodes: int) -> tuple[list[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """(the first three tokens, how often each pattern of commits occurred) of speculative decodings of one prompt."""
    drafter, sampler = tiny_drafter(target), Sampler(temperature, 1, CPU)
    answers = [decode_speculative(target, drafter, PROMPT, Limits(3, NO_STOP), sampler) for _ in range(decodes)]
    return [tuple(answer.ids) for answer in answers], Counter(tuple(answer.committed) for answer in answers)


def test_three_tokens_are_distributed_as_the_target_says(tmp_path) -> None:
    target = tiny_target(tmp_path)
    found, committed = decoded(target, 0.4, 4000)
    assert committed.keys() == {(1, 1), (2,)} and min(committed.values()) > 400  # some accepted, some not
    expected = exact(target, PROMPT, 3, 0.4)
    assert sum(p * 4000 >= 5 for p in expected.values()) > 25
    assert abs(deviations(found, expected)) < 3.5
    assert deviations(found, exact(target, PROMPT, 3, 0.5)) > 5  # slightly flatter, and told apart


@pytest.mark.parametrize("broken", [accept_always, resample_from_p])
def test_a_broken_rule_is_found_out_in_real_decoding(broken: Verify, tmp_path, monkeypatch) -> None:
    target = tiny_target(tmp_path)
    monkeypatch.setattr(Sampler, "verify", broken)
    assert deviations(decoded(target, 0.4, 800)[0], exact(target, PROMPT, 3, 0.4)) > 5


def test_plain_sampling_is_distributed_as_the_target_says(tmp_path) -> None:
    target = tiny_target(tmp_path)
    sampler = Sampler(1.0, 1, CPU)
    found = [tuple(decode_plain(target, PROMPT, Limits(2, NO_STOP), sampler).ids) for _ in range(1000)]
    assert abs(deviations(found, exact(target, PROMPT, 2, 1.0))) < 3.5


# The rule by itself, over a made-up target: p of the tokens after each prefix, and three slots' q.

VOCABULARY, SLOTS = 4, 3


def tables() -> tuple[dict[tuple[int, ...], Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    prefixes = [prefix for n in range(SLOTS + 1) for prefix in product(range(VOCABULARY), repeat=n)]
    target = {prefix: 1.2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for prefix in prefixes}
    return target, 1.2 * torch.randn(SLOTS, VOCABULARY, generator=generator, dtype=torch.float64)


def first_three(verify: Verify, count: int) -> float:
    """Deviations of the first three tokens over `count` decodings whose verification is `verify`."""
    target, draft_logits = tables()
    sampler, found = Sampler(1.0, 2, CPU), []
    for _ in range(count):
        drafts = sampler.choose(draft_logits)
        logits = torch.stack([target[tuple(drafts[:k])] for k in range(SLOTS + 1)])
        accepted, following = verify(sampler, drafts, draft_logits, logits)
        tokens = [*drafts[:accepted], following]
        while len(tokens) < 3:
            tokens += sampler.choose(target[tuple(tokens)][None])
        found.append(tuple(tokens[:3]))
    expected = {
        outcome: math.prod(float(target[outcome[:k]].softmax(0)[outcome[k]]) for k in range(3))
        for outcome in product(range(VOCABULARY), repeat=3)
    }
    return deviations(found, expected)


def test_verification_leaves_the_distribution_alone() -> None:
    assert abs(first_three(VERIFY, 8000)) < 3.5


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_found_out(broken: Verify) -> None:
    assert first_three(broken, 2500) > 5


def test_a_draft_that_the_target_excludes_is_never_taken() -> None:
    sampler = Sampler(1.0, 0, CPU)
    p = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert {sampler.verify([1], torch.zeros(1, 2), p) for _ in range(200)} == {(0, 0)}


def test_a_draft_of_the_targets_own_distribution_is_always_taken() -> None:
    sampler, (target, _) = Sampler(0.7, 0, CPU), tables()
    logits = torch.stack([target[()], target[(0,)]])
    assert {sampler.verify([t], logits[:1], logits)[0] for t in range(VOCABULARY) for _ in range(200)} == {1}


def test_a_seed_makes_sampling_repeatable(tmp_path) -> None:
    target = tiny_target(tmp_path)
    drafter = tiny_drafter(target)

    def answer(seed: int) -> list[int]:
        return decode_speculative(target, drafter, [0, 2], Limits(12, NO_STOP), Sampler(1.0, seed, CPU)).ids

    assert answer(1) == answer(1) and answer(1) != answer(2)
