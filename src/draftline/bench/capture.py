"""`bench capture`: a random target's features, beside bare forwards on the same tokens: of transformers' model as it is
built, and of the same model with its parts fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from draftline.bench.measure import Ceiling, kernel_classes, timed
from draftline.bench.random_target import random_model
from draftline.bench.shapes import Shape
from draftline.records import DrafterSpec, PackedBatch
from draftline.target.capture import FeatureCapture, Forward, document_spans
from draftline.target.load import Target, at_best_speed
from draftline.target.packing import Packing
from draftline.target.parts import find_parts

WARM, TIMED = 2, 6
SHORTEST, LONGEST = 0.2, 1.8  # documents' lengths, relative to their mean


@dataclass(frozen=True)
class Path:
    """Seconds of one micro-batch on one way: its forwards alone, and the capture they are for."""

    forward_s: float
    capture_s: float


@dataclass(frozen=True)
class CaptureTiming:
    """transformers_s: the model as transformers builds it. paths: packed, where the target can be, and padded."""

    transformers_s: float
    paths: dict[str, Path]
    classes: dict[str, float]  # of the first path, which is what a run takes
    flop: float
    lengths: list[int]
    speed: dict[str, str]

    @property
    def taken(self) -> Path:
        return next(iter(self.paths.values()))


def uneven_rows(shape: Shape) -> PackedBatch:
    """Random tokens, all of them answers; lengths of a row's documents uniform between 0.2 and 1.8 of their mean."""
    rng = np.random.default_rng(0)
    size = (shape.rows, shape.sequence)
    shares = rng.uniform(SHORTEST, LONGEST, (shape.rows, shape.documents)).cumsum(1)
    ends = np.round(shares / shares[:, -1:] * shape.sequence).astype(np.int64)
    at = np.broadcast_to(np.arange(shape.sequence), size)
    document = np.stack([np.searchsorted(row, np.arange(shape.sequence), side="right") for row in ends])
    begins = np.concatenate([np.zeros((shape.rows, 1), dtype=np.int64), ends[:, :-1]], axis=1)
    position = at - np.take_along_axis(begins, document, axis=1)
    ids = rng.integers(5, shape.spec.vocab_size, size)
    return PackedBatch(0, ids, np.ones(size, dtype=bool), document, position, at.copy())


def random_target(spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 of the spec's sizes and depth with random weights; nothing is downloaded, and nothing tokenised."""
    model = random_model(spec, device, dtype)
    return Target(model, None, find_parts(model, device), "random", "random", frozenset(), device, dtype)


@torch.no_grad()
def measure_capture(shape: Shape, device: torch.device) -> CaptureTiming:
    """transformers' forward first, then the target is brought to its best speed, as a run does it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, packed = random_target(shape.spec, device, dtype), uneven_rows(shape)
    ids, spans = torch.from_numpy(packed.ids).to(device), document_spans(packed.document)

    def seconds(call: Callable[[], object]) -> float:
        timed(call, device, WARM)
        return median(timed(call, device, TIMED))

    transformers_s = seconds(lambda: target.parts.decoder(input_ids=ids, use_cache=False))
    target = at_best_speed(target) if device.type == "cuda" else target

    def capture_by(packing: Packing) -> FeatureCapture:
        return FeatureCapture(target, shape.spec.target_layer_ids, want_final=True, packing=packing)

    ways = {"packed": target.packing} if target.packing.longest_tokens else {}
    ways["padded"] = Packing(0, "asked for")
    paths = {}
    for name, packing in ways.items():
        capture = capture_by(packing)
        rows = list(capture.forwards(packed.ids.reshape(-1), spans))
        paths[name] = Path(seconds(partial(run_all, rows, target)), seconds(partial(capture, packed)))
    first = capture_by(next(iter(ways.values())))
    classes = kernel_classes(lambda: first(packed), device)
    lengths = [length for _, length in spans]
    return CaptureTiming(transformers_s, paths, classes, flop(shape, target, lengths), lengths, target.speed)


def run_all(forwards: list[Forward], target: Target) -> None:
    for forward in forwards:
        forward.run(target.parts.decoder)


def flop(shape: Shape, target: Target, lengths: list[int]) -> float:
    """2 FLOP a weight and token in every layer, and causal attention: 2 Hq D L^2 for each document of L tokens."""
    layers = sum(p.numel() for p in target.parts.layers.parameters() if p.dim() == 2)
    squares = float(sum(length * length for length in lengths))
    attention = 2.0 * shape.spec.num_attention_heads * shape.spec.head_dim * squares * shape.spec.num_target_layers
    return 2.0 * layers * sum(lengths) + attention


def capture_figures(shape: Shape, timing: CaptureTiming, found: Ceiling) -> dict[str, object]:
    tokens, taken = shape.rows * shape.sequence, timing.taken
    rate = timing.flop / taken.capture_s / 1e12
    return {
        "shape": shape.name, "rows": shape.rows, "sequence": shape.sequence, "documents": shape.documents,
        "document_tokens": lengths_text(timing.lengths), "ms": taken.capture_s * 1e3,
        "tokens_per_s": tokens / taken.capture_s,
        **{f"{name}_ms": path.capture_s * 1e3 for name, path in timing.paths.items()},
        "bare_forward_ms": taken.forward_s * 1e3, "share_of_bare_forward_rate": taken.forward_s / taken.capture_s,
        "transformers_forward_ms": timing.transformers_s * 1e3,
        "times_transformers_rate": timing.transformers_s / taken.capture_s, "tflop": timing.flop / 1e12,
        "tflop_per_s": rate, "share_of_burst_ceiling": rate / found.burst,
        "share_of_sustained_ceiling": rate / found.sustained, "burst_tflop_per_s": found.burst,
        "sustained_tflop_per_s": found.sustained, **timing.speed,
        "ms_by_kernel_class": {name: seconds * 1e3 for name, seconds in timing.classes.items()},
    }  # fmt: skip


def lengths_text(lengths: list[int]) -> str:
    if len(set(lengths)) == 1:
        return str(lengths[0])
    return f"{min(lengths)} to {max(lengths)}, mean {np.mean(lengths):.0f} (uniform, {SHORTEST} to {LONGEST} of it)"
