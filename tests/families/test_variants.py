"""What may differ from a family's plain case: drafter shapes, dtypes, spellings of a config, biases, exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders import open_target, proven, save_target, spec_for
from command import Done, draftline_here
from drafter_samples import random_drafter
from draftline.config import TargetSection
from draftline.errors import InputError
from draftline.evaluate.evaluation import load_drafter
from draftline.export.folder import read_drafter, read_spec
from draftline.export.reference import write_reference
from draftline.target.frame import load_frame
from family_models import FAMILIES, OTHERS, save_family
from runs import write_recipe

SHORT = ("train.max_steps=2", "train.checkpoint_every=2")


def trained(family: str, home: Path, *words: str) -> Done:
    save_family(family, home / "target")
    recipe = write_recipe(home, eval={"prompts": str(home / "data.jsonl"), "max_prompts": 2, "max_new_tokens": 12})
    return draftline_here("train", recipe, *SHORT, *words)


def same_text(home: Path) -> float:
    [report] = json.loads((home / "run" / "summary.json").read_text())["evaluations"]
    return report["same_text_share"]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, tmp_path: Path) -> None:
    done = trained(family, tmp_path)
    assert done.code == 0, done.err
    assert same_text(tmp_path) == 1.0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_drafter_of_another_shape_than_its_target(family: str, tmp_path: Path) -> None:
    shape = {"attention_heads": 6, "key_value_heads": 3, "head_dim": 8, "intermediate_size": 40, "layers": 2}
    done = trained(family, tmp_path, *(f"drafter.{key}={value}" for key, value in shape.items()))
    assert done.code == 0, done.err
    spec = read_spec(tmp_path / "run" / "export")
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.intermediate_size) == (6, 3, 8, 40)
    assert same_text(tmp_path) == 1.0


def test_a_drafter_of_another_width_is_refused(tmp_path: Path) -> None:
    done = trained("llama", tmp_path, "drafter.hidden_size=32")
    assert done.code == 2
    assert "drafter.hidden_size 32 differs from the target's 64" in done.err


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "phi", "gpt_oss", "qwen3_5_text"])
def test_a_target_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Scales and soft-caps are found in bfloat16 too; the text is not compared, its kernels depend on the shape."""
    done = trained(family, tmp_path, "target.dtype=bfloat16")
    assert done.code == 0, done.err
    target = open_target(tmp_path / "target", dtype="bfloat16")
    assert proven(target, list(range(5, 19))) < 1e-2
    exact = {"granite": 6.0}.get(family, 1.0)
    assert target.parts.embedding_scale == pytest.approx(exact, rel=1e-3)
    assert read_drafter(tmp_path / "run" / "export")[1]["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tied: bool, tmp_path: Path) -> None:
    folder = save_target(tmp_path, tie_word_embeddings=tied)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied
    parts = open_target(folder).parts
    assert torch.equal(parts.head.weight, parts.embedding.weight) is tied


def test_the_old_spelling_of_dtype(tmp_path: Path) -> None:
    """transformers 4 wrote torch_dtype; what the recipe asks for is what is loaded, whichever the folder says."""
    place = save_target(tmp_path) / "config.json"
    tree = json.loads(place.read_text())
    assert tree.pop("dtype") == "float32"
    place.write_text(json.dumps(tree | {"torch_dtype": "bfloat16"}))
    for name, dtype in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        target = open_target(tmp_path, dtype=name)
        assert target.dtype == target.parts.head.weight.dtype == dtype


def test_a_quantised_target_whose_library_is_missing(tmp_path: Path) -> None:
    place = save_target(tmp_path) / "config.json"
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    place.write_text(json.dumps(json.loads(place.read_text()) | {"quantization_config": quantised}))
    with pytest.raises(InputError, match=r"GPTQ quantized model requires .*\n.*unquantised"):
        open_target(tmp_path)


def test_a_published_drafter_with_attention_biases_is_read(tmp_path: Path) -> None:
    target = open_target(save_target(tmp_path / "target", tie_word_embeddings=False))
    spec = spec_for(target, attention_bias=True)
    drafter = random_drafter(spec)
    (tmp_path / "draft").mkdir()
    write_reference(tmp_path / "draft", spec, drafter.state_dict(), torch.float32)
    found, tensors = read_drafter(tmp_path / "draft")
    assert found.attention_bias and len([name for name in tensors if name.endswith(".bias")]) == 8
    again = load_drafter(found, tensors).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("llama", []),
        ("gemma3_text", ["scales its embedding"]),
        ("granite", ["scales its embedding"]),
        ("phi", ["bias"]),
    ],
)
def test_what_an_engine_runs_otherwise_is_said(family: str, notes: list[str], tmp_path: Path) -> None:
    done = trained(family, tmp_path)
    assert done.code == 0, done.err
    export = tmp_path / "run" / "export"
    said = json.loads((export / "draftline.json").read_text())["engine_notes"]
    assert len(said) == len(notes) == done.err.count("engines run this drafter otherwise")
    for note, words in zip(said, notes, strict=True):
        assert words in note and note in done.err
        assert f"Known difference: {note}." in (export / "README.md").read_text()


@pytest.mark.parametrize("family", ["gemma3_text", "granite", "llama"])
def test_a_speculators_export_brings_the_scaled_embedding(family: str, tmp_path: Path) -> None:
    """Its table is what the drafter was trained on, so an engine that looks rows up serves what was measured."""
    done = trained(family, tmp_path, "export.format=speculators")
    assert done.code == 0 and "otherwise" not in done.err, done.err
    table = load_file(tmp_path / "run" / "export" / "model.safetensors")["embed_tokens.weight"]
    target = open_target(tmp_path / "target")
    assert torch.equal(table, target.embed(torch.arange(40)))
    scale = {"gemma3_text": 8.0, "granite": 6.0, "llama": 1.0}[family]  # sqrt(64), embedding_multiplier
    torch.testing.assert_close(table, scale * target.parts.embedding.weight, rtol=1e-5, atol=1e-5)
    assert same_text(tmp_path) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_without_its_layers_embeds_and_judges_alike(family: str, tmp_path: Path) -> None:
    """What training from features on disk borrows is what the whole target gives, scales and soft-caps included."""
    folder = save_family(family, tmp_path)
    whole, frame = open_target(folder), load_frame(TargetSection(path=str(folder)), torch.device("cpu"))
    ids = torch.arange(5, 19)
    torch.testing.assert_close(frame.embed(ids), whole.embed(ids), rtol=1e-6, atol=0)
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(frame.parts.head.logits(states), whole.parts.head.logits(states))
