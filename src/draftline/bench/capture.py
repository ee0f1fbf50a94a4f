"""`bench capture`: a random target's features, beside the bare forward of transformers' model on the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from draftline.bench.measure import Ceiling, kernel_classes, timed
from draftline.bench.random_target import random_model
from draftline.bench.shapes import Shape
from draftline.bench.step import packed_row
from draftline.records import DrafterSpec
from draftline.target.capture import FeatureCapture
from draftline.target.fast_norms import fuse_norms
from draftline.target.load import Target
from draftline.target.parts import find_parts

WARM, TIMED = 2, 6


@dataclass(frozen=True)
class CaptureTiming:
    """Seconds of one micro-batch: the model as transformers builds it, and draftline's capture of it."""

    bare_s: float
    capture_s: float
    classes: dict[str, float]
    flop: float
    fused_norms: int


def random_target(spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 of the spec's sizes and depth with random weights; nothing is downloaded, and nothing tokenised."""
    model = random_model(spec, device, dtype)
    return Target(model, None, find_parts(model, device), "random", "random", frozenset(), device, dtype)


@torch.no_grad()
def measure_capture(shape: Shape, device: torch.device) -> CaptureTiming:
    """Bare forward first, then the norms are fused and the capture is timed: as a run does it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, packed = random_target(shape.spec, device, dtype), packed_row(shape)
    ids = torch.from_numpy(packed.ids).to(device)

    def seconds(call: Callable[[], object]) -> float:
        timed(call, device, WARM)
        return median(timed(call, device, TIMED))

    bare = seconds(lambda: target.parts.decoder(input_ids=ids, use_cache=False))
    fused = fuse_norms(target.model) if device.type == "cuda" else 0
    capture = FeatureCapture(target, shape.spec.target_layer_ids, want_final=True)
    capture_s = seconds(lambda: capture(packed))
    return CaptureTiming(bare, capture_s, kernel_classes(lambda: capture(packed), device), flop(shape, target), fused)


def flop(shape: Shape, target: Target) -> float:
    """2 FLOP a weight and token in every layer, and causal attention: 2 Hq D L a token on average, within documents."""
    layers = sum(p.numel() for p in target.parts.layers.parameters() if p.dim() == 2)
    tokens, spec = shape.rows * shape.sequence, shape.spec
    length = shape.sequence / shape.documents
    attention = 2.0 * spec.num_attention_heads * spec.head_dim * length * spec.num_target_layers
    return tokens * (2.0 * layers + attention)


def capture_figures(shape: Shape, timing: CaptureTiming, found: Ceiling) -> dict[str, object]:
    tokens = shape.rows * shape.sequence
    rate = timing.flop / timing.capture_s / 1e12
    return {
        "shape": shape.name, "rows": shape.rows, "sequence": shape.sequence, "documents": shape.documents,
        "ms": timing.capture_s * 1e3, "tokens_per_s": tokens / timing.capture_s,
        "transformers_forward_ms": timing.bare_s * 1e3, "times_transformers_rate": timing.bare_s / timing.capture_s,
        "tflop": timing.flop / 1e12, "tflop_per_s": rate, "share_of_burst_ceiling": rate / found.burst,
        "share_of_sustained_ceiling": rate / found.sustained, "burst_tflop_per_s": found.burst,
        "sustained_tflop_per_s": found.sustained, "norms_fused": timing.fused_norms,
        "ms_by_kernel_class": {name: seconds * 1e3 for name, seconds in timing.classes.items()},
    }  # fmt: skip
