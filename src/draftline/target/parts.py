"""Finding a target's parts through its own accessors, and proving them instead of trusting names (SPEC 1, 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.errors import InputError

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest logit


@dataclass(frozen=True)
class TargetParts:
    """embedding: ids -> first layer's input; decoder: ids -> final-normed states; head: those states -> logits."""

    config: Any  # the text model's config
    embedding: nn.Embedding
    decoder: nn.Module
    layers: nn.ModuleList
    head: nn.Linear

    @property
    def hidden_size(self) -> int:
        return self.head.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: padded, so it may exceed the tokenizer's count."""
        return self.embedding.weight.shape[0]


def find_parts(model: Any) -> TargetParts:
    """Embedding, decoder, layers and head of a causal language model. Raises InputError naming the part not found."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise InputError(f"target class {type(model).__name__} has no output embedding (language-model head)")
    layers = decoder_layers(decoder, config.num_hidden_layers)
    return TargetParts(config, model.get_input_embeddings(), decoder, layers, head)


def decoder_layers(decoder: nn.Module, depth: int) -> nn.ModuleList:
    """The one ModuleList of the decoder that is as long as the model is deep."""
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    if len(found) != 1:
        raise InputError(
            f"target class {type(decoder).__name__}: expected one list of {depth} decoder layers, found {len(found)}",
            "this family is not supported yet",
        )
    return found[0]


@torch.no_grad()
def prove_parts(model: Any, parts: TargetParts, ids: Tensor) -> float:
    """Largest |head(final state) - the model's own logits|, relative to the largest logit, on ids [R, S].

    Raises InputError above the tolerance of the model's dtype: a wrong head (an untied one where the weights are
    tied, say), a scaled or soft-capped logit, or a decoder that does not end in its final norm.
    """
    expected = model(input_ids=ids, use_cache=False).logits.float()
    final = parts.decoder(input_ids=ids, use_cache=False).last_hidden_state
    found = nn.functional.linear(final, parts.head.weight).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    limit = LOGIT_TOLERANCE[parts.head.weight.dtype]
    if not error <= limit:
        raise InputError(
            f"target {type(model).__name__}: head(final-normed state) differs from the model's own logits by "
            f"{error:.2g} of the largest logit (limit {limit:g})",
            "likely a head bias, a logit scale or soft-cap, or a tied head that was not loaded; such a target is not "
            "supported",
        )
    return error
