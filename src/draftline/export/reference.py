"""The reference folder: config.json and model.safetensors as vLLM, SGLang and transformers read them (SPEC 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.errors import InputError
from draftline.export.geometry import geometry_config, read_geometry
from draftline.export.jsonfile import JsonObject, read_json, write_json
from draftline.export.layout import WEIGHTS_NAME, drafter_shapes, read_tensors, write_tensors
from draftline.records import DrafterSpec

ARCHITECTURE = "DFlashDraftModel"


def write_reference(folder: Path, spec: DrafterSpec, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a drafter into an existing folder.

    tensors: exactly those of `layout.drafter_shapes(spec)`; stored cast to `dtype`.
    Raises InputError when a tensor is missing, unknown or of another shape.
    """
    write_json(folder / "config.json", reference_config(spec, dtype))
    write_tensors(folder / WEIGHTS_NAME, tensors, drafter_shapes(spec), dtype)


def reference_config(spec: DrafterSpec, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        **geometry_config(spec, dtype),
        "block_size": spec.block_size,
        "num_target_layers": spec.num_target_layers,
        "dflash_config": {
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "target_layer_ids": list(spec.target_layer_ids),
        },
    }


def read_reference(folder: Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Read a reference folder strictly; the tensors come back as stored, on the CPU.

    Raises InputError naming the missing or contradicting config keys, or the tensors that are missing, unknown or
    of the wrong shape.
    """
    spec = read_reference_spec(read_json(folder / "config.json"))
    return spec, read_tensors(folder / WEIGHTS_NAME, drafter_shapes(spec))


def read_reference_spec(config: JsonObject) -> DrafterSpec:
    config.require(("architectures", "model_type", "num_target_layers", "dflash_config"))
    config.checked("architectures", f"[{ARCHITECTURE!r}]", lambda value: value == [ARCHITECTURE])
    dflash = config.section("dflash_config")
    dflash.require(("mask_token_id", "target_layer_ids"))
    fields = read_geometry(config)
    fields |= {
        "block_size": read_block_size(config, dflash),
        "mask_token_id": dflash.integer("mask_token_id"),
        "target_layer_ids": dflash.integers("target_layer_ids"),
        "num_target_layers": config.integer("num_target_layers", minimum=1),
    }
    return checked_spec(config.where, fields)


def read_block_size(config: JsonObject, dflash: JsonObject) -> int:
    """Published folders state it at the top level, in dflash_config, or in both; then they must agree."""
    stated = {section.integer("block_size", minimum=2) for section in (config, dflash) if "block_size" in section.tree}
    if not stated:
        config.require(["block_size"])
    if len(stated) > 1:
        raise InputError(f"{config.where}: block_size at the top level and in dflash_config differ: {sorted(stated)}")
    return stated.pop()


def checked_spec(where: str, fields: dict[str, Any]) -> DrafterSpec:
    """The rules that tie keys together, the same in every format."""
    spec = DrafterSpec(**fields)
    taps, layers = list(spec.target_layer_ids), spec.num_target_layers
    if taps != sorted(set(taps)):
        raise InputError(f"{where}: target_layer_ids {taps} must be ascending and distinct")
    if taps[-1] >= layers:
        raise InputError(
            f"{where}: tap {taps[-1]} of target_layer_ids {taps} must be below num_target_layers {layers}",
            "taps are 0-based decoder layers of the target",
        )
    if spec.mask_token_id >= spec.vocab_size:
        raise InputError(f"{where}: mask_token_id {spec.mask_token_id} must be below vocab_size {spec.vocab_size}")
    return spec
