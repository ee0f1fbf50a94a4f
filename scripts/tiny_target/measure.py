"""What the trained target can do: perplexity, greedy answers, and how many of them are right."""

from __future__ import annotations

import math
from typing import Any

import torch
from rows import Rows, summed_loss
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

Conversations = list[dict[str, Any]]  # as corpus.py writes them: one question, one reference answer


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, rows: Rows, start_id: int) -> float:
    nats, tokens = 0.0, 0
    for first in range(0, len(rows.ids), 32):
        part = Rows(rows.ids[first : first + 32], rows.supervised[first : first + 32])
        total, count = summed_loss(model, part, start_id)
        nats, tokens = nats + total.item(), tokens + int(count)
    return math.exp(nats / tokens)


@torch.no_grad()
def file_perplexity(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: Conversations) -> float:
    """exp of the mean cross-entropy of the assistant's tokens and end of turn, one unpacked conversation at a time."""
    nats, tokens = 0.0, 0
    for row in conversations:
        asked = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        head = tokenizer(asked, add_special_tokens=False)["input_ids"]
        answer = row["messages"][1]["content"] + tokenizer.eos_token
        ids = torch.tensor([head + tokenizer(answer, add_special_tokens=False)["input_ids"]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(head) - 1 : -1]
        nats += functional.cross_entropy(logits.float(), ids[0, len(head) :], reduction="sum").item()
        tokens += len(logits)
    return math.exp(nats / tokens)


def greedy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int) -> list[str]:
    """Greedy answers, special tokens kept so that a missing end of turn shows."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(asked, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    batch = {key: batch[key].to(model.device) for key in ("input_ids", "attention_mask")}
    out = model.generate(**batch, do_sample=False, max_new_tokens=limit)
    return [
        text.replace(tokenizer.pad_token, "") for text in tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
    ]


def by_kind(conversations: Conversations, count: int) -> Conversations:
    """The first `count` conversations of each kind, kinds in alphabetical order."""
    kinds = sorted({row["source"] for row in conversations})
    return [row for kind in kinds for row in [r for r in conversations if r["source"] == kind][:count]]


def exact_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: Conversations
) -> dict[str, float]:
    """Share of greedy answers that equal the reference word for word, per kind."""
    answers = greedy(model, tokenizer, [row["messages"][0]["content"] for row in conversations], 200)
    right: dict[str, list[bool]] = {}
    for row, answer in zip(conversations, answers, strict=True):
        right.setdefault(row["source"], []).append(answer == row["messages"][1]["content"] + tokenizer.eos_token)
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}
