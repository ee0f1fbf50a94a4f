"""Train the tiny target's tokenizer and turn its corpus into token rows.

    python scripts/tiny_target/encode.py --corpus build/corpus --out build/tokens --vocab-size 2048

Reads CORPUS/{train,held_out}.jsonl; writes OUT/tokenizer/ and OUT/{train,held_out}.npy: uint16 [rows, 512], whole
conversations packed into rows, and copies what else train.py needs: OUT (36 MB) is all that has to travel to a GPU.
A token's high bit says that it carries loss: the assistant's tokens and its end of turn. Only those, because the
prompts' names and numbers are drawn at random: there is nothing to learn in them, and a model of a few million
parameters has no capacity to waste.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rows import LOSS_BIT
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROW_TOKENS = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END, *(f"<|reserved_{index}|>" for index in range(8)))
# Words with their leading space, one digit at a time, runs of signs, line ends: digits alone make sums learnable.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_tokenizer(rows: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text has tokens, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START, *SPECIAL[3:]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """uint16 [T] per conversation, with the loss bit on what the assistant says."""
    prompts = [row["messages"][:1] for row in rows]
    asked = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    answers = [f"{row['messages'][1]['content']}{END}\n" for row in rows]
    heads = tokenizer(asked, add_special_tokens=False)["input_ids"]
    tails = tokenizer(answers, add_special_tokens=False)["input_ids"]
    for head, tail in zip(heads, tails, strict=True):
        ids = np.array(head + tail, dtype=np.uint16)
        ids[len(head) : -1] |= LOSS_BIT  # not on the line end after <|im_end|>, which the template adds
        yield ids


def pack(documents: Iterator[np.ndarray], pad: int) -> np.ndarray:
    """Whole documents, in order, into rows [R, 512]; a document that does not fit opens the next row."""
    rows: list[np.ndarray] = []
    used = ROW_TOKENS
    for ids in documents:
        if used + len(ids) > ROW_TOKENS:
            rows.append(np.full(ROW_TOKENS, pad, dtype=np.uint16))
            used = 0
        rows[-1][used : used + len(ids)] = ids
        used += len(ids)
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="train the tiny target's tokenizer and encode its corpus")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer and token rows")
    parser.add_argument("--vocab-size", type=int, required=True)
    options = parser.parse_args()
    sets = {part: read(options.corpus / f"{part}.jsonl") for part in ("held_out", "train")}
    tokenizer = train_tokenizer(sets["train"], options.vocab_size)
    tokenizer.save_pretrained(options.out / "tokenizer")
    for name in ("corpus.json", "held_out.jsonl"):
        shutil.copy(options.corpus / name, options.out / name)
    for part, conversations in sets.items():
        rows = pack(encode(tokenizer, conversations), tokenizer.pad_token_id)
        np.save(options.out / f"{part}.npy", rows)
        tokens, supervised = (rows != tokenizer.pad_token_id).sum(), (rows >= LOSS_BIT).sum()
        mean = supervised / len(conversations)
        print(f"{part}: {len(rows):,} rows, {tokens:,} tokens, {supervised:,} with loss, {mean:.0f} an answer")
    print(f"vocabulary: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
