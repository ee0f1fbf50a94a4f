"""Gradients over several drafter ranks: undivided sums, summed again over the ranks, divided once by the optimizer.

`Replicas`: every rank holds the whole drafter; gradients live in one buffer, so that one all-reduce serves all of them.
`Shards`: FSDP2 spreads the layers; it sums their gradients itself, without its usual division by the ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from draftline.drafter.model import Drafter
from draftline.errors import InputError
from draftline.train.ranks import Ranks


class Reduction(Protocol):
    masters: nn.Module  # what the optimizer steps: the drafter, or this rank's part of each of its parameters, in order
    in_lockstep: bool  # whether every rank must run as many micro-batches as the others

    def begin(self) -> None:
        """Before a step's first micro-batch."""

    def reduce(self) -> None:
        """After its last: every master's grad is the sum over all ranks."""

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of the whole gradient, of which `gradients` are this rank's part."""

    def whole(self, index: int, part: Tensor) -> Tensor:
        """The whole of parameter `index`, or of its moments, from this rank's part. Collective."""

    def part(self, index: int, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""


class Alone:
    """One drafter rank: nothing to sum."""

    in_lockstep = False

    def __init__(self, drafter: Drafter) -> None:
        self.masters: nn.Module = drafter

    def begin(self) -> None:
        pass

    def reduce(self) -> None:
        pass

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(gradients)

    def whole(self, index: int, part: Tensor) -> Tensor:
        return part

    def part(self, index: int, whole: Tensor) -> Tensor:
        return whole


class Replicas(Alone):
    """Every rank holds the whole drafter."""

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
        super().__init__(drafter)
        self.ranks = ranks
        self.buffer = GradientBuffer(list(drafter.parameters()))

    def begin(self) -> None:
        self.buffer.clear()

    def reduce(self) -> None:
        self.ranks.sum_over_drafters(self.buffer.flat)


class Shards:
    """Layers, their gradients and their moments spread over the drafter ranks; fc and the norms stay whole on each."""

    in_lockstep = True

    def __init__(self, drafter: Drafter, ranks: Ranks, device: torch.device) -> None:
        assert ranks.drafters is not None
        self.ranks = ranks
        mesh = DeviceMesh.from_group(ranks.drafters, device.type)
        for layer in drafter.layers:
            sharded = fully_shard(layer, mesh=mesh)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other sum, and none is wanted
        whole = list(drafter.parameters())
        self.spread = {index: p for index, p in enumerate(whole) if isinstance(p, DTensor)}
        self.buffer = GradientBuffer([p for index, p in enumerate(whole) if index not in self.spread])
        local = {index: nn.Parameter(p.to_local().detach()) for index, p in self.spread.items()}  # the same storage
        self.parts = [local.get(index, p) for index, p in enumerate(whole)]
        self.masters: nn.Module = nn.ParameterList(self.parts)

    def begin(self) -> None:
        self.buffer.clear()
        for parameter in self.spread.values():
            parameter.grad = None

    def reduce(self) -> None:
        self.ranks.sum_over_drafters(self.buffer.flat)
        for index, parameter in self.spread.items():
            assert isinstance(parameter.grad, DTensor)
            self.parts[index].grad = parameter.grad.to_local()

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        local = [self.parts[index].grad for index in self.spread]
        squares = nn.utils.get_total_norm([g for g in local if g is not None]).square()
        self.ranks.sum_over_drafters(squares)
        return (squares + self.buffer.flat.norm().square()).sqrt()

    def whole(self, index: int, part: Tensor) -> Tensor:
        like = self.spread.get(index)
        if like is None or part.dim() == 0:
            return part
        if isinstance(part, DTensor):
            return part.full_tensor()
        spread = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return spread.full_tensor()

    def part(self, index: int, whole: Tensor) -> Tensor:
        like = self.spread.get(index)
        if like is None or whole.dim() == 0:
            return whole
        chunks = list(whole.chunk(like.device_mesh.size(), dim=0))  # as FSDP2 cuts them
        mine = like.device_mesh.get_local_rank()
        return chunks[mine] if mine < len(chunks) else whole[:0]


class GradientBuffer:
    """One float32 buffer that holds the gradients of all its parameters, one after the other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        parts = self.flat.split([p.numel() for p in parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    def clear(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view


def reduction_for(drafter: Drafter, ranks: Ranks, device: torch.device) -> Reduction:
    if ranks.drafters is None:
        return Alone(drafter)
    if ranks.plan.sharded and device.type == "cuda":
        raise InputError(
            "placement.sharded: the written-out step on CUDA keeps every weight whole on its device",
            "leave placement.sharded out; a split keeps the target's memory off the drafter's devices",
        )
    return Shards(drafter, ranks, device) if ranks.plan.sharded else Replicas(drafter, ranks)
