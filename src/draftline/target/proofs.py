"""Proofs about a loaded target: every fault here once trained a drafter on the wrong features without a word (SPEC 9).

Each returns the figure that proves it, or raises InputError with what was expected, what was found, the likely cause.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftline.errors import InputError
from draftline.target.capture import SHARED_FORWARD_TOKENS, FeatureCapture, FlatFeatures
from draftline.target.load import Target
from draftline.target.parts import LOGIT_TOLERANCE


def prove_taps(target: Target, ids: Sequence[int]) -> float:
    """Capture of every layer against the target's own `hidden_states`; the largest relative difference of a token.

    The tuple's entry l+1 is the output of layer l, except for the last layer, whose entry is after the final norm:
    there only the last three rules hold. All layers must be finite, not zero, and no two alike.
    """
    depth = len(target.parts.layers)
    taps = capture_alone(target, tuple(range(depth)), ids).taps.float().chunk(depth, dim=-1)
    for layer, tap in enumerate(taps):
        check_values(tap, f"layer {layer}")
        if layer and torch.equal(tap, taps[layer - 1]):
            raise InputError(
                f"layer {layer}: expected an output of its own, found that of layer {layer - 1} again",
                "the layer does nothing: likely zero weights, or a list of layers that is not what the model runs",
            )
    own = own_states(target, ids)
    errors = [relative(tap, state) for tap, state in zip(taps[:-1], own[1:-1], strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__, default=None)
    if worst is None:
        return 0.0
    limit = LOGIT_TOLERANCE[target.dtype]
    if not errors[worst] <= limit:
        raise InputError(
            f"layer {worst}: expected the target's own hidden state within {limit:g}, found a difference of "
            f"{errors[worst]:.2g} (each token's relative to its length)",
            "likely a layer whose output is not the residual stream alone: this family is not supported yet",
        )
    return errors[worst]


def prove_padding(target: Target, documents: Sequence[Sequence[int]]) -> float:
    """Capture of unequal documents in one padded forward against each alone; the largest relative difference."""
    layers = tuple(range(len(target.parts.layers)))
    lengths = [len(ids) for ids in documents]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    spans = list(zip(starts, lengths, strict=True))
    flat = np.concatenate([np.array(ids) for ids in documents])
    together = FeatureCapture(target, layers, True, SHARED_FORWARD_TOKENS).capture(flat, spans)
    limit, width, worst = LOGIT_TOLERANCE[target.dtype], target.parts.hidden_size, 0.0
    for number, ((start, length), ids) in enumerate(zip(spans, documents, strict=True)):
        alone = capture_alone(target, layers, ids)
        for padded, single in ((together.taps, alone.taps), (together.final, alone.final)):
            assert padded is not None and single is not None
            here = padded[start : start + length].float().unflatten(-1, (-1, width))
            error = relative(here, single.float().unflatten(-1, (-1, width)))
            if not error <= limit:
                raise InputError(
                    f"document {number} of {len(documents)}: expected the same features padded and alone within "
                    f"{limit:g}, found a relative difference of {error:.2g}",
                    "likely the model lets tokens see padding on their right, or other rows of their batch",
                )
            worst = max(worst, error)
    return worst


def capture_alone(target: Target, layers: tuple[int, ...], ids: Sequence[int]) -> FlatFeatures:
    return FeatureCapture(target, layers, want_final=True).capture(np.array(ids), [(0, len(ids))])


@torch.no_grad()
def own_states(target: Target, ids: Sequence[int]) -> list[Tensor]:
    """The target's own `hidden_states`, float32 [T, d] each: embedding, then one per layer."""
    row = torch.tensor([list(ids)], device=target.device)
    states = target.parts.decoder(input_ids=row, use_cache=False, output_hidden_states=True).hidden_states
    return [state[0].float().to(target.device) for state in states]


def check_values(values: Tensor, what: str) -> None:
    check_finite(values, what)
    if not bool(values.any()):
        raise InputError(f"{what}: expected values, found zeros only", "likely weights that were not loaded")


def check_finite(values: Tensor, what: str) -> None:
    if not bool(torch.isfinite(values).all()):
        raise InputError(
            f"{what}: expected finite values, found {int((~torch.isfinite(values)).sum())} that are not",
            "likely weights that overflow in this dtype, or a damaged weights file",
        )


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference of two vectors [..., d], each relative to the length of the expected one.

    Not relative to the largest value of all: a few tokens of most models have values a thousand times the usual ones.
    """
    length = torch.linalg.vector_norm(expected, dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return float((torch.linalg.vector_norm(found - expected, dim=-1) / length).max())
