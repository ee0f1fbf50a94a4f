"""How far two sets of a target's states agree: what is compared is never the same arithmetic twice."""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.target.parts import LOGIT_TOLERANCE

# A batch of another shape takes other kernels: in bfloat16 a token's features differ by some per cent then, and a
# mixture of experts may route a few tokens elsewhere. So nine tokens of ten are judged there, and all of them in
# float32.
JUDGED_SHARE = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}


def feature_tolerance(dtype: torch.dtype) -> float:
    """Of the relative error between features of one document that were computed in two ways."""
    return LOGIT_TOLERANCE[dtype] * (1 if dtype == torch.float32 else 2)


def relative_error(dtype: torch.dtype, found: Tensor, expected: Tensor) -> float:
    """The largest of the tokens' relative differences, or what JUDGED_SHARE of them stay below; NaN where any is."""
    errors = token_errors(found, expected)
    if not bool(torch.isfinite(errors).all()):
        return float("nan")
    return float(errors.flatten().quantile(JUDGED_SHARE[dtype]))


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Difference of two vectors [..., d], each relative to the length of the expected one: [...].

    Not relative to the largest value of all: a few tokens of most models have values a thousand times the usual ones.
    """
    length = torch.linalg.vector_norm(expected, dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)
    return torch.linalg.vector_norm(found - expected, dim=-1) / length
