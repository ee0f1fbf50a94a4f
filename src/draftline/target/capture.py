"""Capture: one forward of the target over a packed batch, taps by hooks on the layers (SPEC 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftline.records import FeatureBatch, PackedBatch
from draftline.target.load import Target


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward leaves the raw output of each tapped layer, before any final norm, in the dict."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[layer].register_forward_hook(keep(layer)) for layer in taps]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class FeatureCapture:
    """Callable: PackedBatch -> FeatureBatch on the target's device.

    Documents of a packed row must not see each other in any kind of target (attention of every sort, recurrent
    states), so each document goes through the target as a row of its own, padded on the right, where padding can
    reach nothing before it. Documents of like length share a forward of at most `tokens_per_forward` tokens.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], want_final: bool, tokens_per_forward: int = 16384) -> None:
        self.target = target
        self.taps = taps
        self.want_final = want_final
        self.tokens_per_forward = tokens_per_forward

    @torch.no_grad()
    def __call__(self, packed: PackedBatch) -> FeatureBatch:
        rows, length = packed.ids.shape
        hidden = self.target.parts.hidden_size
        device, dtype = self.target.device, self.target.dtype
        taps = torch.zeros(rows * length, len(self.taps) * hidden, device=device, dtype=dtype)
        final = torch.zeros(rows * length, hidden, device=device, dtype=dtype) if self.want_final else None
        for group in self.groups(packed):
            source, padded_ids = self.pad(packed, group)
            with tapped(self.target.parts.layers, self.taps) as outputs:
                last = self.target.parts.decoder(input_ids=padded_ids, use_cache=False).last_hidden_state
            mine = torch.from_numpy(np.flatnonzero(source >= 0)).to(device)
            place = torch.from_numpy(source[source >= 0]).to(device)
            features = torch.cat([outputs[layer].flatten(0, 1)[mine] for layer in self.taps], dim=-1)
            taps[place] = features
            if final is not None:
                final[place] = last.flatten(0, 1)[mine]
        shaped_final = None if final is None else final.view(rows, length, hidden)
        return FeatureBatch(packed, taps.view(rows, length, -1), shaped_final)

    def groups(self, packed: PackedBatch) -> list[list[tuple[int, int]]]:
        """Documents as (flat start, length), like lengths together, longest first."""
        documents = document_spans(packed.document)
        documents.sort(key=lambda span: -span[1])
        groups: list[list[tuple[int, int]]] = []
        for span in documents:
            if groups and (len(groups[-1]) + 1) * groups[-1][0][1] <= self.tokens_per_forward:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def pad(self, packed: PackedBatch, group: list[tuple[int, int]]) -> tuple[np.ndarray, Tensor]:
        """(flat source position of every padded token, -1 on padding; ids [documents, longest] on the device)."""
        longest = group[0][1]
        source = np.full((len(group), longest), -1, dtype=np.int64)
        for row, (start, count) in enumerate(group):
            source[row, :count] = np.arange(start, start + count)
        flat = packed.ids.reshape(-1)
        ids = np.where(source >= 0, flat[np.maximum(source, 0)], flat[group[0][0]])
        return source.reshape(-1), torch.from_numpy(ids).to(self.target.device, non_blocking=True)


def document_spans(document: np.ndarray) -> list[tuple[int, int]]:
    """(flat start, length) of every document in document numbers [R, S] (-1: padding)."""
    rows, length = document.shape
    key = np.where(document >= 0, document + np.arange(rows)[:, None] * (length + 1), -1).reshape(-1)
    starts = np.flatnonzero(np.diff(key, prepend=-2) != 0)
    lengths = np.diff(np.append(starts, key.size))
    return [(int(s), int(n)) for s, n in zip(starts, lengths, strict=True) if key[s] >= 0]
