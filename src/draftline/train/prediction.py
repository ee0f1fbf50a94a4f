"""What a plan will need and give, counted before anything starts: memory per rank and tokens/s. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftline.config import Recipe
from draftline.drafter.cost import RowWork, fp8_flop, step_cost
from draftline.drafter.products import refuse_fp8_sizes
from draftline.errors import InputError
from draftline.records import DrafterSpec
from draftline.train.plan import Plan, Role, StageTimes
from draftline.train.step_memory import Sizes, footprint, weights_bytes

SUSTAINED_TFLOPS = {"cuda": 400.0, "cpu": 0.05}  # assumed for a prediction; what a device really does is measured
GIB = 2**30


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target that its folder states, and its weights in bytes as stored."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    stored_bytes: int
    stored_item_bytes: int


def read_target_shape(path: str) -> TargetShape | None:
    """Sizes from config.json and the sizes of its safetensors files; None for a hub id, whose files are not here.

    Raises InputError where config.json lacks a size.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return None
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = stated | stated.get("text_config", {})
    dtype = str(text.get("dtype", text.get("torch_dtype", "float32")))
    try:
        heads = text["num_attention_heads"]
        return TargetShape(
            text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"], heads,
            text.get("num_key_value_heads") or heads, text.get("head_dim") or text["hidden_size"] // heads,
            text["vocab_size"], bool(text.get("tie_word_embeddings", True)),
            sum(file.stat().st_size for file in folder.glob("*.safetensors")), 4 if "32" in dtype else 2,
        )  # fmt: skip
    except KeyError as error:
        raise InputError(f"{folder / 'config.json'}: no {error} there, which a prediction needs") from error


@dataclass(frozen=True)
class Counted:
    """Of one rank's work, from sizes alone."""

    sizes: Sizes
    borrowed_bytes: int  # embedding and head
    target_bytes: int
    drafter_flop_per_token: float
    drafter_fp8_flop_per_token: float  # those of them that are FP8 products
    target_flop_per_token: float


def count(recipe: Recipe, shape: TargetShape, device: str) -> Counted:
    """FLOP of a row by drafter/cost.py, its slots seeing half of it on average; the target 2 P a token."""
    drafter, item = drafter_of(recipe, shape), 4 if recipe.target.dtype == "float32" or device == "cpu" else 2
    length, anchors, compares = recipe.data.sequence_length, recipe.train.anchors, recipe.loss.kind != "ce"
    slots = anchors * (drafter.block_size - 1)
    work = RowWork(length, anchors, length / 2, slots, min(length, slots) if compares else 0)
    fp8 = 0.0
    if recipe.train.products == "fp8":
        refuse_fp8_sizes(drafter)
        fp8 = fp8_flop(drafter, length, anchors)
    return Counted(
        Sizes(
            drafter, recipe.train.rows_per_micro_batch, length, anchors, item, device == "cuda", compares,
            shape.intermediate, fp8=recipe.train.products == "fp8",
        ),
        (1 if shape.tied else 2) * shape.vocabulary * shape.hidden * item,
        shape.stored_bytes * item // shape.stored_item_bytes,
        step_cost(drafter, work).total / length,
        fp8 / length,
        2 * shape.stored_bytes / shape.stored_item_bytes,
    )  # fmt: skip


def drafter_of(recipe: Recipe, shape: TargetShape) -> DrafterSpec:
    """Its sizes; what has no part in them is empty."""
    own = recipe.drafter
    layers, size = own.layers, own.head_dim or shape.head_dim
    taps = len(own.taps) if own.taps else min(own.tap_count, max(shape.layers - 3, 1))
    return DrafterSpec(
        hidden_size=shape.hidden, intermediate_size=own.intermediate_size or shape.intermediate,
        num_hidden_layers=layers, num_attention_heads=own.attention_heads or shape.heads,
        num_key_value_heads=own.key_value_heads or shape.kv_heads, head_dim=size, vocab_size=shape.vocabulary,
        block_size=own.block_size, mask_token_id=0, target_layer_ids=tuple(range(taps)), num_target_layers=shape.layers,
        rms_norm_eps=0.0, rope_parameters={}, max_position_embeddings=0, sliding_window=own.sliding_window,
        layer_types=tuple("sliding_attention" if i in own.sliding_layers else "full_attention" for i in range(layers)),
    )  # fmt: skip


def memory_bytes(role: Role, plan: Plan, counted: Counted) -> dict[str, float]:
    """What one rank holds at its peak, by purpose."""
    sizes = replace(counted.sizes, spread=plan.drafters if plan.sharded else 1)
    need = footprint(sizes)
    parts: dict[str, float] = {}
    at_once: dict[str, float] = {}  # one after the other, in the same memory
    if role.target is not None:
        parts["target"] = counted.target_bytes / plan.tensor_parallel
        at_once["capture"] = need.capture / plan.tensor_parallel
    else:
        parts["borrowed"] = counted.borrowed_bytes
    if role.drafter is not None:
        parts["drafter"] = weights_bytes(sizes) + need.gradients + need.moments
        at_once["step"] = need.activations + need.logits
    parts["features"] = need.features
    parts[" or ".join(at_once)] = max(at_once.values())
    return parts


def stage_times(counted: Counted, recipe: Recipe, device: str) -> StageTimes:
    """Of one rank at SUSTAINED_TFLOPS, FP8 products at twice that; the optimizer's hundredth of a step is left out."""
    tokens = recipe.train.rows_per_micro_batch * recipe.data.sequence_length
    flops = SUSTAINED_TFLOPS[device] * 1e12
    train_flop = counted.drafter_flop_per_token - counted.drafter_fp8_flop_per_token / 2
    return StageTimes(tokens * counted.target_flop_per_token / flops, tokens * train_flop / flops, 0.0, tokens)


def memory_text(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    shown = ", ".join(f"{name} {value / GIB:.2g}" for name, value in parts.items())
    return f"{total / GIB:.2g} ({shown})"
