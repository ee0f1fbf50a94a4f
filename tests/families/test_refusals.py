"""What cannot be drafted for is refused by name before training: exit 2, which proof failed, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import odd_models
from builders import word_tokenizer
from command import draftline_here
from draftline.errors import InputError
from draftline.target.parts import find_parts
from family_models import BASE, DEPTH, IDS, ROPE, WIDE
from runs import write_recipe

MAMBAS = {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
SMALL = {"vocab_size": 40}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**BASE)),
        "target family gpt2: its config has no rope_parameters",
    ),
    "mamba2": (
        lambda: hf.Mamba2ForCausalLM(
            hf.Mamba2Config(
                vocab_size=40, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=1, **IDS
            )
        ),
        "target family mamba2: its config has no num_attention_heads",
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=40, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        ),
        "model type 't5' is neither a causal language model nor one that reads images beside text",
    ),
    "minimax": (
        lambda: hf.MiniMaxForCausalLM(
            hf.MiniMaxConfig(
                **WIDE, **ROPE, num_local_experts=2, layer_types=["linear_attention", "full_attention"] * (DEPTH // 2)
            )
        ),
        "target MiniMaxForCausalLM cannot decode through transformers' cache: MiniMax uses cache of its own",
    ),
    "bamba": (
        lambda: hf.BambaForCausalLM(hf.BambaConfig(**BASE, **MAMBAS, mamba_n_groups=1)),
        "target BambaForCausalLM: expected after rejected drafts the logits of a forward without cache",
    ),
    "longrope": (
        lambda: hf.Phi3ForCausalLM(
            hf.Phi3Config(
                **BASE,
                original_max_position_embeddings=64,
                rope_parameters={"rope_type": "longrope", "rope_theta": 7000.0, **FACTORS},
            )  # fmt: skip
        ),
        "target family phi3: RoPE type 'longrope'",
    ),
    "dynamic": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**BASE, rope_parameters={"rope_type": "dynamic", "rope_theta": 7000.0, "factor": 2.0})
        ),
        "target family llama: RoPE type 'dynamic'",
    ),
    "nanochat": (
        lambda: hf.NanoChatForCausalLM(hf.NanoChatConfig(**BASE, **ROPE)),
        "gate 'embedding': target NanoChatModel: expected its first layer to receive",
    ),
}
OTHER_LOGITS = (
    "gate 'head': target OddForCausalLM: expected its own logits from head(final-normed state), no bias, scale 1, "
    "no soft-cap, within 0.0001"
)
ODD = {
    "deltas": "gate 'stream': target OddModel: expected layer 1 to receive the output of layer 0, found another one",
    "loop": "target class OddModel: expected each of 4 layers to run once, on one tensor, found 8 runs",
    "projection": "gate 'embedding': target OddModel: expected its first layer to receive",
    "two sources": OTHER_LOGITS,
    "hidden scale": OTHER_LOGITS,
    "forgetful": "target OddForCausalLM: expected after rejected drafts the logits of a forward without cache",
}


def saved(model: Any, home: Path) -> Path:
    torch.manual_seed(0)
    for key, weight in model.named_parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0, 0.5 if "embed" in key else 0.2)
    model.save_pretrained(home / "target")
    word_tokenizer().save_pretrained(home / "target")
    return home


def check_refused(home: Path, message: str) -> None:
    done = draftline_here("train", write_recipe(home))
    assert done.code == 2, done.out + done.err
    assert message in " ".join(done.err.split())
    assert "not supported" in done.err or "supported are" in done.err or "decoder-only" in done.err
    assert not list((home / "run").glob("checkpoints/*"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    check_refused(saved(make(), tmp_path), message)


def odd(oddity: str, home: Path) -> Path:
    return saved(odd_models.OddForCausalLM(odd_models.OddConfig(**WIDE, **ROPE, oddity=oddity)), home)


@pytest.mark.parametrize("oddity", ODD)
def test_a_model_nobody_thought_of(oddity: str, tmp_path: Path) -> None:
    check_refused(odd(oddity, tmp_path), ODD[oddity])


def test_features_of_such_a_model_are_not_written(tmp_path: Path) -> None:
    """Training from features has no layers to prove anything on, so `prepare` passes the gates of a target."""
    recipe = write_recipe(odd("projection", tmp_path))
    done = draftline_here("prepare", recipe, "--features", tmp_path / "features")
    assert done.code == 2 and ODD["projection"] in " ".join(done.err.split())
    assert not list(tmp_path.glob("features/*"))


def test_the_same_model_without_an_oddity_trains(tmp_path: Path) -> None:
    done = draftline_here("train", write_recipe(odd("", tmp_path)), "train.max_steps=1", "train.checkpoint_every=1")
    assert done.code == 0, done.err


def test_a_head_of_another_vocabulary() -> None:
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE, **ROPE))
    model.lm_head = torch.nn.Linear(64, 48, bias=False)
    with pytest.raises(InputError, match=r"embedding \[40, 64\] and head \[48, 64\] differ in shape"):
        find_parts(model, torch.device("cpu"))


def test_a_head_in_another_dtype() -> None:
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE, **ROPE))
    model.lm_head.half()
    with pytest.raises(InputError, match=r"head's weights are torch.float16, not float32 or bfloat16"):
        find_parts(model, torch.device("cpu"))
