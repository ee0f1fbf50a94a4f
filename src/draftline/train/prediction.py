"""What a plan will need and give, counted before anything starts: memory per rank and tokens/s. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config import Recipe
from draftline.drafter.cost import fp8_flop, step_cost
from draftline.drafter.products import refuse_fp8_sizes
from draftline.errors import InputError
from draftline.records import DrafterSpec
from draftline.train.plan import Plan, Role

SUSTAINED_TFLOPS = {"cuda": 400.0, "cpu": 0.05}  # assumed for a prediction; what a device really does is measured
CHUNK_LOGITS_BYTES = 128 * 2**20 * 14  # logits, gradient and float32 log-probabilities of drafter.losses.CHUNK_LOGITS
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
    """Bytes and FLOP of one rank's work, from sizes alone."""

    drafter_layer_parameters: int
    drafter_other_parameters: int
    borrowed_bytes: int  # embedding and head
    target_bytes: int
    feature_row_bytes: int
    activation_bytes: int
    drafter_flop_per_token: float
    drafter_fp8_flop_per_token: float  # those of them that are FP8 products
    target_flop_per_token: float


def count(recipe: Recipe, shape: TargetShape, device: str) -> Counted:
    """FLOP of a row by drafter/cost.py, its slots seeing half of it on average; the target 2 P a token. Parameters:
    P_q = L (2 d Hq + 2 d Hkv + 3 d f) and P_fc = K d^2."""
    own, item = recipe.drafter, 4 if recipe.target.dtype == "float32" or device == "cpu" else 2
    d, layers, size = shape.hidden, own.layers, own.head_dim or shape.head_dim
    hq, hkv = (own.attention_heads or shape.heads) * size, (own.key_value_heads or shape.kv_heads) * size
    f = own.intermediate_size or shape.intermediate
    taps = len(own.taps) if own.taps else min(own.tap_count, max(shape.layers - 3, 1))
    s, a, b, rows = recipe.data.sequence_length, recipe.train.anchors, own.block_size, recipe.train.rows_per_micro_batch
    p_q, p_fc = layers * (2 * d * hq + 2 * d * hkv + 3 * d * f), taps * d * d
    drafter = DrafterSpec(
        hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=hq // size,
        num_key_value_heads=hkv // size, head_dim=size, vocab_size=shape.vocabulary, block_size=b, mask_token_id=0,
        target_layer_ids=tuple(range(taps)), num_target_layers=shape.layers, rms_norm_eps=0.0, rope_parameters={},
        max_position_embeddings=0, sliding_window=own.sliding_window,
        layer_types=tuple("sliding_attention" if i in own.sliding_layers else "full_attention" for i in range(layers)),
    )  # fmt: skip
    flop = step_cost(drafter, s, a, s / 2, compares=recipe.loss.kind != "ce").total
    fp8 = 0.0
    if recipe.train.products == "fp8":
        refuse_fp8_sizes(drafter)
        fp8 = fp8_flop(drafter, s, a)
    wide = taps + (recipe.loss.kind != "ce")
    slots = rows * a * b * layers * (4 * d + 2 * hq + 2 * hkv + 3 * f) + rows * s * layers * 4 * hkv
    return Counted(
        p_q, p_fc + 2 * d,
        (1 if shape.tied else 2) * shape.vocabulary * d * item,
        shape.stored_bytes * item // shape.stored_item_bytes,
        rows * s * wide * d * item,
        slots * item + min(CHUNK_LOGITS_BYTES, rows * a * b * shape.vocabulary * 14),
        flop / s, fp8 / s, 2 * shape.stored_bytes / shape.stored_item_bytes,
    )  # fmt: skip


def memory_bytes(role: Role, plan: Plan, counted: Counted) -> dict[str, float]:
    """What one rank holds, by purpose. AdamW on fp32 masters is 16 bytes a parameter with its gradient."""
    parts: dict[str, float] = {}
    if role.target is not None:
        parts["target"] = counted.target_bytes / plan.tensor_parallel
        parts["capture"] = 2 * counted.feature_row_bytes
    if role.drafter is not None:
        layers = counted.drafter_layer_parameters / (plan.drafters if plan.sharded else 1)
        parts["drafter"] = 16 * (layers + counted.drafter_other_parameters)
        parts["activations"] = counted.activation_bytes + 2 * counted.feature_row_bytes
        if role.target is None:
            parts["borrowed"] = counted.borrowed_bytes
    return parts


def stage_rates(counted: Counted, device: str) -> tuple[float, float]:
    """(tokens/s one rank captures, tokens/s one rank trains) at SUSTAINED_TFLOPS, FP8 products at twice that."""
    flops = SUSTAINED_TFLOPS[device] * 1e12
    train_flop = counted.drafter_flop_per_token - counted.drafter_fp8_flop_per_token / 2
    return flops / counted.target_flop_per_token, flops / train_flop


def memory_text(parts: dict[str, float]) -> str:
    total = sum(parts.values())
    shown = ", ".join(f"{name} {value / GIB:.2g}" for name, value in parts.items())
    return f"{total / GIB:.2g} ({shown})"
