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


@pytest.mark.parametrize("size", [8, 16])
def test_the_harmonic_mean_predicts_the_walk_and_the_arithmetic_does_not(size: int) -> None:
    """An answer of easy and hard stretches: tokens of a hard stretch are never drafted rightly."""
    rng = np.random.default_rng(size)
    easy: list[bool] = []
    while len(easy) < 6000:
        easy += [True] * int(rng.integers(60, 200)) + [False] * int(rng.integers(20, 90))
    answer = list(range(len(easy)))
    last = len(answer) - 1

    def draft_at(n: int) -> list[int]:
        return [n + k if easy[min(n + k, last)] else -1 for k in range(1, size)]

    anchors = range(last)
    correct = [[d == n + k for k, d in enumerate(draft_at(n), 1)] for n in anchors]
    supervised = [[n + k <= last for k in range(1, size)] for n in anchors]
    micro = micro_of(correct, supervised, [[1] * len(correct)])
    proxy = float(micro.blocks) / float(micro.steps_sum)
    prefix = np.cumprod(np.array(correct) & np.array(supervised), axis=1).sum(1) + 1
    assert proxy == pytest.approx(1 / np.mean(1 / prefix), rel=1e-5)
    tau = walk_tau(answer, draft_at, size)
    assert 2 < tau < size / 2
    assert proxy == pytest.approx(tau, rel=0.04)
    assert prefix.mean() > 1.5 * tau
