"""Proxy tau: what one step's blocks say about decoding (SPEC 7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftline.drafter.losses import SlotOutcome
from draftline.drafter.step import tally
from reference import walk_tau

ZERO = torch.zeros(())


def micro_of(correct, supervised, keep):
    outcome = SlotOutcome(torch.tensor(correct, dtype=torch.bool), torch.tensor(supervised, dtype=torch.bool))
    return tally(ZERO, ZERO, outcome, torch.tensor(keep, dtype=torch.bool))


def test_sums_by_hand() -> None:
    """Lengths 3 (then a miss), 1, 4 (end of document at slot 3), and a padded block that counts nowhere."""
    correct = [[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    supervised = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    micro = micro_of(correct, supervised, [[1, 1], [1, 0]])
    assert float(micro.steps_sum) == pytest.approx(1 / 3 + 1 + 1 / 4)
    assert int(micro.blocks) == 3
    assert micro.slot_correct.tolist() == [2, 3, 2, 2]
    assert micro.slot_count.tolist() == [3, 3, 3, 2]


def means_and_walk(easy: list[bool], size: int) -> tuple[float, float, float]:
    """(harmonic mean, arithmetic mean, walked tau) of an answer whose easy tokens alone are drafted rightly."""
    answer = list(range(len(easy)))
    last = len(answer) - 1

    def draft_at(n: int) -> list[int]:
        return [n + k if easy[min(n + k, last)] else -1 for k in range(1, size)]

    correct = [[d == n + k for k, d in enumerate(draft_at(n), 1)] for n in range(last)]
    supervised = [[n + k <= last for k in range(1, size)] for n in range(last)]
    micro = micro_of(correct, supervised, [[1] * last])
    prefix = np.cumprod(np.array(correct) & np.array(supervised), axis=1).sum(1) + 1
    proxy = float(micro.blocks) / float(micro.steps_sum)
    assert proxy == pytest.approx(1 / np.mean(1 / prefix), rel=1e-5)
    return proxy, float(prefix.mean()), walk_tau(answer, draft_at, size)


@pytest.mark.parametrize("size", [8, 16])
def test_the_harmonic_mean_predicts_the_walk_and_the_arithmetic_does_not(size: int) -> None:
    """An answer of easy and hard stretches, as text has them: tokens of a hard stretch are never drafted rightly."""
    rng = np.random.default_rng(size)
    easy: list[bool] = []
    while len(easy) < 6000:
        easy += [True] * int(rng.integers(60, 200)) + [False] * int(rng.integers(20, 90))
    harmonic, arithmetic, tau = means_and_walk(easy, size)
    assert 2 < tau < size / 2
    assert harmonic == pytest.approx(tau, rel=0.04)
    assert arithmetic > 1.5 * tau


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_scattered_misses_lie_between_the_means(share: float) -> None:
    """Misses that come singly: the walk lands behind each of them, and the harmonic mean is too cautious."""
    easy = (np.random.default_rng(0).random(6000) < share).tolist()
    harmonic, arithmetic, tau = means_and_walk(easy, 16)
    assert harmonic < 0.9 * tau
    assert arithmetic == pytest.approx(tau, rel=0.04)
