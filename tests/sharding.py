"""Drafter ranks in processes of their own, for tests of what they sum and keep."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from draftline.config import PlacementSection
from draftline.monitor.heartbeat import Heart, Limits
from draftline.train.plan import World, make_plan
from draftline.train.ranks import Ranks


def in_ranks(size: int, home: Path, work: Callable[[Ranks], object]) -> list[object]:
    """What `work` returns on each of `size` sharded drafter ranks, gloo, forked from here."""
    for rank in range(size):
        (home / str(rank)).unlink(missing_ok=True)
    (home / "meet").unlink(missing_ok=True)
    processes = [get_context("fork").Process(target=be_rank, args=(r, size, home, work)) for r in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(home / str(rank), weights_only=False) for rank in range(size)]


def be_rank(rank: int, size: int, home: Path, work: Callable[[Ranks], object]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{home / 'meet'}", rank=rank, world_size=size)
    plan = make_plan(PlacementSection(drafters=size, sharded=True), World(size, size, "cpu"))
    heart = Heart(Limits(60.0, 60.0), None, None)
    ranks = Ranks(plan, plan.roles[rank], heart, ("here",) * size, drafters=dist.group.WORLD)
    torch.save(work(ranks), home / str(rank))
    dist.barrier()
    dist.destroy_process_group()
