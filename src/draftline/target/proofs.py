"""Proofs about a target and the features that training is given: every fault here once trained a drafter on the wrong
features without a word (SPEC 9).

Each returns the figure that proves it, or raises InputError with what was expected, what was found, the likely cause.
What is judged is handed in: features as training gets them, from whatever source, beside the target's own outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.errors import InputError
from draftline.records import FeatureBatch
from draftline.target.capture import document_spans
from draftline.target.derive import stated
from draftline.target.load import Target
from draftline.target.parts import LOGIT_TOLERANCE

# A batch of another shape takes other kernels: in bfloat16 a token's features differ by some per cent then, and a
# mixture of experts may route a few tokens elsewhere. So nine tokens of ten are judged there, and all of them in
# float32.
JUDGED_SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}


@dataclass(frozen=True)
class Document:
    """One document of a batch: its tokens, and its features as training is given them."""

    ids: list[int]
    taps: Tensor  # [T, K, d]
    final: Tensor | None  # [T, d]


def documents_of(batch: FeatureBatch, hidden_size: int, at_most: int, longest: int = 1024) -> list[Document]:
    """The documents of a batch with the fewest tokens, none cut unless it exceeds `longest`."""
    spans = sorted(document_spans(batch.packed.document), key=lambda span: span[1])[:at_most]
    ids, taps = batch.packed.ids.reshape(-1), batch.taps.detach().flatten(0, 1)
    final = None if batch.final is None else batch.final.detach().flatten(0, 1)
    found = []
    for start, length in spans:
        here = slice(start, start + min(length, longest))
        states = taps[here].unflatten(-1, (-1, hidden_size))
        found.append(Document(ids[here].tolist(), states, None if final is None else final[here]))
    return found


@dataclass(frozen=True)
class OwnOutputs:
    """What the target itself says about one document, by one forward of its own."""

    layers: list[Tensor]  # [T, d] each: the raw output of every layer
    normed: Tensor  # [T, d] the decoder's last state, after its final norm
    first_input: Tensor  # [T, d] what the first layer receives
    logits: Tensor  # [T, V]


@torch.no_grad()
def own_outputs(target: Target, ids: Sequence[int]) -> OwnOutputs:
    """What each layer hands to the next, seen from the receiving side: the next layer's input, and the final norm's.

    So neither the hooks of capture nor the `hidden_states` tuple, whose last entry is normed, have a say in it.
    """
    decoder, layers = target.parts.decoder, target.parts.layers
    given, children, ends = list[Tensor](), list[tuple[Tensor, Tensor]](), list[Any]()

    def before_layer(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(args[0] if args else kwargs["hidden_states"])

    def after_child(_module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            children.append((args[0], output))

    def after_last(_module: nn.Module, _args: Any, output: Any) -> None:
        given.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_pre_hook(before_layer, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(after_last))
    handles += [module.register_forward_hook(after_child) for module in decoder.children()]
    handles.append(decoder.register_forward_hook(lambda _module, _args, output: ends.append(output)))
    try:
        row = torch.tensor([list(ids)], device=target.device)
        logits = target.model(input_ids=row, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if not ends or len(given) != len(layers) + 1:
        raise InputError(
            f"expected the model to run its decoder of {len(layers)} layers once, found {len(ends)} runs of it and "
            f"{len(given)} states between layers",
            "likely a decoder or a list of layers that is not what the model runs",
        )
    normed = ends[-1].last_hidden_state
    before_norm = [states for states, output in children if output is normed]
    outputs = [*given[1:-1], before_norm[-1] if before_norm else given[-1]]
    device = target.device  # where features are brought to; a large target's layers lie on several
    layer_outputs = [state[0].to(device) for state in outputs]
    return OwnOutputs(layer_outputs, normed[0].to(device), given[0][0].to(device), logits[0].float().to(device))


def prove_taps(target: Target, taps: Sequence[int], document: Document, own: OwnOutputs) -> float:
    """A document's captured taps against the target's own layer outputs; the largest relative difference of a token.

    All must lie within the target's depth and be finite, not zero, and no two alike.
    """
    depth = len(own.layers)
    if taps[-1] >= depth or document.taps.shape[1] != len(taps):
        raise InputError(
            f"expected taps within the target's layers 0..{depth - 1}, found {list(taps)} and "
            f"{document.taps.shape[1]} captured states a token",
            "taps are 0-based decoder layers (vLLM and speculators files hold them plus one)",
        )
    states = document.taps.float().unbind(1)
    for layer, state in zip(taps, states, strict=True):
        check_values(state, f"layer {layer}")
        if layer and torch.equal(own.layers[layer], own.layers[layer - 1]):
            raise InputError(
                f"layer {layer}: expected an output of its own, found that of layer {layer - 1} again",
                "the layer does nothing: likely zero weights, or a list of layers that is not what the model runs",
            )
    limit, worst = LOGIT_TOLERANCE[target.dtype], 0.0
    for layer, state in zip(taps, states, strict=True):
        error = judged(target, state, own.layers[layer].float())
        if not error <= limit:
            raise InputError(
                f"layer {layer}: expected the target's own output within {limit:g}, found a relative difference of "
                f"{error:.2g}",
                likely_tap(target, layer, state, own, limit),
            )
        worst = max(worst, error)
    return worst


def likely_tap(target: Target, layer: int, state: Tensor, own: OwnOutputs, limit: float) -> str:
    for other, output in enumerate(own.layers):
        if judged(target, state, output.float()) <= limit:
            return (
                f"it is the output of layer {other}: likely taps that are off by one (0-based here, plus one in vLLM)"
            )
    if judged(target, state, own.normed.float()) <= limit:
        return "it is the state after the final norm: likely taken from `hidden_states`, whose last entry is normed"
    return "likely a layer whose output is not the residual stream alone, or features of other tokens or another model"


def prove_features(
    target: Target,
    taps: Sequence[int],
    together: Sequence[Document],
    alone: Sequence[Document],
    own: Sequence[OwnOutputs],
) -> float:
    """Features of documents as training is given them (padded, packed, stored) against each document captured alone;
    the largest relative difference of a token."""
    limit, worst = LOGIT_TOLERANCE[target.dtype] * (1 if target.dtype == torch.float32 else 2), 0.0
    for number, (batched, single, outputs) in enumerate(zip(together, alone, own, strict=True)):
        for found, expected in ((batched.taps, single.taps), (batched.final, single.final)):
            if found is None or expected is None:
                continue
            check_values(found, f"features of document {number}")
            error = judged(target, found.float(), expected[: len(found)].float())
            if not error <= limit:
                raise InputError(
                    f"document {number} of {len(together)}: expected the same features in its batch and alone within "
                    f"{limit:g}, found a relative difference of {error:.2g}",
                    likely_feature(target, taps, batched, outputs, limit),
                )
            worst = max(worst, error)
    return worst


def likely_feature(target: Target, taps: Sequence[int], batched: Document, own: OwnOutputs, limit: float) -> str:
    first = batched.taps[:, 0].float()
    if batched.taps.shape[1] == len(taps) and judged(target, first, own.layers[taps[0]].float()) > limit:
        for layer, output in enumerate(own.layers):
            if judged(target, first, output.float()) <= limit:
                return f"the first tap holds layer {layer} instead of {taps[0]}: likely features of another tap list"
    return "likely tokens that see padding on their right, features of a neighbouring row, or a stale cache"


def prove_head(target: Target, document: Document, own: OwnOutputs) -> float:
    """head(norm(last state)) against the target's own logits (SPEC 9.5); the state is training's where it captures one.

    A tied head must be the embedding.
    """
    check_finite(own.logits, "the target's logits")
    parts = target.parts
    weight, embedding = parts.head.weight, parts.embedding.weight
    if stated(target.model.config, "tie_word_embeddings") and not torch.equal(weight, embedding):
        raise InputError(
            "expected the head to be the embedding, which the config ties (tie_word_embeddings), found another matrix",
            "likely a tied head that was not loaded and holds random numbers",
        )
    final = own.normed if document.final is None else document.final
    check_values(final, "the final-normed state")
    error = judged(target, target.parts.head.logits(final).float(), own.logits[: len(final)])
    limit = LOGIT_TOLERANCE[target.dtype]
    if not error <= limit:
        raise InputError(
            f"expected the target's own logits from head(norm(last state)) within {limit:g}, found a relative "
            f"difference of {error:.2g}",
            likely_head(target, final, own, limit),
        )
    return error


def likely_head(target: Target, final: Tensor, own: OwnOutputs, limit: float) -> str:
    if judged(target, final.float(), own.layers[-1].float()) <= limit:
        return "the state is the last layer's raw output: the final norm is missing"
    return (
        "likely a head that was not loaded, a logit scale or soft-cap that is not applied, or a state that is not the "
        "final-normed one"
    )


def judged(target: Target, found: Tensor, expected: Tensor) -> float:
    """The largest of the tokens' relative differences, or what JUDGED_SHARE of them stay below."""
    errors = token_errors(found, expected)
    if not bool(torch.isfinite(errors).all()):
        return float("nan")
    return float(errors.flatten().quantile(JUDGED_SHARE[target.dtype]))


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Difference of two vectors [..., d], each relative to the length of the expected one: [...].

    Not relative to the largest value of all: a few tokens of most models have values a thousand times the usual ones.
    """
    length = torch.linalg.vector_norm(expected, dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return torch.linalg.vector_norm(found - expected, dim=-1) / length


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
