"""What is derived from the target, and which wishes are refused (SPEC 1, 2; CASES 6, 7, 9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from builders import open_target, proven, save_target, word_tokenizer
from draftline.config import DrafterSection
from draftline.errors import InputError
from draftline.records import Head
from draftline.target.derive import choose_mask_id, default_taps, derive_spec, free_ids
from draftline.target.load import Target
from draftline.target.proofs import own_outputs, prove_head

SECTION = DrafterSection(layers=2, block_size=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return open_target(save_target(tmp_path_factory.mktemp("t")))


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Target:
    """CASES 7: a tokenizer of 19 words, a vocabulary of 128."""
    return open_target(save_target(tmp_path_factory.mktemp("padded"), vocab_size=128))


@pytest.mark.parametrize(
    ("depth", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 5, (1, 7, 13, 19, 25)),
        (64, 6, (1, 13, 25, 37, 49, 61)),
        (36, 1, (18,)),
        (4, 1, (2,)),
        (8, 5, (1, 2, 3, 4, 5)),
        (6, 5, (1, 2, 3)),
        (4, 5, (2,)),
        (1, 5, (0,)),
    ],
)
def test_default_taps(depth: int, count: int, taps: tuple[int, ...]) -> None:
    assert default_taps(depth, count) == taps


def test_a_spec_is_the_targets_geometry(target: Target) -> None:
    """CASES 9: the RoPE base is only inside rope_parameters, and is the target's 5000, not a default."""
    spec = derive_spec(SECTION, target)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size, spec.num_target_layers) == (32, 48, 32, 4)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 16)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (spec.target_layer_ids, spec.layer_types) == ((2,), ("full_attention",) * 2)
    assert (spec.eos_token_id, spec.pad_token_id, spec.bos_token_id) == (3, 1, None)


def test_the_recipe_overrides_what_may_be_overridden(target: Target) -> None:
    section = DrafterSection(
        layers=3, block_size=8, taps=(0, 3), mask_token_id=4, hidden_size=32, intermediate_size=20, attention_heads=2,
        key_value_heads=1, head_dim=8, sliding_window=16, sliding_layers=(0, 2),
    )  # fmt: skip
    spec = derive_spec(section, target)
    assert (spec.target_layer_ids, spec.mask_token_id, spec.intermediate_size) == ((0, 3), 4, 20)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (2, 1, 8)
    assert spec.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert [(spec.window(i), spec.causal(i)) for i in range(3)] == [(16, True), (None, False), (16, True)]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"hidden_size": 64}, r"drafter.hidden_size 64 differs from the target's 32"),
        ({"taps": (1, 4)}, r"drafter.taps \[1, 4\]: the target has layers 0..3"),
        ({"taps": (-1, 2)}, r"drafter.taps \[-1, 2\]: the target has layers 0..3"),
        ({"attention_heads": 5}, r"attention_heads 5 must be a multiple of drafter.key_value_heads 2"),
    ],
)
def test_wishes_that_cannot_be_met(target: Target, wish, message: str) -> None:
    with pytest.raises(InputError, match=message):
        derive_spec(SECTION.model_copy(update=wish), target)


def test_the_last_layer_may_be_tapped(target: Target) -> None:
    assert derive_spec(SECTION.model_copy(update={"taps": (0, 3)}), target).target_layer_ids == (0, 3)


def test_nothing_is_resized_for_a_padded_vocabulary(padded: Target) -> None:
    """The mask token lies in the padding, or is an unused special token; never past the rows."""
    spec = derive_spec(SECTION, padded)
    assert spec.vocab_size == 128 and spec.mask_token_id == 19
    assert padded.parts.embedding.weight.shape == padded.parts.head.weight.shape == (128, 32)
    assert len(padded.tokenizer) == 19
    assert free_ids(padded) == [*range(19, 128), 4]
    assert [choose_mask_id(i, padded) for i in (4, 19, 127)] == [4, 19, 127]


