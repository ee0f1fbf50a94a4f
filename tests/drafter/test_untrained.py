"""A drafter's first values: normal, of one seed, and the same bits however many threads draw them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import draftline.drafter.model as model
from drafter_samples import GEOMETRIES, make_spec
from draftline.drafter.model import untrained


def test_matrices_are_normal_biases_zero_and_norms_one() -> None:
    drafter = untrained(make_spec(**GEOMETRIES["biases"], hidden_size=256, intermediate_size=512), seed=3, std=0.05)
    counted = set()
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.requires_grad and parameter.is_leaf
        kind = "matrix" if parameter.dim() == 2 else name.rsplit(".", 1)[-1]
        counted.add(kind)
        if kind == "matrix":
            z = parameter.detach().double().flatten() / 0.05
            error = 5 / z.numel() ** 0.5  # five standard errors; z^2 spreads sqrt(2) wider, z^4 sqrt(96)
            assert abs(z.mean()) < error
            assert abs(z.square().mean() - 1) < error * 2**0.5
            assert abs(z.pow(4).mean() - 3) < error * 96**0.5
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if kind == "bias" else 1.0))
    assert counted == {"matrix", "bias", "weight"}


def test_no_two_matrices_of_any_two_seeds_share_their_numbers() -> None:
    """Not even seed 0's second and seed 1's first, as seed + number would have it."""
    spec = make_spec()
    drawn = [
        p.detach().flatten()[:64] for seed in (0, 1, 2) for p in untrained(spec, seed).parameters() if p.dim() == 2
    ]
    assert len(drawn) == 3 * (1 + 7 * spec.num_hidden_layers)
    for one, other in itertools.combinations(drawn, 2):
        assert torch.isin(one, other).sum() < 4  # of 64: chance alone lets a few of 24 random bits meet


def test_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(hidden_size=256, intermediate_size=1024)
    several = untrained(spec, seed=7).state_dict()
    monkeypatch.setattr(model, "ThreadPoolExecutor", partial(ThreadPoolExecutor, max_workers=1))
    one = untrained(spec, seed=7).state_dict()
    assert several.keys() == one.keys()
    assert all(torch.equal(several[name], one[name]) for name in one)
    assert not torch.equal(several["fc.weight"], untrained(spec, seed=8).state_dict()["fc.weight"])
