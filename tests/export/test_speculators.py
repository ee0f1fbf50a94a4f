import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_samples import MIXED, SPEC, random_tensors

from draftline.errors import InputError
from draftline.export.speculators import read_speculators, write_speculators


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_speculators(tmp_path, SPEC, random_tensors(SPEC, borrowed=True), torch.float32, "org/target")
    return tmp_path


def config_of(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return tree


def test_config_counts_taps_from_one_and_names_the_target(folder: Path) -> None:
    config = config_of(folder)
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (8, 63, 64)
    assert config["sliding_window_non_causal"] is True
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_target_layers"], layer["is_causal"]) == ("qwen3", 9, False)
    assert (layer["rope_theta"], layer["rope_parameters"]["rope_theta"]) == (500000.0, 500000.0)


def test_round_trip_with_embedding_and_head(folder: Path) -> None:
    spec, tensors = read_speculators(folder)
    wanted = random_tensors(SPEC, borrowed=True)
    assert spec == replace(SPEC, is_causal=False)
    assert list(tensors) == list(wanted)
    assert tensors["embed_tokens.weight"].shape == tensors["lm_head.weight"].shape == (64, 24)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_one_switch_for_all_layers_cannot_state_a_mixed_drafter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"one switch for all layers\n.*export\.format=reference"):
        write_speculators(tmp_path, MIXED, random_tensors(MIXED, borrowed=True), torch.float32, "t")
    assert list(tmp_path.iterdir()) == []


def test_causal_sliding_layers_are_stated_in_both_places(tmp_path: Path) -> None:
    spec = replace(MIXED, layer_types=("sliding_attention",) * 2)
    write_speculators(tmp_path, spec, random_tensors(spec, borrowed=True), torch.float32, "t")
    config = config_of(tmp_path)
    assert config["sliding_window_non_causal"] is False
    assert config["transformer_layer_config"]["is_causal"] is True
    assert read_speculators(tmp_path)[0] == replace(spec, is_causal=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [t.pop("block_size"), t.pop("mask_token_id")], "missing block_size, mask_token_id"),
        (lambda t: t["transformer_layer_config"].pop("head_dim"), "transformer_layer_config: missing head_dim"),
        (lambda t: t["transformer_layer_config"].pop("num_target_layers"), "missing num_target_layers"),
        (lambda t: t.update(speculators_model_type="eagle3"), "speculators_model_type must be 'dflash', got 'eagle3'"),
        (lambda t: t.update(aux_hidden_state_layer_ids=[0, 4]), "aux_hidden_state_layer_ids must be 1-based layers"),
        (lambda t: t.update(aux_hidden_state_layer_ids=[2, 10]), "tap 9 of target_layer_ids [1, 9] must be below"),
        (lambda t: t.update(draft_vocab_size=32), "draft_vocab_size must be the vocab_size 64, got 32"),
        (lambda t: t.update(sliding_window_non_causal=False), "must be True where is_causal is False, got False"),
        (
            lambda t: t["transformer_layer_config"].update(
                layer_types=["sliding_attention", "full_attention"], sliding_window=4, is_causal=None
            ),
            "transformer_layer_config must state is_causal",
        ),
    ],
)
def test_a_config_that_breaks_a_rule_is_refused(folder: Path, change: Any, message: str) -> None:
    tree = config_of(folder)
    change(tree)
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(InputError) as caught:
        read_speculators(folder)
    assert message in str(caught.value)


def test_a_missing_embedding_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC, borrowed=True)
    del tensors["embed_tokens.weight"]
    with pytest.raises(InputError, match=r"missing: embed_tokens\.weight"):
        write_speculators(tmp_path, SPEC, tensors, torch.float32, "t")
