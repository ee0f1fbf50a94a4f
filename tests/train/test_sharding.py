"""Masters, moments and summed gradients spread over ranks: the steps of one rank that holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter_samples import make_spec, random_drafter
from draftline.config import OptimSection
from draftline.drafter.model import Drafter
from draftline.train.optimizer import Optimizer
from draftline.train.ranks import Ranks
from draftline.train.reduction import Shards
from draftline.train.snapshot import take_snapshot
from sharding import in_ranks

STEPS = 5
SECTION = OptimSection(lr=0.01, warmup_share=0.0)


def gradients(drafter: Drafter, step: int, rank: int) -> list[Tensor]:
    """Whole numbers, which any order of summing adds up to the same; larger on later ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(1.0 + rank) * torch.randint(-8, 9, p.shape, generator=generator) for p in drafter.parameters()]


def spread_run(ranks: Ranks, dtype: torch.dtype) -> dict[str, object]:
    drafter = random_drafter(make_spec())
    shards = Shards(drafter, ranks, dtype)
    optimizer = Optimizer(shards.masters, SECTION, STEPS, shards.total_norm)
    norms = []
    for step in range(STEPS):
        shards.begin()
        for parameter, gradient in zip(drafter.parameters(), gradients(drafter, step, ranks.role.rank), strict=True):
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            parameter.grad.add_(gradient)
        shards.reduce()
        norms.append(float(optimizer.finish(torch.tensor(7.0))))
        shards.renew()
    taken = take_snapshot(drafter, optimizer, shards, keep=True)
    return {
        "norms": norms, "masters": taken.drafter, "moments": taken.optimizer, "own": shards.part.numel(),
        "copy": {name: p.detach().clone() for name, p in drafter.named_parameters()},
        "again": {key: shards.parts(taken.optimizer)[key].equal(t) for key, t in optimizer.state_tensors().items()},
    }  # fmt: skip


def whole_run(size: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    drafter = random_drafter(make_spec())
    optimizer, norms = Optimizer(drafter, SECTION, STEPS), []
    for step in range(STEPS):
        for parameter, *parts in zip(
            drafter.parameters(), *(gradients(drafter, step, rank) for rank in range(size)), strict=True
        ):
            parameter.grad = torch.stack(parts).sum(0)
        norms.append(float(optimizer.finish(torch.tensor(7.0))))
    return norms, {name: p.detach() for name, p in drafter.named_parameters()}, optimizer.state_tensors()


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (7, torch.bfloat16)], ids=str)
def test_it_takes_the_steps_of_a_whole_drafter(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    norms, masters, moments = whole_run(size)
    matrices = sum(value.numel() for value in masters.values() if value.dim() > 1)
    for found in in_ranks(size, tmp_path, lambda ranks: spread_run(ranks, dtype)):
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert found["own"] == -(-matrices // size) and (size != 7 or matrices % size)  # padded there
        assert found["masters"].keys() == masters.keys() and found["moments"].keys() == moments.keys()
        for name, value in masters.items():
            torch.testing.assert_close(found["masters"][name], value, rtol=1e-5, atol=1e-6)
            copy = found["masters"][name].to(dtype if value.dim() > 1 else torch.float32)
            assert torch.equal(found["copy"][name], copy)  # the masters' own rounding, bit for bit
        for name, value in moments.items():
            torch.testing.assert_close(found["moments"][name], value, rtol=1e-4, atol=1e-6)
        assert all(found["again"].values())
