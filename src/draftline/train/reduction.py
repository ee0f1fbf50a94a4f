"""Gradients over several drafter ranks: undivided sums, summed again over the ranks, divided once by the optimizer.

`Replicas`: every rank holds the whole drafter; gradients live in one buffer, so that one all-reduce serves all of them.
`Shards`: every rank computes with whole weights and keeps 1/N of their fp32 masters, summed gradients and moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftline.drafter.model import Drafter
from draftline.train.ranks import Ranks

NEW_NAMES = hasattr(dist, "reduce_scatter_single")  # torch 2.13 on; the old ones warn there
reduce_scatter = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor
all_gather = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor


class Reduction(Protocol):
    masters: nn.Module  # what the optimizer steps

    def begin(self) -> None:
        """Before a step's first micro-batch."""

    def reduce(self) -> None:
        """After its last: every master's grad is the sum over all ranks."""

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm of the whole gradient, of which `gradients` are this rank's part."""

    def renew(self) -> None:
        """After masters have changed: the drafter computes with them."""

    def gathered(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the masters by "number.name", as whole ones of the drafter's parameters; numbers count in the
        order of either. Each is valid until the next. Collective; between steps only."""

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The other way: from whole tensors of the drafter's parameters to this rank's of its masters."""


class Alone:
    """One drafter rank: nothing to sum."""

    def __init__(self, drafter: Drafter) -> None:
        self.masters: nn.Module = drafter

    def begin(self) -> None:
        pass

    def reduce(self) -> None:
        pass

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(gradients)

    def renew(self) -> None:
        pass

    def gathered(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from tensors.items()

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors


class Replicas(Alone):
    """Every rank holds the whole drafter."""

    def __init__(self, drafter: Drafter, ranks: Ranks) -> None:
        super().__init__(drafter)
        self.ranks = ranks
        self.gradients = Joined(list(drafter.parameters()), torch.float32)

    def begin(self) -> None:
        self.gradients.become_gradients()

    def reduce(self) -> None:
        self.ranks.sum_over_drafters(self.gradients.flat)


class Shards:
    """The matrices lie one after the other, and rank r of N owns the r-th of N equal parts of all their numbers: its
    fp32 masters, moments and summed gradient. The drafter's own parameters are the whole working copy in `dtype`,
    renewed by one all-gather a step; gradients add up in a whole fp32 buffer over the micro-batches and are
    reduce-scattered once a step. Norms and biases stay whole on every rank.

    Bytes a parameter: (4 masters + 8 moments + 4 summed gradient) / N + 4 gradients + the copy's 2 in bf16. Where
    `dtype` is float32 the masters are a part of the copy itself.
    """

    def __init__(self, drafter: Drafter, ranks: Ranks, dtype: torch.dtype) -> None:
        assert ranks.drafters is not None
        self.ranks, self.group = ranks, ranks.drafters
        parameters = list(drafter.parameters())
        self.matrix_numbers = [number for number, p in enumerate(parameters) if p.dim() > 1]
        self.vector_numbers = [number for number, p in enumerate(parameters) if p.dim() <= 1]
        self.matrices = [parameters[number] for number in self.matrix_numbers]
        vectors = [parameters[number] for number in self.vector_numbers]
        self.gradients = Joined(self.matrices, torch.float32, self.group.size())
        self.vector_gradients = Joined(vectors, torch.float32)
        self.weights = Joined(self.matrices, dtype, self.group.size())
        self.part = nn.Parameter(self.spread(dtype))
        self.masters: nn.Module = nn.ParameterList([self.part, *vectors])

    @torch.no_grad()
    def spread(self, dtype: torch.dtype) -> Tensor:
        """Make the drafter's parameters the working copy; returns this rank's masters. The gradients' buffer holds
        the fp32 weights meanwhile."""
        torch._foreach_copy_(self.gradients.views, [p.detach() for p in self.matrices])
        self.weights.flat.copy_(self.gradients.flat)
        for parameter, view in zip(self.matrices, self.weights.views, strict=True):
            parameter.data = view
            parameter.grad_dtype = torch.float32  # whatever dtype the copy has
        return self.mine(self.weights) if dtype == torch.float32 else self.mine(self.gradients).clone()

    def mine(self, joined: Joined) -> Tensor:
        return joined.flat.chunk(self.group.size())[self.group.rank()]

    def begin(self) -> None:
        self.gradients.become_gradients()
        self.vector_gradients.become_gradients()

    def reduce(self) -> None:
        self.part.grad = torch.empty_like(self.part)
        with self.ranks.collective("the other drafters' gradients", self.part.device):
            reduce_scatter(self.part.grad, self.gradients.flat, group=self.group)
        self.ranks.sum_over_drafters(self.vector_gradients.flat)

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """gradients: of `masters`, the part's first."""
        squares = gradients[0].norm().square()
        self.ranks.sum_over_drafters(squares)
        return (squares + self.vector_gradients.flat.norm().square()).sqrt()

    @torch.no_grad()
    def renew(self) -> None:
        self.mine(self.weights).copy_(self.part)
        with self.ranks.collective("the other drafters' weights", self.part.device):
            all_gather(self.weights.flat, self.mine(self.weights), group=self.group)
        torch.autograd.graph.increment_version(self.matrices)  # for working copies made of these

    def gathered(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, part in tensors.items():
            number, name = key.split(".")
            if number != "0":
                yield f"{self.vector_numbers[int(number) - 1]}.{name}", part
                continue
            whole = [part] * len(self.matrices)  # a step count
            if part.dim():
                with self.ranks.collective("the other drafters' state", self.part.device):
                    all_gather(self.gradients.flat, part, group=self.group)
                whole = self.gradients.views
            yield from ((f"{number}.{name}", t) for number, t in zip(self.matrix_numbers, whole, strict=True))

    def parts(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        names = dict.fromkeys(key.split(".")[1] for key in tensors)
        parts: dict[str, Tensor] = {}
        for name in names:
            whole = [tensors[f"{number}.{name}"] for number in self.matrix_numbers]
            parts[f"0.{name}"] = self.mine(Joined.of(whole, self.group.size())) if whole[0].dim() else whole[0]
            for number, vector in enumerate(self.vector_numbers, start=1):
                parts[f"{number}.{name}"] = tensors[f"{vector}.{name}"]
        return parts


class Joined:
    """One buffer that holds a tensor for each of `like`, one after the other, and zeros up to a multiple of `parts`."""

    def __init__(self, like: list[Tensor] | list[nn.Parameter], dtype: torch.dtype, parts: int = 1) -> None:
        self.like = like
        sizes = [t.numel() for t in like]
        total = -(-sum(sizes) // parts) * parts
        self.flat = torch.zeros(total, dtype=dtype, device=like[0].device)
        pieces = self.flat[: sum(sizes)].split(sizes)
        self.views = [piece.view_as(t) for piece, t in zip(pieces, like, strict=True)]

    @staticmethod
    def of(tensors: list[Tensor], parts: int) -> Joined:
        joined = Joined(tensors, tensors[0].dtype, parts)
        torch._foreach_copy_(joined.views, tensors)
        return joined

    def become_gradients(self) -> None:
        """Zero, and the gradients of the parameters."""
        self.flat.zero_()
        for parameter, view in zip(self.like, self.views, strict=True):
            parameter.grad = view


def reduction_for(drafter: Drafter, ranks: Ranks, dtype: torch.dtype) -> Reduction:
    """dtype: what the drafter's products are computed in. Before anything else holds the drafter's parameters."""
    if ranks.drafters is None:
        return Alone(drafter)
    return Shards(drafter, ranks, dtype) if ranks.plan.sharded else Replicas(drafter, ranks)
