"""Proofs about a target and the features that training is given: every fault here once trained a drafter on the wrong
features without a word (SPEC 9).

Each returns the figure that proves it, or raises InputError with what was expected, what was found, the likely cause.
What is judged is handed in: features as training gets them, from whatever source, beside the target's own outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftline.errors import InputError
from draftline.records import FeatureBatch, Head
from draftline.target.agreement import feature_tolerance, relative_error
from draftline.target.capture import document_spans
from draftline.target.derive import stated
from draftline.target.load import Target
from draftline.target.parts import LOGIT_TOLERANCE, Passage, watch


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
    """What the target itself says about one document, by one forward of its own.

    A layer's output is seen from the receiving side, as the next one's input: so neither the hooks of capture nor the
    `hidden_states` tuple, whose last entry is normed, have a say in it.
    """

    passage: Passage  # a batch of one
    logits: Tensor  # [T, V]

    @cached_property
    def layers(self) -> list[Tensor]:
        """[T, d] each: the raw output of every layer."""
        return [state[0] for state in (*self.passage.inputs[1:], self.passage.outputs[-1])]

    @property
    def normed(self) -> Tensor:
        """[T, d] the decoder's last state, after its final norm."""
        return self.passage.final[0]

    @property
    def first_input(self) -> Tensor:
        """[T, d] what the first layer receives."""
        return self.passage.inputs[0][0]


def own_outputs(target: Target, ids: Sequence[int]) -> OwnOutputs:
    """Raises InputError where the model does not run its decoder and each of its layers once."""
    row = torch.tensor([list(ids)], device=target.device)
    passage, output = watch(target.model, target.parts.decoder, target.parts.layers, row)
    return OwnOutputs(passage, output.logits[0].float().to(target.device))


def prove_stream(target: Target, own: OwnOutputs) -> int:
    """Each layer receives what the one before it gave, and the final norm what the last one gave. The number of layers.

    Otherwise a layer's output is not the residual stream, and a tap of it holds a part of what the target knows.
    """
    passage, name = own.passage, type(target.parts.decoder).__name__
    for layer, state in enumerate(passage.outputs):
        check_finite(state, f"layer {layer}")
    for layer, (given, received) in enumerate(zip(passage.outputs[:-1], passage.inputs[1:], strict=True)):
        if not torch.equal(given, received):
            raise InputError(
                f"target {name}: expected layer {layer + 1} to receive the output of layer {layer}, found another one",
                "likely a residual stream kept beside the layers or mixed between them; such a target is not supported",
            )
    last = passage.outputs[-1]
    if not any(torch.equal(given, last) and torch.equal(out, passage.final) for given, out in passage.around):
        raise InputError(
            f"target {name}: expected one module, the final norm, between the last layer's output and the last state, "
            "found none",
            "likely a norm inside the last layer, or more than a norm after it; such a target is not supported",
        )
    return len(passage.outputs)


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
    limit, worst = feature_tolerance(target.dtype), 0.0
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


def prove_head(target: Target, own: OwnOutputs, captured: Tensor | None = None) -> float:
    """head(norm(last state)) against the target's own logits (SPEC 9.5); the largest relative difference of a token.

    captured: the state [T, d] that training is given, where it is given one. A tied head must be the embedding.
    """
    check_finite(own.logits, "the target's logits")
    name, head, embedding = type(target.model).__name__, target.parts.head, target.parts.embedding.weight
    if stated(target.model.config, "tie_word_embeddings") and not torch.equal(head.weight, embedding):
        raise InputError(
            "expected the head to be the embedding, which the config ties (tie_word_embeddings), found another matrix",
            "likely a tied head that was not loaded and holds random numbers",
        )
    final = own.normed if captured is None else captured
    check_values(final, "the final-normed state")
    found, expected = head.logits(final).float(), own.logits[: len(final)]
    if found.shape != expected.shape:
        raise InputError(
            f"target {name}: expected logits {list(found.shape)} as its head has rows, found {list(expected.shape)}",
            "likely logits that are cut or joined after the head; such a target is not supported",
        )
    error, limit = judged(target, found, expected), LOGIT_TOLERANCE[target.dtype]
    if not error <= limit:
        raise InputError(
            f"target {name}: expected its own logits from head(final-normed state), {head_text(head)}, within "
            f"{limit:g}, found a relative difference of {error:.2g}",
            likely_head(target, final, own, limit),
        )
    return error


def head_text(head: Head) -> str:
    cap = "no soft-cap" if head.soft_cap is None else f"soft-cap {head.soft_cap:g}"
    return f"{'no bias' if head.bias is None else 'with bias'}, scale {head.scale:g}, {cap}"


def likely_head(target: Target, final: Tensor, own: OwnOutputs, limit: float) -> str:
    if judged(target, final.float(), own.layers[-1].float()) <= limit:
        return "the state is the last layer's raw output: the final norm is missing"
    return (
        "likely a head that was not loaded; or a logit scale or soft-cap that the config does not name, or logits made "
        "of something else than the final state: such a target is not supported"
    )


def prove_embedding(target: Target, received: Tensor, embedded: Tensor) -> float:
    """What a drafter's slots begin with, [T, d], is what the target's first layer received, scale included (SPEC 2).

    Returns the largest relative difference of a token.
    """
    found, expected, limit = embedded.float(), received.float(), LOGIT_TOLERANCE[target.dtype]
    error = judged(target, found, expected)
    if not error <= limit:
        scale = float((found * expected).sum() / found.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
        scaled = judged(target, found * scale, expected) <= limit
        raise InputError(
            f"target {type(target.parts.decoder).__name__}: expected its first layer to receive the drafter's "
            f"embeddings within {limit:g}, found a relative difference of {error:.2g}",
            f"likely an embedding scale that is missing: the target's are {scale:.3g} times as long"
            if scaled
            else "likely position embeddings, a norm or a projection before the first layer; such a target is not "
            "supported",
        )
    return error


def judged(target: Target, found: Tensor, expected: Tensor) -> float:
    """The relative difference of nearly all tokens, or of all in float32, see agreement.py."""
    return relative_error(target.dtype, found, expected)


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
