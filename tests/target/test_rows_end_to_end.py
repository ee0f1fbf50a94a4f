"""Documents end to end in one row: features equal transformers' own forward of each alone, or the row is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from builders import open_target, word_tokenizer
from draftline.target import packing
from draftline.target.capture import FeatureCapture, document_spans
from draftline.target.load import Target
from draftline.target.packing import UNLIMITED_TOKENS, Packing, find_packing
from family_models import BASE, DEPTH, LLAMA3_ROPE, ROPE, save_family

LENGTHS = [40, 3, 1, 22, 35, 9]
PACKED = ["llama", "qwen3", "qwen3_moe", "mistral", "gemma3_text", "qwen2_5_vl", "phi", "granite"]
REFUSED = {
    "gemma2": "padded rows (attention with softcap)",
    "gpt_oss": "padded rows (attention with s_aux)",
    "llama4_text": "padded rows (attention in chunks)",
    "deepseek_v3": "padded rows (values of another width than keys)",
    "lfm2": "padded rows (in a row of documents number 1 differs from itself alone by ",
    "falcon_h1": "padded rows (in a row of documents number 1 differs from itself alone by ",
    "qwen3_5_text": "padded rows (",
}


def family(name: str, folder: Path) -> Target:
    return open_target(save_family(name, folder))


def saved(model: Any, folder: Path) -> Target:
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return open_target(folder)


def documents(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 19, length).tolist() for length in lengths]


def own_states(target: Target, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """(layers' outputs, the last of them left out, last state) of one document by transformers' own forward."""
    with torch.no_grad():
        output = target.parts.decoder(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return [state[0] for state in output.hidden_states[1:-1]], output.last_hidden_state[0]


def captured(
    target: Target, parts: list[list[int]], how: Packing, tokens: int = 60, want_final: bool = True, gap: int = 0
) -> list[tuple[list[Tensor], Tensor | None]]:
    """Each document's taps of all layers but the last and its last state; `gap` tokens of padding after each."""
    document = np.concatenate([[n] * len(ids) + [-1] * gap for n, ids in enumerate(parts)])
    flat = np.concatenate([[*ids, *[7] * gap] for ids in parts])
    capture = FeatureCapture(target, tuple(range(DEPTH - 1)), want_final, tokens_per_forward=tokens, packing=how)
    spans = document_spans(document[None])
    found = capture.capture(flat, spans)
    assert not found.taps[torch.from_numpy(document < 0)].any()
    return [
        (list(found.taps[at : at + n].chunk(DEPTH - 1, -1)), None if found.final is None else found.final[at : at + n])
        for at, n in spans
    ]


@pytest.mark.parametrize("name", PACKED)
def test_each_document_is_itself_in_the_row(name: str, tmp_path: Path) -> None:
    """Rows of at most 60 tokens; documents longer than sliding windows of 8."""
    target, parts = family(name, tmp_path), documents(LENGTHS)
    how = find_packing(target.parts, target.device)
    assert how == Packing(UNLIMITED_TOKENS) and how.text == "packed, documents end to end"
    for gap in (0, 2):
        for ids, (taps, final) in zip(parts, captured(target, parts, how, gap=gap), strict=True):
            own_taps, own_final = own_states(target, ids)
            for found, expected in zip((*taps, final), (*own_taps, own_final), strict=True):
                assert isinstance(found, Tensor)
                assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_says_so(name: str, tmp_path: Path) -> None:
    target = family(name, tmp_path)
    own = target.parts.decoder.config._attn_implementation
    found = find_packing(target.parts, target.device)
    assert found.longest_tokens == 0 and found.text.startswith(REFUSED[name])
    assert target.parts.decoder.config._attn_implementation == own
    parts = documents([9, 14])
    for ids, (taps, _) in zip(parts, captured(target, parts, found), strict=True):
        expected = own_states(target, ids)[0][-1]
        assert float((taps[-1] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("fault", "number"),
    [("one document", 1), ("a key too many", 1), ("window off by one", 0), ("window of keys before", 0)],
)
def test_a_trial_sees_the_smallest_leak(
    fault: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row as one document; each document's first key the last of the one before; windows wrong by a token."""
    right = packing.one_by_one

    def wrong(query: Tensor, key: Tensor, value: Tensor, scale: Any, window: Any, bounds: dict[str, Any]) -> Tensor:
        begins = bounds["cu_seq_lens_q"]
        if fault == "one document":
            bounds = bounds | {"cu_seq_lens_q": begins[[0, -1]]}
        if fault == "a key too many":
            key, value = key.clone(), value.clone()
            for place in begins[1:-1].tolist():
                key[:, :, place], value[:, :, place] = key[:, :, place - 1], value[:, :, place - 1]
        shift = {"window off by one": -1, "window of keys before": 1}.get(fault, 0)
        return right(query, key, value, scale, window + shift, bounds)

    target = family("mistral", tmp_path)
    monkeypatch.setattr(packing, "one_by_one", wrong)
    found = find_packing(target.parts, target.device)
    assert found.text.startswith(f"padded rows (in a row of documents number {number} differs from itself alone by ")


def rows_of(target: Target, how: Packing, lengths: list[int]) -> list[tuple[bool, int]]:
    starts = np.cumsum([0, *lengths])
    spans = [(int(start), length) for start, length in zip(starts, lengths, strict=False)]
    capture = FeatureCapture(target, (1,), want_final=False, tokens_per_forward=50, packing=how)
    forwards = list(capture.forwards(np.zeros(starts[-1], dtype=np.int64), spans))
    return [(forward.is_packed, forward.tokens) for forward in forwards]


def test_rows_are_filled_and_long_documents_have_padded_ones(tmp_path: Path) -> None:
    target = family("llama", tmp_path)
    lengths = [30, 20, 1, 60, 40, 9, 55]
    assert rows_of(target, Packing(UNLIMITED_TOKENS), lengths) == [
        (True, 50), (False, 1), (False, 60), (True, 49), (False, 55),
    ]  # fmt: skip
    assert rows_of(target, Packing(40), lengths) == [(True, 50), (True, 50), (False, 60), (False, 55)]
    assert rows_of(target, Packing(40), [25, 25, 20, 25]) == [(False, 50), (True, 45)]  # alike: nothing to pad
    assert all(not is_packed for is_packed, _ in rows_of(target, Packing(0, "no"), lengths))


def test_a_window_too_long_to_try_packs_what_lies_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = saved(hf.MistralForCausalLM(hf.MistralConfig(**BASE, **ROPE, sliding_window=240)), tmp_path)
    assert find_packing(target.parts, target.device) == Packing(240)  # 256 positions: no document of 277 to try
    assert find_packing(target.parts, target.device).text == "packed, documents up to 240 tokens end to end"
    target.parts.config.max_position_embeddings = 300
    assert find_packing(target.parts, target.device) == Packing(UNLIMITED_TOKENS)
    monkeypatch.setattr(packing, "LONGEST_TRIAL_TOKENS", 200)
    assert find_packing(target.parts, target.device) == Packing(240)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_rows_length_stay_padded(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 7000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    target = saved(hf.LlamaForCausalLM(hf.LlamaConfig(**BASE, rope_parameters=rope)), tmp_path)
    assert find_packing(target.parts, target.device).text == (
        f"padded rows ({kind} rotary embedding, which depends on the row's length)"
    )
    assert LLAMA3_ROPE["rope_type"] not in packing.ROPE_BY_LENGTH


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5_text"])
def test_layers_above_the_last_tap_run_for_the_final_state_alone(name: str, tmp_path: Path) -> None:
    target, parts = family(name, tmp_path), documents([9, 14])
    ran: list[int] = []
    for number, layer in enumerate(target.parts.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    how = find_packing(target.parts, target.device)
    ran.clear()
    without = captured(target, parts, how, want_final=False)
    assert set(ran) == set(range(DEPTH - 1))
    whole = captured(target, parts, how)
    assert set(ran) == set(range(DEPTH))
    for (taps, none), (expected, _) in zip(without, whole, strict=True):
        assert none is None and all(torch.equal(a, b) for a, b in zip(taps, expected, strict=True))
    assert target.parts.decoder.config._attn_implementation != packing.ATTENTION