def test_a_mask_id_past_the_rows_is_refused_with_the_free_ids(target: Target, padded: Target) -> None:
    with pytest.raises(InputError, match="mask_token_id 128 has no embedding row: the target has 128") as e:
        choose_mask_id(128, padded)
    assert e.value.remedy == "free ids: 19, 20, 21, 22, 23, 24, 25, 26 and 102 more"
    full = trimmed(target, 19)
    with pytest.raises(InputError, match=r"(?s)mask_token_id 19 has no embedding row: the target has 19.*free ids: 4$"):
        choose_mask_id(19, full)


def trimmed(target: Target, rows: int, tokenizer=None) -> Target:
    """The same target with `rows` rows in its embedding."""
    embedding = nn.Embedding.from_pretrained(target.parts.embedding.weight[:rows])
    return replace(target, parts=replace(target.parts, embedding=embedding), tokenizer=tokenizer or target.tokenizer)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [(0, "<unk>"), (1, "<pad>"), (2, "<|im_start|>"), (3, "<|im_end|>"), (5, "user"), (8, "w0"), (18, "w10")],
)
def test_a_token_in_use_is_refused(padded: Target, wanted: int, name: str) -> None:
    """unk, pad, template, eos and ordinary words."""
    with pytest.raises(InputError) as e:
        choose_mask_id(wanted, padded)
    assert e.value.what.startswith(f"drafter.mask_token_id {wanted} is {name!r}")
    assert e.value.remedy.startswith("free ids: 19, 20, 21")


def test_without_padding_an_unused_special_token_is_taken(target: Target) -> None:
    assert choose_mask_id(None, trimmed(target, 19)) == 4


def test_without_any_free_token_the_run_stops(target: Target) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template += "<|mask|>"
    with pytest.raises(InputError, match="no token of the target is free to be the mask token"):
        choose_mask_id(None, trimmed(target, 19, tokenizer))


def test_a_padding_row_that_the_config_uses_is_not_free(tmp_path) -> None:
    """Pad, bos and stop tokens may have ids above the tokenizer's words."""
    target = open_target(save_target(tmp_path, vocab_size=24, pad_token_id=19, bos_token_id=20, eos_token_id=[3, 22]))
    assert free_ids(target) == [21, 23, 4]
    assert derive_spec(SECTION, target).mask_token_id == 21
    for wanted in (19, 20, 22):
        with pytest.raises(InputError, match=rf"drafter.mask_token_id {wanted} is "):
            choose_mask_id(wanted, target)


def test_the_known_id_of_a_family_is_taken_where_it_is_free(target: Target, monkeypatch) -> None:
    monkeypatch.setattr("draftline.target.derive.KNOWN_MASK_IDS", {"qwen3": 30})
    assert choose_mask_id(None, target) == 30
    monkeypatch.setattr("draftline.target.derive.KNOWN_MASK_IDS", {"qwen3": 5})
    assert choose_mask_id(None, target) == 19


def test_a_tied_head_is_the_embedding(target: Target, tmp_path, monkeypatch) -> None:
    """CASES 6: no head tensor in the file; the head is the embedding, proven by logits; another is refused."""
    saved = load_file(save_target(tmp_path) / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert torch.equal(target.parts.head.weight, saved["model.embed_tokens.weight"])
    ids = list(range(5, 25))
    assert proven(target, ids) < 1e-5
    own = own_outputs(target, ids)
    with pytest.raises(InputError, match=r"expected its own logits .*\n.*the final norm is missing"):
        prove_head(target, own, own.layers[-1])
    noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    wrong = with_head(target, Head(target.parts.head.weight + 0.01 * noise))
    with pytest.raises(InputError, match=r"which the config ties .*\n.*a tied head that was not loaded"):
        prove_head(wrong, own)
    monkeypatch.setattr(target.model.config, "tie_word_embeddings", False)
    with pytest.raises(InputError, match=r"expected its own logits .* no bias, scale 1, no soft-cap, within 0.0001"):
        prove_head(wrong, own)
    broken = with_head(wrong, Head(torch.full((32, 32), float("nan"))))
    with pytest.raises(InputError, match="found a relative difference of nan"):
        prove_head(broken, own)
    with pytest.raises(InputError, match=r"expected logits \[20, 32\] as its head has rows, found \[20, 31\]"):
        prove_head(target, replace(own, logits=own.logits[:, :-1]))


def with_head(target: Target, head: Head) -> Target:
    return replace(target, parts=replace(target.parts, head=head))
