"""Taps and final states against sources of their own (SPEC 1, 9.5-7; CASES 8)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from builders import open_target, packed, proven, qwen3_config, word_tokenizer
from draftline.channel.store import FeatureStore
from draftline.data.stream import RowStream
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture, document_spans, tapped
from draftline.target.load import Target

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 3, "pad_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(qwen3_config()),
    "qwen3, untied": lambda: Qwen3ForCausalLM(qwen3_config(tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **MOE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=8)),  # also scales its embedding
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = FAMILIES[request.param]()
    for name, weight in model.named_parameters():
        weight.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.5 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return open_target(folder)


def documents(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 32, n).tolist() for n in lengths]


def layer_outputs(target: Target, ids: list[int]) -> list[torch.Tensor]:
    """Every layer's output [T, d] of one document. transformers gives all but the last, which is normed there; that one
    is taken from what the final norm receives."""
    received: list[torch.Tensor] = []
    handle = target.parts.decoder.norm.register_forward_pre_hook(lambda _m, args: received.append(args[0]))
    with torch.no_grad():
        states = target.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    handle.remove()
    return [state[0] for state in states[1:-1]] + [received[0][0]]


def test_each_tap_is_its_layers_raw_output(target: Target) -> None:
    (ids,) = documents([21])
    expected = layer_outputs(target, ids)
    assert len(expected) == 4
    taps = FeatureCapture(target, (0, 1, 2, 3), want_final=True)(packed([[(ids, [1] * 21)]], 24))
    found = taps.taps[0, :21].chunk(4, dim=-1)
    for layer in range(4):
        torch.testing.assert_close(found[layer], expected[layer], rtol=1e-5, atol=1e-5)
        assert torch.isfinite(found[layer]).all() and found[layer].abs().amax(-1).min() > 0
        assert all((found[layer] - found[other]).abs().max() > 0.01 for other in range(layer))
    assert not taps.taps[0, 21:].any()


def test_the_last_layers_tap_is_not_the_normed_state(target: Target) -> None:
    """CASES 8: the norm, computed by hand from the tap, gives the final state; the tap itself is another vector."""
    (ids,) = documents([15])
    batch = FeatureCapture(target, (3,), want_final=True)(packed([[(ids, [1] * 15)]], 15))
    tap, norm = batch.taps[0].double(), target.parts.decoder.norm
    weight = norm.weight.double() + (1 if "gemma" in target.parts.config.model_type else 0)
    by_hand = weight * tap / torch.sqrt(tap.square().mean(-1, keepdim=True) + target.parts.config.rms_norm_eps)
    torch.testing.assert_close(by_hand.float(), batch.final[0], rtol=1e-4, atol=1e-4)
    assert (batch.taps - batch.final).abs().max() > 0.1


def test_head_of_the_final_state_is_the_targets_own_logits(target: Target) -> None:
    lengths = [4, 19, 11]
    parts = documents(lengths)
    batch = FeatureCapture(target, (1,), want_final=True)(packed([[(ids, [1] * len(ids)) for ids in parts]], 36))
    at = 0
    for ids in parts:
        with torch.no_grad():
            own = target.model(input_ids=torch.tensor([ids])).logits[0]
        logits = batch.final[0, at : at + len(ids)] @ target.parts.head.weight.T
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
        at += len(ids)
    assert proven(target, parts[1]) < 1e-5


@pytest.mark.parametrize("per_forward", [16384, 40, 1], ids=["one forward", "two forwards", "one by one"])
def test_four_documents_together_are_each_document_alone(target: Target, per_forward: int) -> None:
    """Two packed rows, four lengths: right padding in the forward, and no look at the neighbour (SPEC 9.7)."""
    parts = documents([17, 3, 9, 20])
    capture = FeatureCapture(target, (0, 3), want_final=True, tokens_per_forward=per_forward)
    rows = [[(ids, [1] * len(ids)) for ids in pair] for pair in (parts[:2], parts[2:])]
    batch = capture(packed(rows, 32))
    assert batch.taps.shape == (2, 32, 64)
    for n, ids in enumerate(parts):
        row, at = divmod(n, 2)
        at = at and len(parts[n - 1])
        here = slice(at, at + len(ids))
        alone = layer_outputs(target, ids)
        expected = torch.cat([alone[0], alone[3]], dim=-1)
        torch.testing.assert_close(batch.taps[row, here], expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            final = target.parts.decoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(batch.final[row, here], final, rtol=1e-4, atol=1e-4)


def test_embeddings_are_what_the_first_layer_receives(target: Target) -> None:
    """Gemma multiplies by sqrt(d); the drafter's slots are scaled as the target scales."""
    received: list[torch.Tensor] = []
    handle = target.parts.layers[0].register_forward_pre_hook(lambda _m, args: received.append(args[0]))
    ids = torch.tensor(documents([12]))
    with torch.no_grad():
        target.model(input_ids=ids)
    handle.remove()
    torch.testing.assert_close(target.embed(ids), received[0], rtol=0, atol=0)


def test_a_store_gives_what_capture_gives(target: Target) -> None:
    """Over two epochs of a stream, whose rows hold the documents in other places each time."""
    parts = documents([17, 3, 9, 20, 6])
    rows = [TokenRow(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool), "") for ids in parts]
    stream = RowStream(rows, row_length=24, rows_per_batch=2, seed=0, epochs=2)
    capture = FeatureCapture(target, (1, 2), want_final=True)
    flat = capture.capture(stream.ids, list(zip(stream.starts[:-1].tolist(), stream.lengths.tolist(), strict=True)))
    store = FeatureStore(flat.taps, flat.final)
    for index in range(len(stream)):
        packed_batch = stream.batch(index)
        there = torch.from_numpy(packed_batch.document >= 0)
        kept, fresh = store(packed_batch), capture(packed_batch)
        assert kept.packed is packed_batch and torch.isfinite(kept.taps).all()
        torch.testing.assert_close(kept.taps[there], fresh.taps[there], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kept.final[there], fresh.final[there], rtol=1e-4, atol=1e-4)


def test_hooks_do_not_outlive_a_failed_forward(target: Target) -> None:
    before = [len(layer._forward_hooks) for layer in target.parts.layers]  # transformers has hooks of its own
    with pytest.raises(IndexError), tapped(target.parts.layers, (0, 2), {}.__setitem__):
        target.parts.decoder(input_ids=torch.tensor([[31, 32]]))
    assert [len(layer._forward_hooks) for layer in target.parts.layers] == before


def test_document_spans_by_hand() -> None:
    document = np.array([[0, 0, 1, 2, 2, -1], [0, 0, 0, 0, 0, 0], [-1] * 6, [0, 1, 1, -1, -1, -1]])
    assert document_spans(document) == [(0, 2), (2, 1), (3, 2), (6, 6), (18, 1), (19, 2)]
