"""The ranks of a run as one of them sees them: its role, its process groups, sums over the drafters, and agreement."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed's, with its type
from torch.distributed.device_mesh import DeviceMesh

from draftline.config import PlacementSection
from draftline.environment import variables
from draftline.errors import PeerLost, PlainError
from draftline.monitor.device_line import DeviceLine
from draftline.monitor.heartbeat import PATIENCE, Heart, Limits, Page, Watch
from draftline.monitor.standoff import Standoff
from draftline.train.plan import Plan, Role, World, make_plan
from draftline.train.rendezvous import meet

T = TypeVar("T")
BOARD_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Ranks:
    """`drafters` is the group that the gradients are summed over; None where there is one drafter."""

    plan: Plan
    role: Role
    heart: Heart
    hosts: tuple[str, ...]  # of every rank: ranks with the same name share a host
    drafters: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None  # of the shards of this rank's target replica; None where it is whole
    watch: Watch | None = None

    @property
    def first(self) -> bool:
        """Rank 0 logs, checkpoints, exports and speaks."""
        return self.role.rank == 0

    @property
    def size(self) -> int:
        return len(self.plan.roles)

    def sum_over_drafters(self, tensor: Tensor) -> None:
        """Sum in place; the order is fixed, so that a repeated run is the same run. On a GPU the host does not wait."""
        if self.drafters is None:
            return
        with self.collective("the other drafters' sums", tensor.device):
            dist.all_reduce(tensor, group=self.drafters)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collective("all ranks"):
            dist.all_gather_object(values, value)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; if any rank raises a PlainError all raise it, and none is left waiting."""
        result: list[T] = []
        failure: PlainError | None = None
        try:
            result.append(work())
        except PlainError as error:
            failure = error
        for other in self.gather(failure):
            if other is not None:
                raise other
        return result[0]

    def replica_mesh(self, device: torch.device) -> DeviceMesh | None:
        """The ranks that hold this rank's target replica together; None where it is whole."""
        return None if self.replica is None else DeviceMesh.from_group(self.replica, device.type)

    def replica_agrees(self, wanted: bool) -> bool:
        """What the replica's sending shard says."""
        if self.replica is None or self.role.target is None:
            return wanted
        said = [wanted]
        with self.collective("the replica's first shard"):
            dist.broadcast_object_list(said, self.plan.target_ranks(self.role.target)[0], group=self.replica)
        return said[0]

    def collective(self, what: str, device: torch.device | None = None) -> AbstractContextManager[None]:
        """Around one; device: of its tensors, None where it is of Python objects."""
        return Collective(self.heart, what, device is not None and device.type == "cuda")

    def leave(self) -> None:
        """Every rank arrives here at the end of a run that went well."""
        if self.size > 1:
            self.gather(None)
        if self.watch is not None:
            self.watch.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


class Collective(AbstractContextManager[None]):
    """Around a collective: the heart shows the wait, and torch's error for a lost peer gets its name."""

    def __init__(self, heart: Heart, what: str, on_device: bool) -> None:
        self.inner = heart.waiting(what, on_device)
        self.what = what

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.inner.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and "Expected" not in str(error):
            raise PeerLost(f"a rank was lost while waiting for {self.what}: {str(error).splitlines()[0]}") from error


def alone(placement: PlacementSection, device: torch.device) -> Ranks:
    """The one rank of a run that no launcher started."""
    plan = make_plan(placement, World(1, 1, device.type))
    heart = Heart(Limits(placement.stall_s, placement.start_up_s), None, None)
    return Ranks(plan, plan.roles[0], heart, (platform.node(),))


def join(placement: PlacementSection, device: torch.device) -> Ranks:
    """Become the rank that the launcher's environment names. Collective: every rank of the world calls it."""
    world = World(variables.world_size(), variables.local_world_size(), device.type)
    plan, rank = make_plan(placement, world), variables.rank()
    folder = Path(tempfile.mkdtemp(prefix="draftline-"))
    line = DeviceLine() if device.type == "cuda" else None
    limits = Limits(placement.stall_s, placement.start_up_s)
    heart = Heart(limits, folder / "heart", variables.error_file(), line)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = meet(placement.start_up_s)
    limit = timedelta(seconds=placement.start_up_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world.ranks, timeout=limit)
    cards: list[Any] = [None] * world.ranks
    dist.all_gather_object(cards, (f"{platform.node()}/{rank // world.ranks_per_host}", str(heart.path)))
    hosts = tuple(card[0] for card in cards)
    standoff = Standoff(board_of(store), rank, world.ranks, PATIENCE * placement.stall_s)
    watch = watch_neighbour(rank, hosts, [card[1] for card in cards], heart, standoff)
    dist.all_gather_object(cards, None)  # every page has been opened
    (folder / "heart").unlink()
    folder.rmdir()
    return with_groups(Ranks(plan, plan.roles[rank], heart, hosts, watch=watch))


def replan(ranks: Ranks, placement: PlacementSection, device: torch.device) -> Ranks:
    """The same ranks in the roles of another placement. Collective."""
    plan = make_plan(placement, World(ranks.size, variables.local_world_size(), device.type))
    return with_groups(replace(ranks, plan=plan, role=plan.roles[ranks.role.rank], drafters=None, replica=None))


def with_groups(ranks: Ranks) -> Ranks:
    """The process groups of a plan; every rank makes every group."""
    plan, role = ranks.plan, ranks.role
    drafters = dist.new_group(plan.drafter_ranks()) if plan.drafters > 1 else None
    replicas = [dist.new_group(plan.target_ranks(t)) for t in range(plan.targets) if plan.tensor_parallel > 1]
    return replace(
        ranks,
        drafters=drafters if role.drafter is not None else None,
        replica=replicas[role.target] if replicas and role.target is not None else None,
    )


def board_of(store: Store) -> Store:
    """The same store over a connection of its own, whose calls wait for seconds at most."""
    board: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub does not know it
    board.set_timeout(BOARD_TIMEOUT)
    return board


def watch_neighbour(
    rank: int, hosts: tuple[str, ...], hearts: list[str], own: Heart, standoff: Standoff | None
) -> Watch:
    """Each rank watches the next one of its host; the only rank of a host watches itself."""
    local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    neighbour = local[(local.index(rank) + 1) % len(local)]
    watch = Watch(Page(Path(hearts[neighbour])), own, standoff)
    watch.start()
    return watch
