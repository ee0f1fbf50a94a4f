"""Anchors and what hangs on them: a step's blocks, what each may see, its labels and its slot weights (SPEC 3-5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftline.records import PackedBatch


@dataclass(frozen=True)
class Blocks:
    """N blocks per packed row. A block sees the context positions p of its row with start <= p < anchor.

    `keep` is False on a block that only fills the shape: it sees nothing but itself and carries no weight.
    """

    anchor: Tensor  # int64 [R, N], position in the packed row, ascending over the kept blocks
    start: Tensor  # int64 [R, N], where the anchor's document begins in the row
    keep: Tensor  # bool [R, N]

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(to_device(t, device) for t in (self.anchor, self.start, self.keep)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. From pinned memory, so that the host need not wait for what a GPU still has queued."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def copy_together(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Whole numbers and truth values as int64 on `device`, in one copy that does not wait for it. Each begins at a
    multiple of 16 bytes: Triton compiles a kernel anew for a pointer of another alignment."""
    edges = np.cumsum([0, *(part.size + part.size % 2 for part in parts)])
    flat = torch.empty(int(edges[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    host = flat.numpy()
    host[:] = 0
    for part, begin in zip(parts, edges, strict=False):
        host[begin : begin + part.size] = part.ravel()
    there = flat.to(device, non_blocking=True)
    return [there[begin : begin + part.size].view(part.shape) for part, begin in zip(parts, edges, strict=False)]


def eligible(packed: PackedBatch) -> np.ndarray:
    """bool [R, S]: positions a with M_a = M_{a+1} = 1 and a+1 in the same document (SPEC 4)."""
    ok = np.zeros(packed.loss_mask.shape, dtype=bool)
    same = (packed.document[:, :-1] == packed.document[:, 1:]) & (packed.document[:, :-1] >= 0)
    ok[:, :-1] = packed.loss_mask[:, :-1] & packed.loss_mask[:, 1:] & same
    return ok


def sample_blocks(packed: PackedBatch, count: int, seed: int) -> Blocks:
    """Up to `count` anchors per row, uniform without replacement among the eligible, sorted.

    The generator is seeded by (seed, number of the micro-batch): its whole state is that number, so a resumed run
    draws the same anchors whatever ran before it.
    """
    rng = np.random.default_rng([seed, packed.index])
    rows = packed.ids.shape[0]
    anchor = np.zeros((rows, count), dtype=np.int64)
    keep = np.zeros((rows, count), dtype=bool)
    for row, ok in enumerate(eligible(packed)):
        positions = np.flatnonzero(ok)
        chosen = positions if len(positions) <= count else rng.choice(positions, count, replace=False)
        anchor[row, : len(chosen)] = np.sort(chosen)
        keep[row, : len(chosen)] = True
    start = anchor - np.take_along_axis(packed.position, anchor, axis=1)
    start[~keep] = 0
    return Blocks(torch.from_numpy(anchor), torch.from_numpy(start), torch.from_numpy(keep))


@dataclass(frozen=True)
class SlotTargets:
    """What slots 1..B-1 of every block are trained on. K = B-1."""

    position: (
        Tensor  # int64 [R, N, K] row position a+k of the label, clamped into the row where the slot weighs nothing
    )
    label: Tensor  # int64 [R, N, K] data token x_{a+k}
    supervised: Tensor  # bool [R, N, K] keep, a+k inside the document, M_{a+1..a+k} all 1


def slot_targets(ids: Tensor, loss_mask: Tensor, document: Tensor, blocks: Blocks, block_size: int) -> SlotTargets:
    """Labels and the 0/1 part of the weights: slot k predicts x_{a+k}, the token at its own position (SPEC 5).

    ids int64 [R, S], loss_mask bool [R, S], document int64 [R, S], all on the host. In numpy, for torch hands arrays of
    this size to a thread for every core of the host, who wait for each other (docs/LOG.md).
    """
    tokens, mask, documents, anchor = (part.numpy() for part in (ids, loss_mask, document, blocks.anchor))
    rows, length = tokens.shape
    wanted = anchor[..., None] + np.arange(1, block_size)  # [R, N, K]
    position = np.minimum(wanted, length - 1)

    def there(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, position.reshape(rows, -1), 1).reshape(position.shape)

    same = there(documents) == np.take_along_axis(documents, anchor, 1)[..., None]
    valid = (wanted < length) & same & there(mask) & blocks.keep.numpy()[..., None]
    supervised = np.logical_and.accumulate(valid, axis=-1)
    return SlotTargets(*(torch.from_numpy(part) for part in (position, there(tokens), supervised)))


def teacher_position(slots: SlotTargets, length: int) -> Tensor:
    """int64 [M, K]: where the target's state at a+k-1, which gives its distribution of token a+k, stands among the R*S
    of all rows of `length` positions."""
    row = torch.arange(len(slots.position), device=slots.position.device)[:, None, None]
    return (row * length + (slots.position - 1).clamp(min=0)).flatten(0, 1)


def exponential_weights(supervised: Tensor, gamma: float) -> Tensor:
    """w_k = supervised exp(-(k-1)/gamma), float32 [..., K] (arXiv 2602.06036)."""
    slots = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised * torch.exp(-slots.float() / gamma)


def dpace_weights(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE: q' = (1-alpha) exp(-CE) + alpha, 1 where unsupervised; C_j = prod_{i<=j} q'_i; w_j = sum_{i>=j} C_i.

    cross_entropy float [..., K], detached by the caller; the sum runs over supervised slots. Returns float32 [..., K].
    """
    smooth = torch.where(supervised, (1 - alpha) * torch.exp(-cross_entropy) + alpha, torch.ones_like(cross_entropy))
    reach = smooth.cumprod(-1) * supervised
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised
