"""A random target of a drafter's sizes and conversations of random words, on disk: what a real run trains on, without a
download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging

from draftline.bench.shapes import Shape
from draftline.records import DrafterSpec

WORDS = 1000
SPECIAL = ("<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|mask|>", "user", "assistant")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
TEMPLATE_TOKENS = 6  # of a conversation of two turns: what is not their words


def target_config(spec: DrafterSpec) -> Qwen3Config:
    """A Qwen3 of the spec's sizes and of its target's depth, with the token ids of `tokenizer`."""
    return Qwen3Config(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_target_layers, num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads, head_dim=spec.head_dim, tie_word_embeddings=False,
        max_position_embeddings=spec.max_position_embeddings, rope_parameters=dict(spec.rope_parameters),
        eos_token_id=SPECIAL.index("<|im_end|>"), pad_token_id=SPECIAL.index("<pad>"), bos_token_id=None,
    )  # fmt: skip


def random_model(spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> Any:
    """Weights of the family's own initialisation, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(target_config(spec), dtype=dtype)
    return model.eval().requires_grad_(False)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def write_target(folder: Path, spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> None:
    logging.disable_progress_bar()
    random_model(spec, device, dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def write_conversations(path: Path, shape: Shape, rows: int) -> None:
    """As many as fill so many rows with `shape.documents` each; all but one word of them are answers."""
    rng = np.random.default_rng(0)
    words = shape.sequence // shape.documents - TEMPLATE_TOKENS
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows * shape.documents):
            question, *answer = (f"w{i}" for i in rng.integers(0, WORDS, words))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": " ".join(answer)}]
            file.write(json.dumps({"messages": turns}) + "\n")
