"""Capture: the target's forward over documents, taps by hooks on the layers (SPEC 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftline.records import FeatureBatch, PackedBatch
from draftline.target.load import Target
from draftline.target.packing import Packing, bounds_of, packed_attention
from draftline.target.parts import layer_state

Span = tuple[int, int]  # where a document begins in a flat array of tokens, and its length
SHARED_FORWARD_TOKENS = 16384  # fills a large GPU; the features of so many tokens are small beside the target
ALIKE = (
    0.03  # padding that costs less than attention over rows of documents does: one of 4,096 tokens takes 105 and 111 ms
)


class Enough(Exception):
    """Raised by a hook to leave a forward whose further layers nobody needs."""


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While open, every forward hands the raw output of each tapped layer, before any final norm, to take(layer, state)
    as soon as the layer has run."""

    def hook_of(layer: int) -> Any:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            take(layer, layer_state(module, output))

        return hook

    handles = [layers[layer].register_forward_hook(hook_of(layer)) for layer in taps]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class FlatFeatures:
    """Features of a flat array of tokens: taps [T, K*d], and final [T, d] where the loss wants it."""

    taps: Tensor
    final: Tensor | None


@dataclass(frozen=True)
class Forward:
    """One run of the decoder, and where its states [D, L, d] belong in the flat array."""

    arguments: dict[str, Any]  # the decoder's: input_ids [D, L] on the device, and where documents begin if packed
    is_packed: bool
    tokens: int  # of documents: padding does not count
    place: slice | Tensor  # of these tokens in the flat array
    mine: Tensor | None  # where they are among the D * L of the forward; None: they are all of them

    def run(self, decoder: nn.Module) -> Tensor | None:
        """The decoder's last state [D, L, d]; None where a hook had enough before."""
        with suppress(Enough), packed_attention(decoder) if self.is_packed else nullcontext():
            state: Tensor = decoder(use_cache=False, **self.arguments).last_hidden_state
            return state
        return None

    def write(self, states: Tensor, kept: Tensor) -> None:
        """Copy the documents' states into kept [T, d], which may be columns of a wider tensor, or lie elsewhere."""
        rows = states.flatten(0, 1)
        if self.mine is not None:
            rows = rows[self.mine.to(rows.device)]
        kept[self.place] = rows.to(kept.device)


