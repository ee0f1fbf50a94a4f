"""Proxy tau: what one step's blocks say about decoding (SPEC 7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftline.drafter.anchors import Blocks
from draftline.drafter.losses import SlotOutcome
from draftline.drafter.step import MicroStep, tally
from reference import walk_tau

ZERO = torch.zeros(())


def micro_of(correct, supervised, anchor, keep, rank) -> MicroStep:
    outcome = SlotOutcome(torch.tensor(correct, dtype=torch.bool), torch.tensor(supervised, dtype=torch.bool))
    places = torch.tensor(anchor)
    blocks = Blocks(places, torch.zeros_like(places), torch.tensor(keep, dtype=torch.bool))
    return tally(ZERO, ZERO, outcome, blocks, torch.tensor(rank))


def test_sums_by_hand() -> None:
    """Row 0, eligible 4..11: from 4 three tokens are committed, over the anchor at 6; of the eligible 7 and 8 half are
    counted, at the rate of the anchor at 9, whose answer ends after three slots (no bonus). Row 1, eligible 1..5: half
    of 1, then one token from 2; the padded block counts nowhere."""
    right = [[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    known = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    rank = [[0] * 5 + [1, 2, 3, 4, 5, 6, 7, 8, 8], [0, 0, 1, 2, 3, 4, 5] + [5] * 7]
    micro = micro_of(right, known, [[4, 6, 9], [2, 0, 0]], [[1, 1, 1], [1, 0, 0]], rank)
    assert float(micro.committed) == (3 + 0.5 * 2 + 3) + (0.5 * 1 + 1)
    assert float(micro.verify_steps) == pytest.approx((2 + 0.5 * 2 / 3) + (0.5 * 1 / 1 + 1))
    assert int(micro.blocks) == 4
    assert micro.slot_correct.tolist() == [2, 4, 3, 3]
    assert micro.slot_count.tolist() == [4, 4, 4, 3]


def proxy_and_walk(easy: list[bool], size: int, share: float) -> tuple[float, float]:
    """(proxy tau over a share of the anchors, walked tau) of an answer whose easy tokens alone are drafted rightly."""
    answer = list(range(len(easy)))
    last = len(answer) - 1

    def draft_at(n: int) -> list[int]:
        return [n + k if easy[min(n + k, last)] else -1 for k in range(1, size)]

    sampled = np.flatnonzero(np.random.default_rng(1).random(last) < share)
    sampled = np.union1d([0], sampled)
    correct = [[d == n + k for k, d in enumerate(draft_at(n), 1)] for n in sampled]
    supervised = [[n + k <= last for k in range(1, size)] for n in sampled]
    micro = micro_of(correct, supervised, [sampled.tolist()], [[1] * len(sampled)], [list(range(last + 1)) + [last]])
    return float(micro.committed / micro.verify_steps), walk_tau(answer, draft_at, size)


def stretches(size: int) -> list[bool]:
    """An answer of easy and hard stretches, as text has them: tokens of a hard stretch are never drafted rightly."""
    rng = np.random.default_rng(size)
    easy: list[bool] = []
    while len(easy) < 6000:
        easy += [True] * int(rng.integers(60, 200)) + [False] * int(rng.integers(20, 90))
    return easy


@pytest.mark.parametrize("size", [5, 8, 16])
@pytest.mark.parametrize("kind", ["stretches", "scattered", "perfect", "hopeless"])
def test_over_all_anchors_proxy_tau_is_tau(kind: str, size: int) -> None:
    scattered = (np.random.default_rng(0).random(997) < 0.7).tolist()
    easy = {"stretches": stretches(size), "scattered": scattered, "perfect": [True] * 998, "hopeless": [False] * 998}
    proxy, tau = proxy_and_walk(easy[kind], size, share=1.0)
    assert proxy == pytest.approx(tau, rel=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_half_the_anchors_give_scattered_misses_within_an_eighth(share: float) -> None:
    easy = (np.random.default_rng(0).random(6000) < share).tolist()
    proxy, tau = proxy_and_walk(easy, 16, share=0.5)
    assert proxy == pytest.approx(tau, rel=0.12)


def test_half_the_anchors_give_long_stretches_far_nearer_than_the_plain_mean() -> None:
    """The extreme case: a hard stretch is a stop at every token, and half of those are not sampled."""
    easy = stretches(16)
    proxy, tau = proxy_and_walk(easy, 16, share=0.5)
    runs = [next((k for k in range(1, 16) if n + k >= 6000 or not easy[n + k]), 16) for n in range(5999)]
    assert np.mean(runs) > 2 * tau
    assert tau < proxy < 1.25 * tau
