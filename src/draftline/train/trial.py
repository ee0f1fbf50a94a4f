"""A step taken for trial on real features, and taken back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.records import FeatureBatch
from draftline.train.optimizer import Optimizer


@contextmanager
def taken_back(drafter: nn.Module, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
    """Whatever happens inside, weights, gradients, moments and step count are afterwards what they were.

    Yields the weights as they were, on the host: a second copy on the device might not fit.
    """
    weights = {name: p.detach().to("cpu", copy=True) for name, p in drafter.named_parameters()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in drafter.named_parameters()}
    moments = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    steps_done = optimizer.steps_done
    try:
        yield weights
    finally:
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(weights[name])
                parameter.grad = gradients[name]
        optimizer.adamw.state.clear()
        optimizer.steps_done = steps_done
        if moments:
            optimizer.load_state_tensors(moments, steps_done)


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


def prove_trial(step: DrafterStep, optimizer: Optimizer, batch: FeatureBatch) -> str:
    """One optimizer step on real features moves every tensor by a finite gradient; then all is as before."""
    with taken_back(step.drafter, optimizer) as before:
        micro = step.forward_backward(batch)
        loss = float(micro.loss_sum / micro.weight_sum.clamp(min=torch.finfo(torch.float32).tiny))
        norm = float(optimizer.finish(micro.weight_sum))
        still = [name for name, p in step.drafter.named_parameters() if torch.equal(p.detach().cpu(), before[name])]
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
