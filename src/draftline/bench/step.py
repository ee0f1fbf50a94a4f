"""`bench step`: a drafter's forward and backward on random features, beside what the device can do."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from draftline.bench.measure import Ceiling, Timing, measure
from draftline.bench.shapes import Shape
from draftline.config import Products
from draftline.drafter.cost import StepCost, step_cost
from draftline.drafter.losses import LossKind
from draftline.drafter.model import untrained
from draftline.drafter.products import refuse_fp8_device, refuse_fp8_sizes
from draftline.drafter.step import DrafterStep
from draftline.records import FeatureBatch, Head, PackedBatch
from draftline.train.warm_up import compile_kernels


def packed_row(shape: Shape) -> PackedBatch:
    """Random tokens, all of them answers; documents of equal length."""
    rng = np.random.default_rng(0)
    size = (shape.rows, shape.sequence)
    length = -(-shape.sequence // shape.documents)
    at = np.broadcast_to(np.arange(shape.sequence), size)
    ids = rng.integers(5, shape.spec.vocab_size, size)
    return PackedBatch(0, ids, np.ones(size, dtype=bool), at // length, at % length, at.copy())


def random_step(
    shape: Shape, kind: LossKind, device: torch.device, dtype: torch.dtype, products: Products = "plain"
) -> DrafterStep:
    drafter = untrained(shape.spec, seed=0).to(device)
    generator = torch.Generator(device).manual_seed(0)
    embedding = nn.Embedding(shape.spec.vocab_size, shape.spec.hidden_size, device=device, dtype=dtype)
    head = 0.02 * torch.randn(embedding.weight.shape, generator=generator, device=device).to(dtype)
    return DrafterStep(drafter, embedding.requires_grad_(False), Head(head), kind, shape.anchors, 0, products)


def random_features(shape: Shape, device: torch.device, dtype: torch.dtype) -> FeatureBatch:
    packed, spec = packed_row(shape), shape.spec
    generator = torch.Generator(device).manual_seed(1)
    taps, final = (
        torch.randn(*packed.ids.shape, width, generator=generator, device=device, dtype=dtype)
        for width in (len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size)
    )
    return FeatureBatch(packed, taps, final)


def measure_step(shape: Shape, loss: str, products: Products, device: torch.device) -> tuple[Timing, StepCost]:
    """Forward and backward of one micro-batch, without the optimizer, and what a row of it costs.

    Raises InputError where the device or the shape has no FP8 products and they are asked for."""
    if products == "fp8":
        refuse_fp8_device(device)
        refuse_fp8_sizes(shape.spec)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = LossKind(loss, "exponential" if loss == "ce" else "dpace", 7.0, 0.5)
    step, batch = random_step(shape, kind, device, dtype, products), random_features(shape, device, dtype)
    timing = measure(
        lambda: step.forward_backward(batch), lambda: compile_kernels(step, batch.packed, dtype),
        lambda: step.drafter.zero_grad(set_to_none=True), device,
    )  # fmt: skip
    return timing, step_cost(shape.spec, step.work(batch.packed))


def step_figures(
    shape: Shape, loss: str, products: Products, timing: Timing, cost: StepCost, found: Ceiling
) -> dict[str, object]:
    """What the table shows and --json writes."""
    rate = shape.rows * cost.total / timing.median_s / 1e12
    return {
        "shape": shape.name, "rows": shape.rows, "sequence": shape.sequence, "documents": shape.documents,
        "anchors": shape.anchors, "loss": loss, "products": products, "ms": timing.median_s * 1e3,
        "tokens_per_s": shape.rows * shape.sequence / timing.median_s, "tflop": shape.rows * cost.total / 1e12,
        "tflop_per_s": rate, "share_of_burst_ceiling": rate / found.burst,
        "share_of_sustained_ceiling": rate / found.sustained, "burst_tflop_per_s": found.burst,
        "sustained_tflop_per_s": found.sustained, "peak_gib_first_micro_batch": timing.peak_first_bytes / 2**30,
        "peak_gib_later": timing.peak_bytes / 2**30, "first_step_s": timing.first_s,
        "first_step_after_process_start_s": timing.since_process_start_s,
        "ms_by_kernel_class": {name: seconds * 1e3 for name, seconds in timing.classes.items()},
    }  # fmt: skip
