"""A step taken for trial on real features, and taken back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from draftline.drafter.anchors import sample_blocks
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.records import FeatureBatch, PackedBatch
from draftline.target.parts import LOGIT_TOLERANCE
from draftline.target.proofs import relative
from draftline.train.optimizer import Optimizer

PLAIN_BLOCKS = 8  # blocks on which the fused step is compared with the plain model, whose attention is dense


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


@torch.no_grad()
def difference_to_plain(step: DrafterStep, batch: FeatureBatch) -> float:
    """Largest relative difference of a slot's state between the fused step and the plain model on the masters, over the
    first blocks of the first row."""
    packed = batch.packed
    arrays = (packed.ids, packed.loss_mask, packed.document, packed.position, packed.token)
    row = PackedBatch(packed.index, *(array[:1] for array in arrays))
    taps = batch.taps[:1]
    blocks = sample_blocks(row, PLAIN_BLOCKS, step.seed).to(taps.device)
    ids, position = (torch.from_numpy(value).to(taps.device) for value in (row.ids, row.position))
    plain = copy.copy(step)
    plain.fused = None
    found, expected = (one.hidden(taps, ids, position, blocks).float() for one in (step, plain))
    return relative(found[blocks.keep], expected[blocks.keep])


def prove_trial(step: DrafterStep, optimizer: Optimizer, batch: FeatureBatch) -> str:
    """One optimizer step on real features moves every tensor by a finite gradient; then all is as before."""
    with taken_back(step.drafter, optimizer) as before:
        micro = step.forward_backward(batch)
        loss = float(micro.loss_sum / micro.weight_sum.clamp(min=torch.finfo(torch.float32).tiny))
        norm = float(optimizer.finish(micro.weight_sum))
        still = [name for name, p in step.drafter.named_parameters() if torch.equal(p.detach().cpu(), before[name])]
        stale = None if step.fused is None else difference_to_plain(step, batch)
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
    if stale is not None and not stale <= LOGIT_TOLERANCE[step.head.weight.dtype]:
        raise InputError(
            f"after a trial step the fused forward's states differ from the plain model's by {stale:.2g}, each slot's "
            f"relative to its length",
            "likely a working copy of the weights that was not renewed: the run would train on its first weights",
        )
    return f"loss {loss:.3f}, gradient norm {norm:.3g}; every tensor moves; taken back"
