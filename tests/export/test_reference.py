import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_samples import MIXED, SPEC, random_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from draftline.errors import InputError
from draftline.export.reference import read_reference, write_reference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reference(tmp_path, SPEC, random_tensors(SPEC), torch.float32)
    return tmp_path


def config_of(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return tree


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = config_of(folder)
    change(tree)
    (folder / "config.json").write_text(json.dumps(tree))


def test_config_has_every_key_of_the_format(folder: Path) -> None:
    assert config_of(folder) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"block_size": 8, "mask_token_id": 63, "target_layer_ids": [1, 3, 5]},
        "num_target_layers": 9,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "is_causal": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
        "dtype": "float32",
    }


def test_tensors_are_named_as_in_the_format(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    layer = {
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
        "self_attn.q_proj.weight": (48, 24),
        "self_attn.k_proj.weight": (16, 24),
        "self_attn.v_proj.weight": (16, 24),
        "self_attn.o_proj.weight": (24, 48),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
    }
    top = {"fc.weight": (24, 72), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    assert shapes == top | {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(SPEC)
    write_reference(tmp_path, SPEC, tensors, dtype)
    spec, read = read_reference(tmp_path)
    assert spec == replace(SPEC, is_causal=False)
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name].to(dtype)) and read[name].dtype == dtype for name in tensors)


def test_transposed_and_shared_tensors_are_stored_by_value(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    tensors["norm.weight"] = tensors["hidden_norm.weight"]
    tensors["fc.weight"] = torch.randn(72, 24).T
    write_reference(tmp_path, SPEC, tensors, torch.float32)
    read = read_reference(tmp_path)[1]
    assert torch.equal(read["fc.weight"], tensors["fc.weight"])
    assert torch.equal(read["norm.weight"], tensors["hidden_norm.weight"])


def test_attention_biases_are_stored_when_there_are_some(tmp_path: Path) -> None:
    spec = replace(SPEC, attention_bias=True)
    write_reference(tmp_path, spec, random_tensors(spec), torch.float32)
    read = read_reference(tmp_path)[1]
    assert {
        name.split(".")[-2]: len(read[name]) for name in read if name.startswith("layers.1") and "bias" in name
    } == {
        "q_proj": 48,
        "k_proj": 16,
        "v_proj": 16,
        "o_proj": 24,
    }


@pytest.mark.parametrize(
    ("spec", "stated"),
    [
        (MIXED, "left out"),
        (replace(MIXED, is_causal=False), False),
        (replace(MIXED, layer_types=("sliding_attention",) * 2), True),
    ],
)
def test_is_causal_is_stated_only_where_all_layers_agree(tmp_path: Path, spec: Any, stated: Any) -> None:
    write_reference(tmp_path, spec, random_tensors(spec), torch.float32)
    config = config_of(tmp_path)
    assert config.get("is_causal", "left out") == stated
    assert (config["sliding_window"], config["use_sliding_window"]) == (32, True)
    read = read_reference(tmp_path)[0]
    assert [read.causal(i) for i in (0, 1)] == [spec.causal(i) for i in (0, 1)]
    assert [read.window(i) for i in (0, 1)] == [spec.window(i) for i in (0, 1)]


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}


def test_scaled_rope_is_stated_in_both_spellings_and_transformers_reads_it(tmp_path: Path) -> None:
    spec = replace(SPEC, rope_parameters=YARN)
    write_reference(tmp_path, spec, random_tensors(spec), torch.float32)
    config = config_of(tmp_path)
    assert config["rope_parameters"] == YARN
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert Qwen3Config.from_pretrained(tmp_path).rope_parameters == YARN
    assert read_reference(tmp_path)[0].rope_parameters == YARN


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_either_rope_spelling_alone_is_enough(tmp_path: Path, spelling: str) -> None:
    parameters = {**YARN, "partial_rotary_factor": 0.5}
    spec = replace(SPEC, rope_parameters=parameters)
    write_reference(tmp_path, spec, random_tensors(spec), torch.float32)
    gone = ("rope_parameters",) if spelling == "old" else ("rope_theta", "rope_scaling", "partial_rotary_factor")
    edit(tmp_path, lambda tree: [tree.pop(key) for key in gone])
    assert read_reference(tmp_path)[0].rope_parameters == parameters


