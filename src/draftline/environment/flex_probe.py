"""flex_attention of this torch on this device, compiled, against dense attention. Run as a process of its own:

    python -m draftline.environment.flex_probe cpu|cuda

prints one JSON object: the errors of values and gradients relative to dense, and the seconds of the first call.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

HEADS, HEAD_DIM, QUERIES, KEYS = 4, 64, 128, 384


def probe(device: torch.device) -> dict[str, float | None]:
    """Blocks of 16 queries, each seeing the keys before its anchor. A CPU has no compiled backward: `backward_error`
    is None there. Errors are norms of differences over norms of the dense float32 reference."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, QUERIES, HEAD_DIM), (1, HEADS, KEYS, HEAD_DIM), (1, HEADS, KEYS, HEAD_DIM)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    anchor = torch.arange(1, QUERIES // 16 + 1, device=device) * 41
    trained = device.type == "cuda"
    for tensor in inputs:
        tensor.requires_grad_(trained)

    def before_anchor(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < anchor[q // 16]

    mask = create_block_mask(before_anchor, None, None, QUERIES, KEYS, device=device.type)
    started = time.perf_counter()
    out = fused(inputs, mask)
    gradients = torch.autograd.grad(out.square().sum(), inputs) if trained else None
    if trained:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    visible = torch.arange(KEYS, device=device) < anchor.repeat_interleave(16)[:, None]
    reference = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = dense(reference, visible)
    expected_gradients = torch.autograd.grad(expected.square().sum(), reference)
    backward = None if gradients is None else max(map(relative, gradients, expected_gradients))
    return {"forward_error": relative(out, expected), "backward_error": backward, "compile_s": seconds}


def fused(inputs: list[Tensor], mask: BlockMask) -> Tensor:
    q, k, v = inputs
    out = torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k, v, block_mask=mask)
    assert isinstance(out, Tensor)
    return out


def dense(inputs: list[Tensor], visible: Tensor) -> Tensor:
    q, k, v = inputs
    scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().float() - expected.detach()).norm() / expected.detach().norm())


if __name__ == "__main__":
    print(json.dumps(probe(torch.device(sys.argv[1]))))
