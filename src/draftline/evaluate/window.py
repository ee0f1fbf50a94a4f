"""The sliding-window rule of a drafter's layers, each on its own, with a context longer than the window (SPEC 3)."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from draftline.decode.models import CachedDrafter
from draftline.drafter.anchors import Blocks
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep, fused_drafter
from draftline.errors import InputError
from draftline.evaluate.proofs import decoding_limit, logits_of
from draftline.records import FeatureBatch
from draftline.target.load import Target
from draftline.target.proofs import judged


def prove_window(step: DrafterStep, target: Target, batch: FeatureBatch) -> str:
    """Slot j of a sliding layer sees context p exactly where p > a + j - W, in the training forward; and the decoding
    loop, which masks on its own, gives the same logits.

    """
    spec = step.drafter.spec
    sliding = [layer for layer in range(spec.num_hidden_layers) if spec.window(layer) is not None]
    window = spec.sliding_window
    assert window is not None
    if not sliding:
        raise InputError(f"sliding_window {window}: expected a layer that uses it, found none", "likely layer_types")
    taps = features(batch, window + 3 * spec.block_size)
    for layer in sliding:
        check_edges(one_layer(step, layer), taps, window)
    check_decoding(step, target, taps)
    return f"{window} tokens: p > a + j - {window} in layers {sliding}, in training and in decoding"


def features(batch: FeatureBatch, length: int) -> Tensor:
    """Real features [R, length, K*d], repeated where the batch is shorter. Only where they stand matters here."""
    repeats = -(-length // batch.taps.shape[1])
    return batch.taps.detach().repeat(1, repeats, 1)[:, :length]


def one_layer(step: DrafterStep, layer: int) -> DrafterStep:
    """The step with one of its drafter's layers alone: in a deeper one slots hand on what they saw."""
    whole = step.drafter
    spec = replace(whole.spec, num_hidden_layers=1, layer_types=(whole.spec.layer_types[layer],))
    alone: Drafter = copy.copy(whole)
    alone._modules = dict(whole._modules) | {"layers": nn.ModuleList([whole.layers[layer]])}
    alone.spec = spec
    single = copy.copy(step)
    single.drafter = alone
    single.fused = None if step.fused is None else fused_drafter(alone, step.head.weight.dtype, step.products)
    return single


def blocks_at(step: DrafterStep, anchor: int, rows: int, device: torch.device) -> Blocks:
    """As many blocks as the step trains, all but the first of each row dead."""
    anchors = torch.zeros(rows, step.anchors, dtype=torch.int64, device=device)
    anchors[:, 0] = anchor
    keep = torch.zeros_like(anchors, dtype=torch.bool)
    keep[:, 0] = True
    return Blocks(anchors, torch.zeros_like(anchors), keep)


def states(step: DrafterStep, taps: Tensor, anchor: int) -> Tensor:
    """States [B, d] of one block in the first row."""
    rows, length = taps.shape[:2]
    position = torch.arange(length, device=taps.device)[None].expand(rows, -1).contiguous()
    ids = torch.zeros_like(position)
    return step.hidden(taps, ids, position, blocks_at(step, anchor, rows, taps.device))[0, 0].detach().float()


def check_edges(step: DrafterStep, taps: Tensor, window: int) -> None:
    """Perturb the context on both sides of each slot's window edge and see which slots move."""
    size = step.drafter.spec.block_size
    anchor = window + size  # every slot's window begins inside the context
    before = states(step, taps, anchor)
    for slot in (0, 1, size - 1):
        for p, expected in ((anchor + slot - window, False), (anchor + slot - window + 1, True)):
            if p >= anchor:
                continue
            other = taps.clone()
            other[:, p] = -other[:, p]
            moved = bool((states(step, other, anchor)[slot] != before[slot]).any())
            if moved != expected:
                raise InputError(
                    f"window {window}, slot {slot} of the block at a: expected the token at a{p - anchor:+d} to be "
                    f"{'seen' if expected else 'hidden'}, found the opposite",
                    f"likely a window that is off by one: slot j sees p > a + j - {window}",
                )


def check_decoding(step: DrafterStep, target: Target, taps: Tensor) -> None:
    anchor = step.drafter.spec.sliding_window + step.drafter.spec.block_size  # type: ignore[operator]
    trained = logits_of(target, states(step, taps, anchor)[1:].to(taps.dtype))
    proposer = CachedDrafter(step.drafter, target)
    decoded = proposer.forward(0, taps[:1, :anchor])
    error, limit = judged(target, trained, decoded), decoding_limit(target)
    if not error <= limit:
        raise InputError(
            f"expected the training forward's logits from the decoding loop past the window within {limit:g}, found a "
            f"relative difference of {error:.2g}",
            "likely a sliding-window or causality rule that differs between the two",
        )
