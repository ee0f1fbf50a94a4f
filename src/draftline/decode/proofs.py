"""A proof about a target's cache: without it a target that cannot take tokens back is noticed after training only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftline.decode.models import CachedTarget
from draftline.errors import InputError
from draftline.target.load import Target
from draftline.target.parts import LOGIT_TOLERANCE

DRAFTS, ACCEPTED, FOLLOWING = 5, 2, 3


def prove_cache(target: Target, ids: Sequence[int]) -> float:
    """Logits after a verification that rejects drafts, against a forward without a cache; difference / largest logit.

    ids: a text of at least twelve tokens. Raises InputError where the target refuses the cache, or gives other logits.
    """
    begin = len(ids) // 2
    text = list(ids[: begin + ACCEPTED + FOLLOWING])
    drafts = [*text[begin : begin + ACCEPTED], *reversed(text[: DRAFTS - ACCEPTED])]
    try:
        found = logits_after_rejection(target, text[:begin], drafts, text[begin + ACCEPTED :])
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"target {type(target.model).__name__} cannot decode through transformers' cache: {error}",
            "verifying drafts needs a cache that takes tokens back; such a target is not supported",
        ) from error
    with torch.no_grad():
        row = torch.tensor([text], device=target.device)
        expected = target.model(input_ids=row, use_cache=False).logits[0, -FOLLOWING:].float().to(target.device)
    error_share = float((found - expected).abs().max() / expected.abs().max())
    limit = LOGIT_TOLERANCE[target.dtype]
    if not error_share <= limit:
        raise InputError(
            f"target {type(target.model).__name__}: expected after rejected drafts the logits of a forward without "
            f"cache, found a difference of {error_share:.2g} of the largest logit (limit {limit:g})",
            "likely a layer that keeps traces of rejected tokens, or whose forwards with and without cache differ; "
            "decoding would change the text, so such a target is not supported",
        )
    return error_share


def logits_after_rejection(target: Target, prefix: list[int], drafts: list[int], following: list[int]) -> Tensor:
    """Logits [len(following), V] after prefix and the accepted drafts, through the cache of speculative decoding."""
    verifier = CachedTarget(target)
    verifier.forward(prefix, logits_for=1)
    verifier.forward(drafts, logits_for=len(drafts))
    verifier.drop_last(len(drafts) - ACCEPTED)
    logits, _ = verifier.forward(following, logits_for=len(following))
    return logits