def test_block_size_may_be_in_either_place(folder: Path) -> None:
    edit(folder, lambda tree: tree["dflash_config"].pop("block_size"))
    assert read_reference(folder)[0].block_size == 8
    edit(folder, lambda tree: tree["dflash_config"].update(block_size=tree.pop("block_size")))
    assert read_reference(folder)[0].block_size == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t.pop("head_dim"), t.pop("rms_norm_eps")], "missing head_dim, rms_norm_eps"),
        (lambda t: t.pop("dflash_config"), "missing dflash_config"),
        (lambda t: t["dflash_config"].pop("mask_token_id"), "dflash_config: missing mask_token_id"),
        (lambda t: [t.pop("rope_parameters"), t.pop("rope_theta")], "missing rope_theta"),
        (lambda t: [t.pop("block_size"), t["dflash_config"].pop("block_size")], "missing block_size"),
        (lambda t: t.update(block_size=16), "block_size at the top level and in dflash_config differ: [8, 16]"),
        (
            lambda t: t.update(rope_theta=1e4),
            "rope_theta / rope_scaling {'rope_type': 'default', 'rope_theta': 10000.0}",
        ),
        (
            lambda t: t.update(num_target_layers=5),
            "tap 5 of target_layer_ids [1, 3, 5] must be below num_target_layers 5",
        ),
        (lambda t: t["dflash_config"].update(target_layer_ids=[3, 1, 5]), "[3, 1, 5] must be ascending and distinct"),
        (lambda t: t["dflash_config"].update(target_layer_ids=[]), "target_layer_ids must be a list of integers >= 0"),
        (lambda t: t["dflash_config"].update(mask_token_id=64), "mask_token_id 64 must be below vocab_size 64"),
        (lambda t: t.update(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
        (lambda t: t.update(hidden_size="24"), "hidden_size must be an integer >= 1, got '24'"),
        (lambda t: t.update(num_hidden_layers=True), "num_hidden_layers must be an integer >= 1, got True"),
        (
            lambda t: t.update(num_key_value_heads=2),
            "num_key_value_heads must be a divisor of num_attention_heads 3, got 2",
        ),
        (
            lambda t: t.update(layer_types=["full_attention"]),
            "layer_types must be 2 of full_attention | sliding_attention",
        ),
        (lambda t: t.update(layer_types=["sliding_attention"] * 2), "sliding_window must be an integer >= 1, got None"),
        (lambda t: t.update(architectures=["Qwen3ForCausalLM"]), "architectures must be ['DFlashDraftModel']"),
        (lambda t: t.update(tie_word_embeddings=True), "tie_word_embeddings must be false, got True"),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused(folder: Path, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(InputError) as caught:
        read_reference(folder)
    assert message in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)


def test_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = torch.zeros(24, 48)
    save_file(tensors, path)
    with pytest.raises(InputError) as caught:
        read_reference(folder)
    assert str(path) in str(caught.value)
    assert "missing: norm.weight\n" in str(caught.value)
    assert "unknown: model.norm.weight\n" in str(caught.value)
    assert "fc.weight has shape [24, 48], the config needs [24, 72]" in str(caught.value)


def test_writing_the_wrong_tensors_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC) | {"embed_tokens.weight": torch.zeros(64, 24)}
    with pytest.raises(InputError, match=r"unknown: embed_tokens\.weight"):
        write_reference(tmp_path, SPEC, tensors, torch.float32)


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(random_tensors(SPEC), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"model\.safetensors: no such file\n.*pickles are never opened"):
        read_reference(folder)


def test_a_truncated_weights_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        read_reference(folder)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not valid JSON"), (b"[]", "must hold a JSON object, got list")]
)
def test_a_broken_config_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_reference(folder)
