"""The `speculators` folder: the drafter with the target's embedding and head; `vllm serve FOLDER` needs no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.errors import InputError
from draftline.export.geometry import geometry_config, read_geometry, stated_causality
from draftline.export.jsonfile import JsonObject, read_json, write_json
from draftline.export.layout import WEIGHTS_NAME, Shape, drafter_shapes, read_tensors, write_tensors
from draftline.export.reference import ARCHITECTURE, checked_spec
from draftline.records import DrafterSpec

MODEL_TYPE = "dflash"
BORROWED = ("embed_tokens.weight", "lm_head.weight")  # the target's own, frozen in training


def speculators_shapes(spec: DrafterSpec) -> dict[str, Shape]:
    """The drafter's tensors, then the target's embedding and head, both [vocab_size, hidden_size]."""
    return drafter_shapes(spec) | {name: (spec.vocab_size, spec.hidden_size) for name in BORROWED}


def write_speculators(
    folder: Path, spec: DrafterSpec, tensors: dict[str, Tensor], dtype: torch.dtype, verifier: str
) -> None:
    """Write a drafter into an existing folder.

    tensors: exactly those of `speculators_shapes(spec)`. verifier: name or path from which vLLM loads the target.
    Raises InputError for a drafter whose layers differ in causality: the format has one switch for all of them.
    """
    write_json(folder / "config.json", speculators_config(spec, dtype, verifier))
    write_tensors(folder / WEIGHTS_NAME, tensors, speculators_shapes(spec), dtype)


def speculators_config(spec: DrafterSpec, dtype: torch.dtype, verifier: str) -> dict[str, Any]:
    causal = stated_causality(spec)
    if causal is None:
        raise InputError(
            "export.format speculators: the drafter mixes causal sliding-window layers with bidirectional full ones, "
            "and this format has one switch for all layers",
            "export it with export.format=reference, or train with drafter.is_causal set",
        )
    # vLLM reads the nested object as the whole model config, so what the format has no key for goes in there
    layer_config = geometry_config(spec, dtype) | {"num_target_layers": spec.num_target_layers}
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "speculators_config": proposal(spec, verifier),
        "transformer_layer_config": layer_config,
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.target_layer_ids],
        "draft_vocab_size": spec.vocab_size,
        "target_hidden_size": spec.hidden_size,
        "sliding_window_non_causal": not causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": layer_config["dtype"],
    }


def proposal(spec: DrafterSpec, verifier: str) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": spec.block_size - 1}
    return {
        "algorithm": MODEL_TYPE,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": verifier, "architectures": []},
    }


def read_speculators(folder: Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Read a speculators folder strictly; the tensors, embedding and head among them, come back as stored.

    Raises InputError naming missing or contradicting config keys, or tensors that are missing, unknown or misshapen.
    """
    spec = read_speculators_spec(read_json(folder / "config.json"))
    return spec, read_tensors(folder / WEIGHTS_NAME, speculators_shapes(spec))


def read_speculators_spec(config: JsonObject) -> DrafterSpec:
    config.require(
        ("speculators_model_type", "speculators_config", "transformer_layer_config", "block_size", "mask_token_id")
        + ("aux_hidden_state_layer_ids", "draft_vocab_size", "sliding_window_non_causal")
    )
    config.checked("speculators_model_type", repr(MODEL_TYPE), lambda value: value == MODEL_TYPE)
    layer_config = config.section("transformer_layer_config")
    layer_config.require(["num_target_layers"])
    layers_after = config.integers("aux_hidden_state_layer_ids")
    config.checked("aux_hidden_state_layer_ids", "1-based layers", lambda _: min(layers_after) >= 1)
    fields = read_geometry(layer_config)
    fields |= {
        "block_size": config.integer("block_size", minimum=2),
        "mask_token_id": config.integer("mask_token_id"),
        "target_layer_ids": tuple(layer - 1 for layer in layers_after),
        "num_target_layers": layer_config.integer("num_target_layers", minimum=1),
    }
    spec = checked_spec(config.where, fields)
    check_agreement(config, spec)
    return spec


def check_agreement(config: JsonObject, spec: DrafterSpec) -> None:
    """What the format states twice must be stated alike: engines differ in which of the two they read."""
    vocabulary = spec.vocab_size
    config.checked("draft_vocab_size", f"the vocab_size {vocabulary}", lambda value: value == vocabulary)
    causal = stated_causality(spec)
    if causal is None:
        raise InputError(f"{config.where}: layer_types mixes kinds, so transformer_layer_config must state is_causal")
    rule = f"{not causal} where is_causal is {causal}"
    config.checked("sliding_window_non_causal", rule, lambda value: value is not causal and isinstance(value, bool))
