"""Documents laid end to end in one row: the target's forward without padding, proven on the target itself.

An attention function of our own, known to transformers by a name of our own, is told where documents begin and keeps
each to itself. Whether everything else in a target does so too (recurrent states, attention that does not ask for the
function, positions) is not guessed: a few random documents are run end to end, and each alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from draftline.target.agreement import feature_tolerance, relative_error
from draftline.target.parts import TargetParts

ATTENTION = "draftline_varlen"
NOT_DONE_HERE = ("softcap", "s_aux", "position_bias")  # what families hand to attention beyond scale and window
# The context's own length changes these embeddings, and a row of many documents is not as long as any of them.
ROPE_BY_LENGTH = {"dynamic", "longrope"}
LONGEST_TRIAL_TOKENS = 8192
UNLIMITED_TOKENS = 2**31 - 1
BEGINNING_TOKENS = 16  # few keys to attend to: here another document's keys would show most


class NotPackable(Exception):
    """Attention that only a padded row does as the target means it."""


@dataclass(frozen=True)
class Packing:
    """How documents share a forward: end to end in one row up to `longest_tokens` each, longer ones in padded rows."""

    longest_tokens: int
    reason: str = ""  # why none is packed, where longest_tokens is 0

    @property
    def text(self) -> str:
        if not self.longest_tokens:
            return f"padded rows ({self.reason})"
        limit = "" if self.longest_tokens == UNLIMITED_TOKENS else f" up to {self.longest_tokens:,} tokens"
        return f"packed, documents{limit} end to end"


UNTRIED = Packing(0, "tried on CUDA only")


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document, as transformers calls its attention functions.

    query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]. Raises NotPackable for what it cannot do.
    """
    asked = [name for name in NOT_DONE_HERE if named.get(name) is not None]
    is_causal = named.get("is_causal")
    if asked or attention_mask is not None:
        raise NotPackable(f"attention with {', '.join(asked) or 'a mask of its own'}")
    if is_causal is False or (is_causal is None and vars(module).get("is_causal") is False):
        raise NotPackable("attention that is not causal")
    if named.get("cu_seq_lens_q") is None:
        raise NotPackable("its layers do not hand on where documents begin")
    if value.shape != key.shape or key.shape[-1] != query.shape[-1]:
        raise NotPackable("values of another width than keys")
    attend = flash if query.is_cuda else one_by_one
    return attend(query, key, value, named.get("scaling"), named.get("sliding_window"), named), None


def flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, bounds: dict[str, Any]
) -> Tensor:
    """torch's FlashAttention over documents of any length; its window counts the keys before the query's own."""
    from torch.nn.attention.varlen import varlen_attn  # of CUDA builds

    named: dict[str, Any] = {"window_size": (-1, 0) if window is None else (window - 1, 0), "scale": scale}
    if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 shares key heads without being asked
        named["enable_gqa"] = True
    begins, longest = bounds["cu_seq_lens_q"], bounds["max_length_q"]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attended = varlen_attn(q, k, v, begins, begins, longest, longest, **named)
    assert isinstance(attended, Tensor)  # with its log-sum-exps only where they are asked for
    return attended[None]


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, bounds: dict[str, Any]
) -> Tensor:
    """The same on a CPU, a document after the other."""
    parts = []
    for begin, end in pairwise(bounds["cu_seq_lens_q"].tolist()):
        at = torch.arange(end - begin)
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < (window or len(at)))
        q, k, v = (x[:, :, begin:end] for x in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=2).transpose(1, 2)


AttentionInterface.register(ATTENTION, varlen_attention)  # a name of our own: nobody else's attention changes


@contextmanager
def packed_attention(decoder: nn.Module) -> Iterator[None]:
    """While open, this decoder's attention is `varlen_attention`, and transformers builds it no mask."""
    if not isinstance(decoder, PreTrainedModel):
        raise NotPackable(f"{type(decoder).__name__} is not one of transformers' models")
    config: Any = decoder.config
    own = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = own


def bounds_of(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """What a decoder is told of documents laid end to end: positions [1, T] and where each begins [N + 1]."""
    counts = torch.tensor([0, *lengths])
    begins = counts.cumsum(0)
    positions = torch.arange(int(begins[-1])) - begins[:-1].repeat_interleave(counts[1:])
    where = begins.to(device, torch.int32)
    return {
        "position_ids": positions[None].to(device), "cu_seq_lens_q": where, "cu_seq_lens_k": where,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


@torch.no_grad()
def find_packing(parts: TargetParts, device: torch.device) -> Packing:
    """Try random documents of this target end to end and each alone."""
    unfit = unfit_of(parts.config)
    if unfit:
        return Packing(0, unfit)
    longest, proven = trial_length(parts.config)
    lengths = [longest, 7, min(130, longest), 1, 61]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(parts.embedding.weight.shape[0], (1, sum(lengths)), generator=generator).to(device)
    try:
        with packed_attention(parts.decoder):
            together = parts.decoder(input_ids=ids, use_cache=False, **bounds_of(lengths, device)).last_hidden_state
    except NotPackable as fault:
        return Packing(0, str(fault))
    except (TypeError, ValueError, KeyError, RuntimeError) as fault:  # what transformers and kernels refuse with
        return Packing(0, f"a row of documents is refused: {' '.join(str(fault).split())[:160]}")
    wrong = leak(parts, ids, together, lengths)
    return Packing(0, wrong) if wrong else Packing(proven)


def unfit_of(config: Any) -> str:
    """What no trial of a few thousand tokens would show."""
    said = config.to_dict()
    if "chunked_attention" in (said.get("layer_types") or []):
        return "attention in chunks"
    by_length = sorted(rope_types(said.get("rope_parameters") or {}) & ROPE_BY_LENGTH)
    return f"{by_length[0]} rotary embedding, which depends on the row's length" if by_length else ""


def rope_types(parameters: dict[str, Any]) -> set[str]:
    """Of all layers' rotary embeddings: some families nest them by kind of layer."""
    nested = [rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type"))}.union(*nested)


def trial_length(config: Any) -> tuple[int, int]:
    """(tokens of the trial's longest document, those up to which a document is proven by it): longer than a sliding
    window where that is short enough to try, and otherwise only documents within the window are packed."""
    said = config.to_dict()
    limit = min(LONGEST_TRIAL_TOKENS + 64, said.get("max_position_embeddings") or LONGEST_TRIAL_TOKENS)
    window = said.get("sliding_window")
    if window is None or "sliding_attention" not in (said.get("layer_types") or ["sliding_attention"]):
        return min(257, limit), UNLIMITED_TOKENS
    longest = min(limit, max(257, window + 37))
    return longest, UNLIMITED_TOKENS if longest >= window + 37 else window


def leak(parts: TargetParts, ids: Tensor, together: Tensor, lengths: Sequence[int]) -> str:
    """Which document is not itself in the row; empty where all are. Beginnings are judged by themselves as well."""
    dtype = parts.embedding.weight.dtype
    limit, begin = feature_tolerance(dtype), 0
    for number, length in enumerate(lengths):
        here = slice(begin, begin + length)
        alone = parts.decoder(input_ids=ids[:, here], use_cache=False).last_hidden_state[0].float()
        found = together[0, here].float()
        first = slice(BEGINNING_TOKENS)
        errors = [relative_error(dtype, a, b) for a, b in ((found, alone), (found[first], alone[first]))]
        if not all(error <= limit for error in errors):
            return f"in a row of documents number {number} differs from itself alone by {max(errors):.2g}"
        begin += length
    return ""
