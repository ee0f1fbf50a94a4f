"""RMSNorms of a target as one kernel each, on CUDA: transformers' own take seven passes over memory.

No name of a family is looked at. A module with one weight vector and an epsilon is tried: if the kernel gives what the
module gives on random input, its forward is replaced, otherwise the module stays as it was.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # relative to the largest value; bf16 rounds twice
EPSILON_NAMES = ("variance_epsilon", "eps")


def fuse_norms(model: nn.Module) -> int:
    """Replace what can be proven equal; returns how many norms now run as one kernel. CUDA only."""
    return sum(fuse(module) for module in model.modules() if is_candidate(module))


def is_candidate(module: Any) -> bool:
    """One weight vector, nothing else: an RMSNorm, or something that the trial will tell from one."""
    if "_hf_hook" in vars(module):  # a model spread over devices moves its inputs by a wrapped forward: leave it
        return False
    if len(signature(module.forward).parameters) != 1:  # a gated norm takes its gate too
        return False
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and module.weight.dim() == 1 and epsilon(module) is not None


def epsilon(module: Any) -> float | None:
    return next((float(vars(module)[name]) for name in EPSILON_NAMES if name in vars(module)), None)


@torch.no_grad()
def fuse(module: Any) -> bool:
    weight, eps = module.weight, epsilon(module)
    if not weight.is_cuda or weight.dtype not in TOLERANCE or eps is None:
        return False
    if weight.device.index != torch.cuda.current_device():  # Triton launches there
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(64, len(weight), generator=generator, device=weight.device, dtype=weight.dtype)
    expected = module(x)
    if not isinstance(expected, Tensor) or expected.dtype != x.dtype:
        return False
    for offset in (0.0, 1.0):  # some families store the weight less one
        found = fused(weight, eps, offset, x)
        if (found - expected).abs().max() <= TOLERANCE[weight.dtype] * expected.abs().max():
            module.forward = partial(fused, weight, eps, offset)
            return True
    return False


def fused(weight: Tensor, eps: float, offset: float, hidden_states: Tensor) -> Tensor:
    from draftline.kernels.pointwise import rms_norm  # needs Triton, which only CUDA builds of torch bring

    return rms_norm(hidden_states.contiguous(), weight, eps, offset)
