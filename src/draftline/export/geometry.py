"""The Qwen3-style geometry that both folder formats share: DrafterSpec to config keys and back (SPEC 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftline.errors import InputError
from draftline.export.jsonfile import JsonObject
from draftline.export.layout import DTYPE_NAMES
from draftline.records import DrafterSpec

LAYER_KINDS = ("full_attention", "sliding_attention")
SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
GEOMETRY_KEYS = (*SIZE_KEYS, "rms_norm_eps", "hidden_act", "attention_bias", "layer_types", "tie_word_embeddings")


def stated_causality(spec: DrafterSpec) -> bool | None:
    """Whether slots are causal inside the block, where all layers agree; None for a drafter of mixed layers (SPEC 3).

    vLLM applies a stated `is_causal` to every layer, so it may only be stated when it holds for every layer.
    """
    answers = {spec.causal(layer) for layer in range(spec.num_hidden_layers)}
    return answers.pop() if len(answers) == 1 else None


def as_exported(spec: DrafterSpec) -> DrafterSpec:
    """The spec as reading its export gives it back: the same drafter, with causality stated where all layers agree."""
    return replace(spec, is_causal=stated_causality(spec))


def geometry_config(spec: DrafterSpec, dtype: torch.dtype) -> dict[str, Any]:
    """Config keys of a Qwen3-style decoder, RoPE in both spellings, for old readers and new."""
    config: dict[str, Any] = {"model_type": "qwen3"}
    config |= sizes(spec)
    config |= {
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": spec.num_hidden_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
        "dtype": DTYPE_NAMES[dtype],
    }
    config |= rope_config(spec.rope_parameters)
    causality = stated_causality(spec)
    return config if causality is None else config | {"is_causal": causality}


def sizes(spec: DrafterSpec) -> dict[str, int]:
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
    }


def rope_config(parameters: dict[str, Any]) -> dict[str, Any]:
    """Both spellings. transformers 4: `rope_theta`, `rope_scaling` (null when unscaled), `partial_rotary_factor`."""
    config: dict[str, Any] = {"rope_parameters": dict(parameters), "rope_theta": parameters["rope_theta"]}
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return config


def read_rope(config: JsonObject) -> dict[str, Any]:
    """RoPE parameters from either spelling; where both are given they must say the same."""
    old = read_old_rope(config) if "rope_theta" in config.tree else None
    if "rope_parameters" not in config.tree:
        config.require(["rope_theta"])
        assert old is not None
        return old
    section = config.section("rope_parameters")
    section.checked("rope_type", "a string", lambda value: isinstance(value, str))
    section.number("rope_theta")
    if old is not None and old != section.tree:
        raise InputError(
            f"{config.where}: rope_parameters {section.tree} and rope_theta / rope_scaling {old} differ",
            "both spellings must state the RoPE of the target",
        )
    return dict(section.tree)


def read_old_rope(config: JsonObject) -> dict[str, Any]:
    config.number("rope_theta")
    parameters: dict[str, Any] = {"rope_type": "default"}
    if config.tree.get("rope_scaling") is not None:
        scaling = config.section("rope_scaling")
        scaling.checked("rope_type", "a string", lambda value: isinstance(value, str))
        parameters |= scaling.tree
    if config.tree.get("partial_rotary_factor") is not None:
        parameters["partial_rotary_factor"] = config.value("partial_rotary_factor")
    return parameters | {"rope_theta": config.value("rope_theta")}


def read_geometry(config: JsonObject) -> dict[str, Any]:
    """Geometry fields of a DrafterSpec. Raises InputError naming all missing keys, or the first value out of bounds."""
    config.require(GEOMETRY_KEYS)
    config.checked("model_type", "'qwen3'", lambda value: value == "qwen3")
    config.checked("hidden_act", "'silu'", lambda value: value == "silu")
    config.checked("tie_word_embeddings", "false", lambda value: value is False)
    fields: dict[str, Any] = {key: config.integer(key, minimum=1) for key in SIZE_KEYS}
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    config.checked("num_key_value_heads", f"a divisor of num_attention_heads {heads}", lambda _: heads % groups == 0)
    fields |= {
        "rms_norm_eps": config.number("rms_norm_eps"),
        "attention_bias": config.boolean("attention_bias"),
        "rope_parameters": read_rope(config),
        "is_causal": config.boolean("is_causal") if config.tree.get("is_causal") is not None else None,
        "bos_token_id": config.optional_integer("bos_token_id"),
        "pad_token_id": config.optional_integer("pad_token_id"),
        "eos_token_id": read_eos(config),
    }
    return fields | read_windows(config, fields["num_hidden_layers"])


def read_windows(config: JsonObject, layers: int) -> dict[str, Any]:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and len(value) == layers and all(kind in LAYER_KINDS for kind in value)

    kinds = tuple(config.checked("layer_types", f"{layers} of {' | '.join(LAYER_KINDS)}", holds))
    sliding = "sliding_attention" in kinds
    return {"layer_types": kinds, "sliding_window": config.integer("sliding_window", minimum=1) if sliding else None}


def read_eos(config: JsonObject) -> int | list[int] | None:
    if isinstance(config.tree.get("eos_token_id"), list):
        return list(config.integers("eos_token_id"))
    return config.optional_integer("eos_token_id")
