"""Shapes to measure: the drafters and targets that published figures speak of, and any other by its config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftline.errors import InputError
from draftline.export.folder import read_spec
from draftline.records import DrafterSpec


@dataclass(frozen=True)
class Shape:
    """A drafter, and the row it is measured on. `documents`: how many the row is packed from."""

    name: str
    spec: DrafterSpec
    rows: int = 1
    sequence: int = 4096
    anchors: int = 512
    documents: int = 1


def drafter(**sizes: Any) -> DrafterSpec:
    common: dict[str, Any] = {
        "num_hidden_layers": 5, "block_size": 16, "mask_token_id": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40960,
        "layer_types": ("full_attention",) * 5,
    }  # fmt: skip
    return DrafterSpec(**(common | sizes))


QWEN3_8B = drafter(
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=151936, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36,
)  # fmt: skip
QWEN36_27B = drafter(
    hidden_size=5120, intermediate_size=17408, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
    vocab_size=248320, target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64,
    layer_types=("sliding_attention",) * 4 + ("full_attention",), sliding_window=2048,
)  # fmt: skip
SMOLLM2_135M = drafter(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    vocab_size=49152, target_layer_ids=(1, 8, 14, 20, 27), num_target_layers=30,
)  # fmt: skip
TINY = drafter(  # seconds on a CPU: shows that a measurement runs
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=1024, target_layer_ids=(1, 2, 3), num_target_layers=6, num_hidden_layers=2, block_size=8,
    layer_types=("full_attention",) * 2,
)  # fmt: skip

NAMED = {
    "qwen3-8b": Shape("qwen3-8b", QWEN3_8B),
    "qwen3.6-27b": Shape("qwen3.6-27b", QWEN36_27B),
    "smollm2-135m": Shape("smollm2-135m", SMOLLM2_135M, rows=8, sequence=2048),
    "tiny": Shape("tiny", TINY, sequence=256, anchors=32),
}


def find_shape(name: str, changes: dict[str, int | None]) -> Shape:
    """A named shape or a drafter's config.json, with the row changed as asked. Raises InputError for neither."""
    if name in NAMED:
        shape = NAMED[name]
    elif (Path(name) / "config.json").is_file():
        shape = Shape(name, read_spec(Path(name)))
    else:
        raise InputError(
            f"--shape {name}: neither a known shape nor a drafter's folder", f"known shapes: {', '.join(NAMED)}"
        )
    asked: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    shape = replace(shape, **asked)
    row = f"a row of {shape.sequence} tokens"
    if shape.documents > shape.sequence // (shape.spec.block_size + 2):
        raise InputError(f"--documents {shape.documents}: too many for {row}", "ask for fewer")
    if shape.anchors > shape.sequence - 2 * shape.documents:
        raise InputError(f"--anchors {shape.anchors}: more than {row} has", "ask for fewer")
    return shape
