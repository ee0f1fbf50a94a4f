"""Features of a whole data set, held on the device: a frozen target has the same to say in every epoch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftline.records import FeatureBatch, PackedBatch


class FeatureStore:
    """Callable: PackedBatch -> FeatureBatch by looking tokens up; the same `get` as capture.

    taps [T, K*d] and final [T, d] (or None) over the T tokens of the data set, in the stream's order; a batch's
    `token` says where each of its tokens stands there.
    """

    def __init__(self, taps: Tensor, final: Tensor | None) -> None:
        self.taps = taps
        self.final = final

    def __call__(self, packed: PackedBatch) -> FeatureBatch:
        index = torch.from_numpy(np.maximum(packed.token, 0))  # padding looks up token 0: finite, and seen by no slot
        if self.taps.is_cuda:
            index = index.pin_memory().to(self.taps.device, non_blocking=True)
        return FeatureBatch(packed, self.taps[index], None if self.final is None else self.final[index])
