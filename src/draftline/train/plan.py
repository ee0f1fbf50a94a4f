"""The plan: a pure function from a recipe's placement and a world of ranks to what each rank is. No torch here.

Ranks are numbered drafters first, then the target replicas, shard by shard; rank 0 is always a drafter: it logs,
checkpoints, exports and evaluates. Micro-batch i comes from target replica i mod T and goes to drafter i mod D, so what
is trained depends on D alone and never on timing or on T.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftline.config import PlacementSection
from draftline.errors import InputError


@dataclass(frozen=True)
class World:
    """Ranks of a run: `ranks` in all, `ranks_per_host` on each host, each with one `device` ("cpu" or "cuda")."""

    ranks: int
    ranks_per_host: int
    device: str

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)


@dataclass(frozen=True)
class Role:
    """What one rank is: number of its drafter and of its target replica, None where it has none."""

    rank: int
    host: int
    device: str  # "cpu", or "cuda:2" as numbered on its host
    drafter: int | None
    target: int | None
    shard: int = 0  # of the target replica's tensor-parallel ranks

    @property
    def name(self) -> str:
        target = "" if self.target is None else f"target {self.target}"
        drafter = "" if self.drafter is None else f"drafter {self.drafter}"
        return " + ".join(part for part in (target, drafter) if part) + (f" shard {self.shard}" if self.shard else "")

    @property
    def captures_for_others(self) -> bool:
        return self.drafter is None


@dataclass(frozen=True)
class Plan:
    kind: str  # "colocated" or "split"
    roles: tuple[Role, ...]
    targets: int  # T
    drafters: int  # D
    tensor_parallel: int
    sharded: bool

    @property
    def text(self) -> str:
        if self.kind == "colocated":
            return f"colocated on {self.drafters}"
        shards = f" of {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        return f"split, {self.targets} capturing{shards} and {self.drafters} training"

    def drafter_ranks(self) -> list[int]:
        return [role.rank for role in self.roles if role.drafter is not None]

    def target_ranks(self, target: int) -> list[int]:
        """Ranks of one target replica, its sending shard first."""
        return [role.rank for role in self.roles if role.target == target]


def make_plan(placement: PlacementSection, world: World) -> Plan:
    """What every rank of `world` is. Raises InputError where the placement asks for other ranks than there are.

    Kind `auto` begins as colocated, for every rank measures both stages, and is planned again (see `auto.py`).
    """
    targets, drafters = sizes(placement, world.ranks)
    split = placement.kind == "split"
    roles = []
    for rank in range(world.ranks):
        host, local = divmod(rank, world.ranks_per_host)
        device = "cpu" if world.device == "cpu" else f"cuda:{local}"
        if not split:
            roles.append(Role(rank, host, device, drafter=rank, target=rank))
        elif rank < drafters:
            roles.append(Role(rank, host, device, drafter=rank, target=None))
        else:
            target, shard = divmod(rank - drafters, placement.tensor_parallel)
            roles.append(Role(rank, host, device, drafter=None, target=target, shard=shard))
    kind = "split" if split else "colocated"
    return Plan(kind, tuple(roles), targets, drafters, placement.tensor_parallel, placement.sharded and drafters > 1)


def sizes(placement: PlacementSection, ranks: int) -> tuple[int, int]:
    """(target replicas, drafter ranks) that fill `ranks` exactly."""
    if placement.kind != "split":
        if placement.drafters not in (None, ranks):
            raise InputError(
                f"placement.drafters {placement.drafters} and a world of {ranks} ranks",
                "start as many ranks as the recipe names, or leave placement.drafters out",
            )
        return ranks, ranks
    shards, targets, drafters = placement.tensor_parallel, placement.targets, placement.drafters
    if drafters is None:
        drafters = ranks - (targets or 0) * shards
    if targets is None:
        targets = (ranks - drafters) // shards
    if drafters < 1 or targets < 1 or targets * shards + drafters != ranks:
        raise InputError(
            f"placement split: {targets} targets of {shards} ranks and {drafters} drafters do not fill {ranks} ranks",
            "set placement.targets, placement.drafters and placement.tensor_parallel to fit, or start other ranks",
        )
    return targets, drafters


def ranks_wanted(placement: PlacementSection, devices: int, micro_batches_per_step: int) -> int:
    """Ranks that one host starts by itself: what the recipe names, else one for each of its `devices` that has work."""
    if placement.kind == "colocated":
        return placement.drafters or min(devices, micro_batches_per_step)
    if placement.kind == "auto":
        return devices
    named = (placement.targets or 0) * placement.tensor_parallel + (placement.drafters or 0)
    both = placement.targets is not None and placement.drafters is not None
    return named if both else max(devices, named + 1)


def candidates(placement: PlacementSection, world: World, micro_batches_per_step: int) -> list[Plan]:
    """Every placement of the world's ranks that `auto` compares: those in which each drafter has work in each step."""
    colocated = placement.model_copy(update={"kind": "colocated"})
    split = [
        placement.model_copy(update={"kind": "split", "targets": t, "drafters": world.ranks - t})
        for t in range(1, world.ranks)
    ]
    plans = [make_plan(section, world) for section in (colocated, *split)]
    return [plan for plan in plans if plan.drafters <= micro_batches_per_step]


@dataclass(frozen=True)
class StageTimes:
    """What one rank takes for each stage alone: seconds of one micro-batch, and of one optimizer step."""

    capture_s: float
    train_s: float  # forward and backward
    optimizer_s: float
    tokens: float  # of a micro-batch

    @property
    def capture_tokens_per_s(self) -> float:
        return self.tokens / self.capture_s

    def train_tokens_per_s(self, micro_batches: int) -> float:
        """With one optimizer step every `micro_batches`."""
        return micro_batches * self.tokens / (micro_batches * self.train_s + self.optimizer_s)


def predicted_step_s(plan: Plan, times: StageTimes, micro_batches: int) -> float:
    """Seconds of a step of `micro_batches`. All drafters wait for the one that has most of them, ceil(m / D); targets
    work ahead over the end of a step, so that a replica's share m / T need not be whole, and R ranks of a replica
    divide its work at best. What drafters take to sum their gradients is in neither stage alone, and not in this."""
    own = -(-micro_batches // plan.drafters)
    if plan.kind == "colocated":
        return own * (times.capture_s + times.train_s) + times.optimizer_s
    capture_s = micro_batches * times.capture_s / (plan.targets * plan.tensor_parallel)
    return max(capture_s, own * times.train_s + times.optimizer_s)


def predicted_rate(plan: Plan, times: StageTimes, micro_batches: int) -> float:
    """Tokens/s of a plan: a split runs as its slower stage, colocated ranks do one after the other."""
    return micro_batches * times.tokens / predicted_step_s(plan, times, micro_batches)
