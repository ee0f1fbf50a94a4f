"""Small real things for tests: a random Qwen3 target in a folder, its tokenizer, packed batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftline.config import TargetSection
from draftline.records import DrafterSpec, PackedBatch
from draftline.target.load import Target, load_target
from draftline.target.proofs import own_outputs, prove_embedding, prove_head, prove_stream

CHATML = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
WORDS = ["<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|mask|>", "user", "assistant", "system"] + [
    f"w{i}" for i in range(11)
]  # 19 words


def word_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def qwen3_config(**changes) -> Qwen3Config:
    values = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "eos_token_id": 3, "pad_token_id": 1,
        "bos_token_id": None,
    }  # fmt: skip
    return Qwen3Config(**(values | changes))


def save_target(folder: Path, seed: int = 0, **changes) -> Path:
    """A random Qwen3 target, wide enough in its weights that its greedy text is not one repeated token."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(qwen3_config(**changes))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.5 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def open_target(folder: Path, **section) -> Target:
    return load_target(TargetSection(path=str(folder), **section), torch.device("cpu"))


def proven(target: Target, ids: list[int]) -> float:
    """Stream, head and embedding proven on a text: the larger of the two errors."""
    own = own_outputs(target, ids)
    assert prove_stream(target, own) == len(target.parts.layers)
    embedded = target.embed(torch.tensor(ids, device=target.device))
    return max(prove_head(target, own), prove_embedding(target, own.first_input, embedded))


def spec_for(target: Target, **changes) -> DrafterSpec:
    config = target.parts.config
    layers = changes.pop("num_hidden_layers", 2)
    values = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": target.parts.vocab_size, "block_size": 5,
        "mask_token_id": 4, "target_layer_ids": (0, 2, 3), "num_target_layers": len(target.parts.layers),
        "rms_norm_eps": 1e-6, "rope_parameters": dict(config.rope_parameters), "max_position_embeddings": 256,
        "layer_types": ("full_attention",) * layers,
    }  # fmt: skip
    return DrafterSpec(**(values | changes))


def packed(documents: list[list[tuple[list[int], list[int]]]], length: int, index: int = 0) -> PackedBatch:
    """Rows of (ids, loss mask) documents, laid out by hand."""
    shape = (len(documents), length)
    ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    document, position = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    token = np.full(shape, -1, dtype=np.int64)
    for row, parts in enumerate(documents):
        at = 0
        for number, (tokens, loss) in enumerate(parts):
            end = at + len(tokens)
            ids[row, at:end], mask[row, at:end] = tokens, loss
            document[row, at:end], position[row, at:end] = number, np.arange(len(tokens))
            token[row, at:end] = row * length + np.arange(at, end)
            at = end
    return PackedBatch(index, ids, mask, document, position, token)
