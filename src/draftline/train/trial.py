"""A step taken for trial on real features, and taken back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.records import FeatureBatch
from draftline.train.optimizer import Optimizer


@contextmanager
def taken_back(drafter: nn.Module, optimizer: Optimizer, copies: torch.device) -> Iterator[dict[str, Tensor]]:
    """Whatever happens inside, weights, gradients, moments and step count are afterwards what they were.

    Yields the weights as they were, on `copies`: a second copy on their own device might not fit.
    """
    parameters = dict(drafter.named_parameters())

    def kept(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.detach().to(copies, copy=True) for name, tensor in tensors.items()}

    weights, moments = kept(parameters), kept(optimizer.state_tensors())
    gradients = kept({name: p.grad for name, p in parameters.items() if p.grad is not None})
    steps_done = optimizer.steps_done
    try:
        yield weights
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
                parameter.grad = gradients[name].to(parameter.device) if name in gradients else None
        optimizer.adamw.state.clear()
        optimizer.steps_done = steps_done
        if moments:
            optimizer.load_state_tensors(moments, steps_done)


def kept_bytes(drafter: nn.Module, optimizer: Optimizer) -> int:
    """What `taken_back` copies: the weights, and gradients and moments where there are some."""
    held = [*drafter.parameters(), *(p.grad for p in drafter.parameters() if p.grad is not None)]
    return sum(tensor.nbytes for tensor in (*held, *optimizer.state_tensors().values()))


def prove_masters(drafter: nn.Module, optimizer: Optimizer) -> str:
    """Every parameter of the drafter is float32, wants a gradient and is the optimizer's (SPEC 2)."""
    known = {id(parameter) for parameter in optimizer.parameters}
    for name, parameter in drafter.named_parameters():
        if parameter.dtype != torch.float32:
            raise InputError(
                f"{name}: expected a float32 master, found {str(parameter.dtype).removeprefix('torch.')}",
                "likely a drafter cast as a whole: bfloat16 norms stay at 1.0, for a step of 6e-4 is rounded away",
            )
        if not parameter.requires_grad or id(parameter) not in known:
            raise InputError(
                f"{name}: expected a parameter that the optimizer steps, found one that it does not know",
                "likely a parameter frozen or made after the optimizer was",
            )
    return f"{len(optimizer.parameters)} tensors, {sum(p.numel() for p in optimizer.parameters):,} float32 parameters"


def prove_trial(step: DrafterStep, optimizer: Optimizer, batch: FeatureBatch, copies: torch.device) -> str:
    """One optimizer step on real features moves every tensor by a finite gradient; then all is as before. copies: where
    what is taken back is kept."""
    with taken_back(step.drafter, optimizer, copies) as before:
        micro = step.forward_backward(batch)
        loss = float(micro.loss_sum / micro.weight_sum.clamp(min=torch.finfo(torch.float32).tiny))
        norm = float(optimizer.finish(micro.weight_sum))
        still = [name for name, p in step.drafter.named_parameters() if torch.equal(p, before[name].to(p.device))]
        stale = 0 if step.fused is None else step.fused.stale()
    if not torch.isfinite(torch.tensor([loss, norm])).all():
        raise InputError(
            f"expected a finite loss and gradient, found loss {loss:g} and gradient norm {norm:g}",
            "likely features that are not finite, or a target that overflows in this dtype",
        )
    if not float(micro.weight_sum):
        raise InputError("expected supervised slots in the first batch, found none", "likely rows that are all prompt")
    if still:
        raise InputError(
            f"expected a step to move every tensor, found {len(still)} that stay, {still[0]} among them",
            "likely parameters in bfloat16, or a part of the drafter that its forward does not use",
        )
    if stale:
        raise InputError(
            f"expected products with the weights that the optimizer left, found {stale} of them on older weights",
            "the run would train on its first weights for ever: this is never right, report it with the recipe",
        )
    return f"loss {loss:.3f}, gradient norm {norm:.3g}; every tensor moves; taken back"
