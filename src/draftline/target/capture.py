"""Capture: the target's forward over documents, taps by hooks on the layers (SPEC 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftline.records import FeatureBatch, PackedBatch
from draftline.target.load import Target
from draftline.target.parts import layer_state

Span = tuple[int, int]  # where a document begins in a flat array of tokens, and its length
SHARED_FORWARD_TOKENS = 16384  # fills a large GPU; the features of so many tokens are small beside the target


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward leaves the raw output of each tapped layer, before any final norm, in the dict."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            outputs[layer] = layer_state(module, output)

        return hook

    handles = [layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class FlatFeatures:
    """Features of a flat array of tokens: taps [T, K*d], and final [T, d] where the loss wants it."""

    taps: Tensor
    final: Tensor | None


class FeatureCapture:
    """Callable: PackedBatch -> FeatureBatch on the target's device.

    Documents must not see each other in any kind of target (attention of every sort, recurrent states), so each goes
    through the target as a row of its own, padded on the right, where padding can reach nothing before it. Documents
    of like length share a forward of at most `tokens_per_forward` tokens.

    On a CPU each document has a forward of its own unless told otherwise: its features are then the same bits whatever
    else is captured with it, so live, kept and prepared features train the same drafter. Sharing gains nothing there
    (SmolLM2, six documents of 50 to 400 tokens: 6.7 s shared, 4.1 s alone) and changed the last bits of most documents.
    """

    def __init__(
        self, target: Target, taps: tuple[int, ...], want_final: bool, tokens_per_forward: int | None = None
    ) -> None:
        self.target = target
        self.taps = taps
        self.want_final = want_final
        self.tokens_per_forward = tokens_per_forward or (1 if target.device.type == "cpu" else SHARED_FORWARD_TOKENS)

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
        hidden, device, dtype = self.target.parts.hidden_size, self.target.device, self.target.dtype
        taps = torch.zeros(len(ids), len(self.taps) * hidden, device=device, dtype=dtype)
        final = torch.zeros(len(ids), hidden, device=device, dtype=dtype) if self.want_final else None
        for group in self.groups(spans):
            place, padded = self.pad(ids, group)
            with tapped(self.target.parts.layers, self.taps) as outputs:
                last = self.target.parts.decoder(input_ids=padded, use_cache=False).last_hidden_state
            mine = torch.from_numpy(np.flatnonzero(place >= 0)).to(device)
            there = torch.from_numpy(place[place >= 0]).to(device)
            taps[there] = torch.cat([rows_at(outputs[layer], mine) for layer in self.taps], dim=-1)
            if final is not None:
                final[there] = rows_at(last, mine)
            advance(len(mine))
        return FlatFeatures(taps, final)

    def groups(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Like lengths together, longest first."""
        groups: list[list[Span]] = []
        for span in sorted(spans, key=lambda span: -span[1]):
            if groups and (len(groups[-1]) + 1) * groups[-1][0][1] <= self.tokens_per_forward:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def pad(self, ids: np.ndarray, group: list[Span]) -> tuple[np.ndarray, Tensor]:
        """(place of every padded token in `ids`, -1 on padding [D * longest]; token ids [D, longest] on the device)."""
        longest = group[0][1]
        place = np.full((len(group), longest), -1, dtype=np.int64)
        for row, (start, count) in enumerate(group):
            place[row, :count] = np.arange(start, start + count)
        padded = np.where(place >= 0, ids[np.maximum(place, 0)], ids[group[0][0]]).astype(np.int64)
        return place.reshape(-1), torch.from_numpy(padded).to(self.target.device)


def rows_at(states: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of states [D, L, d] laid end to end, on the index's device: a layer may lie on another."""
    return states.flatten(0, 1)[index.to(states.device)].to(index.device)


def document_spans(document: np.ndarray) -> list[Span]:
    """Every document in document numbers [R, S] (-1: padding), as spans of the flattened array."""
    rows, length = document.shape
    key = np.where(document >= 0, document + np.arange(rows)[:, None] * (length + 1), -1).reshape(-1)
    starts = np.flatnonzero(np.diff(key, prepend=-2) != 0)
    lengths = np.diff(np.append(starts, key.size))
    return [(int(s), int(n)) for s, n in zip(starts, lengths, strict=True) if key[s] >= 0]
