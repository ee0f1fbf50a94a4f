"""Packed conversations on the device, and the loss on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

LOSS_BIT = 1 << 15  # set by encode.py on the tokens that carry loss; above every id of a vocabulary of 2048


@dataclass(frozen=True)
class Rows:
    """Packed conversations on the device."""

    ids: Tensor  # int16 [R, S]
    supervised: Tensor  # bool [R, S]

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Rows:
        packed = np.load(path)
        ids = torch.from_numpy((packed & (LOSS_BIT - 1)).astype(np.int16))
        return cls(ids.to(device), torch.from_numpy(packed >= LOSS_BIT).to(device))

    def take(self, which: Tensor) -> Rows:
        return Rows(self.ids[which], self.supervised[which])


def documents_of(ids: Tensor, start_id: int) -> tuple[Tensor, Tensor]:
    """Which document a token is of and its position there, both [R, S]; a document opens with two turns."""
    starts = ids == start_id
    document = (starts.cumsum(1) - 1) // 2
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    opens = torch.ones_like(starts)
    opens[:, 1:] = document[:, 1:] != document[:, :-1]
    return document, place - torch.where(opens, place, 0).cummax(1).values


def summed_loss(model: Qwen3ForCausalLM, rows: Rows, start_id: int) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats and the number of supervised tokens; attention stays inside each document."""
    ids = rows.ids.long()
    document, position = documents_of(ids, start_id)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = (document[:, :, None] == document[:, None, :]) & causal  # [R, S, S]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids, attention_mask=mask[:, None], position_ids=position, use_cache=False).logits
    labels = torch.where(rows.supervised, ids, -100)[:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total, rows.supervised[:, 1:].sum()