class FeatureCapture:
    """Callable: PackedBatch -> FeatureBatch on the target's device.

    Documents must not see each other in any kind of target (attention of every sort, recurrent states). Where the
    target was proven to keep them apart (packing.py), they are laid end to end in rows of at most `tokens_per_forward`
    tokens. Otherwise, and where hardly any padding comes of it, each is a row of its own, padded on the right, where
    padding can reach nothing before it, and documents of like length share a forward of at most so many tokens.

    On a CPU each document has a forward of its own unless told otherwise: its features are then the same bits whatever
    else is captured with it, so live, kept and prepared features train the same drafter. Sharing gains nothing there
    (SmolLM2, six documents of 50 to 400 tokens: 6.7 s shared, 4.1 s alone) and changed the last bits of most documents.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        want_final: bool,
        tokens_per_forward: int | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.target = target
        self.taps = taps
        self.want_final = want_final
        self.tokens_per_forward = tokens_per_forward or (1 if target.device.type == "cpu" else SHARED_FORWARD_TOKENS)
        self.packing = packing or target.packing

    def __call__(self, packed: PackedBatch) -> FeatureBatch:
        rows, length = packed.ids.shape
        flat = self.capture(packed.ids.reshape(-1), document_spans(packed.document))
        final = None if flat.final is None else flat.final.view(rows, length, -1)
        return FeatureBatch(packed, flat.taps.view(rows, length, -1), final)

    @torch.no_grad()
    def capture(
        self, ids: np.ndarray, spans: Sequence[Span], advance: Callable[[int], None] = lambda _: None
    ) -> FlatFeatures:
        """Features of the documents `spans` in the token array ids [T]; zeros on tokens of no document.

        `advance` is told the tokens of each forward as it is queued.
        """
        parts, device, dtype = self.target.parts, self.target.device, self.target.dtype
        taps = torch.zeros(len(ids), len(self.taps), parts.hidden_size, device=device, dtype=dtype)
        final = torch.zeros(len(ids), parts.hidden_size, device=device, dtype=dtype) if self.want_final else None
        for forward in list(self.forwards(ids, spans)):  # all on the device before the first runs: copies would wait
            with tapped(parts.layers, self.taps, partial(self.keep, forward, taps)):
                last = forward.run(parts.decoder)
            if final is not None and last is not None:
                forward.write(last, final)
            advance(forward.tokens)
        return FlatFeatures(taps.flatten(1), final)

    def keep(self, forward: Forward, taps: Tensor, layer: int, states: Tensor) -> None:
        """One tap of a forward into its place in taps [T, K, d]. Layers above the last serve the final state alone."""
        forward.write(states, taps[:, self.taps.index(layer)])
        if layer == max(self.taps) and not self.want_final:
            raise Enough

    def forwards(self, ids: np.ndarray, spans: Sequence[Span]) -> Iterator[Forward]:
        """Rows of documents end to end first, then those that only padding does right."""
        rows = self.filled(sorted(span for span in spans if span[1] <= self.packing.longest_tokens))
        for row in rows:
            yield self.end_to_end(ids, row) if padding_share(row) > ALIKE else self.padded(ids, row)
        longer = sorted((span for span in spans if span[1] > self.packing.longest_tokens), key=lambda span: -span[1])
        for group in self.groups(longer):
            yield self.padded(ids, group)

    def padded(self, ids: np.ndarray, group: Sequence[Span]) -> Forward:
        place, ids_padded = self.pad(ids, group)
        mine, there = (torch.from_numpy(at).to(self.target.device) for at in placed(place))
        return Forward({"input_ids": ids_padded}, False, len(mine), there, mine)

    def filled(self, spans: Sequence[Span]) -> list[list[Span]]:
        """In their order, as many in a row as `tokens_per_forward` holds, and at least one."""
        rows: list[list[Span]] = []
        room = 0
        for span in spans:
            if span[1] > room:
                rows.append([])
                room = max(self.tokens_per_forward, span[1])
            rows[-1].append(span)
            room -= span[1]
        return rows

    def end_to_end(self, ids: np.ndarray, row: Sequence[Span]) -> Forward:
        lengths, device = [length for _, length in row], self.target.device
        begin, tokens = row[0][0], sum(lengths)
        place = np.concatenate([np.arange(start, start + length) for start, length in row])
        together = torch.from_numpy(ids[place].astype(np.int64))[None].to(device)
        is_run = place[-1] == begin + tokens - 1
        where = slice(begin, begin + tokens) if is_run else torch.from_numpy(place).to(device)
        return Forward({"input_ids": together} | bounds_of(lengths, device), True, tokens, where, None)

    def groups(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Like lengths together; longest first, as they are given."""
        groups: list[list[Span]] = []
        for span in spans:
            if groups and (len(groups[-1]) + 1) * groups[-1][0][1] <= self.tokens_per_forward:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def pad(self, ids: np.ndarray, group: Sequence[Span]) -> tuple[np.ndarray, Tensor]:
        """(place of every padded token in `ids`, -1 on padding [D * longest]; token ids [D, longest] on the device)."""
        longest = max(length for _, length in group)
        place = np.full((len(group), longest), -1, dtype=np.int64)
        for row, (start, count) in enumerate(group):
            place[row, :count] = np.arange(start, start + count)
        padded = np.where(place >= 0, ids[np.maximum(place, 0)], ids[group[0][0]]).astype(np.int64)
        return place.reshape(-1), torch.from_numpy(padded).to(self.target.device)


def padding_share(group: Sequence[Span]) -> float:
    """Of the tokens of documents padded to the longest."""
    return 1 - sum(length for _, length in group) / (len(group) * max(length for _, length in group))


def placed(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which tokens of a padded forward are documents', their places in the flat array)."""
    mine = np.flatnonzero(place >= 0)
    return mine, place[mine]


def document_spans(document: np.ndarray) -> list[Span]:
    """Every document in document numbers [R, S] (-1: padding), as spans of the flattened array."""
    rows, length = document.shape
    key = np.where(document >= 0, document + np.arange(rows)[:, None] * (length + 1), -1).reshape(-1)
    starts = np.flatnonzero(np.diff(key, prepend=-2) != 0)
    lengths = np.diff(np.append(starts, key.size))
    return [(int(s), int(n)) for s, n in zip(starts, lengths, strict=True) if key[s] >= 0]
