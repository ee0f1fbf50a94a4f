"""The tiny target and the prompts that `quickstart` ships: small, whole, and what provenance.json says they are."""

import json
import math
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LIMIT_BYTES = 8_000_000
LIMIT_PARAMETERS = 4_000_000


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def assets() -> Path:
    with as_file(files("draftline") / "assets") as folder:
        return folder


@pytest.fixture(scope="module")
def target(assets: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(assets / "tiny_target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(assets / "tiny_target")


@pytest.fixture(scope="module")
def provenance(assets: Path) -> dict[str, Any]:
    return json.loads((assets / "tiny_target" / "provenance.json").read_text(encoding="utf-8"))


def test_target_is_a_small_bf16_qwen3(assets: Path, provenance: dict[str, Any]) -> None:
    folder = assets / "tiny_target"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT_BYTES
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.architectures) == ("qwen3", ["Qwen3ForCausalLM"])
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 10000.0
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a dict)
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    assert sum(tensor.numel() for tensor in tensors) == provenance["parameters"] <= LIMIT_PARAMETERS


def test_special_tokens_are_distinct_and_have_rows(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(8))]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(11))
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>", "<|im_end|>", None)
    assert target.config.eos_token_id == target.generation_config.eos_token_id == 2
    assert target.config.pad_token_id == target.generation_config.pad_token_id == 0
    assert len(tokenizer) <= target.get_input_embeddings().weight.shape[0] == target.config.vocab_size


@pytest.mark.parametrize(
    "text", ["Let's add 12 + 30 = 42.\n1. Yes", "  two  spaces\n\n\ttab", "Größe, naïve, 猫 🐈, 3 × 4"]
)
def test_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert min(ids) > 10, "ordinary text uses a special token"


def test_template_is_chatml_without_generation_markers(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "generation %" not in tokenizer.chat_template


def test_prompts_are_disjoint_and_of_the_same_kinds(assets: Path, provenance: dict[str, Any]) -> None:
    train = read(assets / "prompts" / "train.jsonl")
    held_out = read(assets / "prompts" / "held_out.jsonl")
    shipped = read(assets / "tiny_target" / "held_out.jsonl")
    assert (len(train), len(held_out)) == (320, 48)
    texts = [row["messages"][0]["content"] for row in train + held_out + shipped]
    assert len(set(texts)) == len(texts) == 320 + 48 + 24
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in train + held_out)
    for rows in (train, held_out, shipped):
        assert {row["source"] for row in rows} == set(provenance["kinds"])


def test_provenance_says_where_everything_comes_from(provenance: dict[str, Any]) -> None:
    assert {source["licence"] for source in provenance["sources"]} == {"Apache-2.0"}
    assert all(source["name"] and source["use"] for source in provenance["sources"])
    assert set(provenance["seeds"]) == {"corpus", "training"}
    assert len(provenance["corpus_sha256"]) == 64
    assert provenance["steps"] > 0 and provenance["tokens_seen"] > 0
    assert set(provenance["versions"]) == {"python", "torch", "transformers"} and all(provenance["versions"].values())
    assert provenance["command"].startswith("python scripts/tiny_target/train.py ")


def answer_nats(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> tuple[float, int]:
    """Summed cross-entropy of the answer and its end of turn: whole rendered text, float64 log-sum-exp by hand."""
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)[:-1]  # without the last line end
    assert ids[: len(prompt)] == prompt and ids[-1] == tokenizer.eos_token_id
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([ids])).logits[0].double()
    nats = 0.0
    for place in range(len(prompt), len(ids)):
        before = logits[place - 1]
        nats += math.log(float((before - before.max()).exp().sum())) + float(before.max() - before[ids[place]])
    return nats, len(ids) - len(prompt)


def test_recorded_perplexity_is_the_measured_one(
    assets: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, provenance: dict[str, Any]
) -> None:
    rows = read(assets / "tiny_target" / "held_out.jsonl")
    nats, tokens = map(sum, zip(*(answer_nats(target, tokenizer, row) for row in rows), strict=True))
    assert math.exp(nats / tokens) == pytest.approx(provenance["held_out_perplexity"], rel=0.02)
    # Sharp enough that 2% means something: an untrained model of this vocabulary is at about 1,700.
    assert provenance["held_out_perplexity"] < 1.5 and provenance["validation_perplexity"] < 1.5


def test_answers_are_right_and_end(assets: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """One reference answer of each kind, written greedily; most must be right to the letter, all must end."""
    rows = read(assets / "tiny_target" / "held_out.jsonl")[::2]
    right = 0
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        out = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=200)[0, ids.shape[1] :]
        assert out[-1] == tokenizer.eos_token_id, tokenizer.decode(out)
        right += tokenizer.decode(out[:-1]) == row["messages"][1]["content"]
    assert len(rows) == 12 and right >= 9
