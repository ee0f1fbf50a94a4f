"""Train the tiny target: a Qwen3 of about 3.5 million parameters, on one GPU in two minutes.

    python scripts/tiny_target/train.py --tokens build/tokens --out build/target --steps 4000 --rows 128 --lr 3e-3 \\
        --warmup-steps 200 --max-seconds 95 --seed 1 --device cuda --compile

Reads what encode.py wrote (needs torch and transformers only). Writes the folder that draftline ships:
config, bf16 safetensors, tokenizer, chat template, held_out.jsonl (a few conversations it has not seen) and
provenance.json with everything measured on the saved files, reloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

LOSS_BIT = 1 << 15  # set by encode.py on the tokens that carry loss
SHIPPED_PER_KIND = 2  # held-out conversations that go with the target, to check its perplexity
ANSWERED_PER_KIND = 20  # held-out prompts whose greedy answer is compared with the reference
LOG_SECONDS = 3.0
MEASURE_FROM, MEASURE_TO = 20, 80  # steps whose rate decides whether the schedule fits into --max-seconds


@dataclass(frozen=True)
class Rows:
    """Packed conversations on the device."""

    ids: Tensor  # int16 [R, S]
    supervised: Tensor  # bool [R, S]

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Rows:
        packed = np.load(path)
        ids = torch.from_numpy((packed & (LOSS_BIT - 1)).astype(np.int16))
        return cls(ids.to(device), torch.from_numpy(packed >= LOSS_BIT).to(device))

    def take(self, which: Tensor) -> Rows:
        return Rows(self.ids[which], self.supervised[which])


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,  # padded, as most targets are
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def documents_of(ids: Tensor, start_id: int) -> tuple[Tensor, Tensor]:
    """Which document a token is of and its position there, both [R, S]; a document opens with two turns."""
    starts = ids == start_id
    document = (starts.cumsum(1) - 1) // 2
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    opens = torch.ones_like(starts)
    opens[:, 1:] = document[:, 1:] != document[:, :-1]
    return document, place - torch.where(opens, place, 0).cummax(1).values


def summed_loss(model: Qwen3ForCausalLM, rows: Rows, start_id: int) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats and the number of supervised tokens; attention stays inside each document."""
    ids = rows.ids.long()
    document, position = documents_of(ids, start_id)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = (document[:, :, None] == document[:, None, :]) & causal  # [R, S, S]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids, attention_mask=mask[:, None], position_ids=position, use_cache=False).logits
    labels = torch.where(rows.supervised, ids, -100)[:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return total, rows.supervised[:, 1:].sum()


def batches(rows: Rows, size: int, seed: int) -> Iterator[Rows]:
    """Shuffled batches without end; every epoch sees every row once, but for an incomplete last batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows.ids), generator=generator).to(rows.ids.device)
        for first in range(0, len(order) - size + 1, size):
            yield rows.take(order[first : first + size])


def make_optimizer(model: Qwen3ForCausalLM, lr: float) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def rate(step: int, steps: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < options.warmup_steps:
        return float(options.lr * (step + 1) / options.warmup_steps)
    share = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
    return float(options.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))))


def fitting_steps(options: argparse.Namespace, began: float, measured: float) -> int:
    """The steps that fit into --max-seconds at the rate of the first ones; decided once and said aloud."""
    now = time.perf_counter()
    per_step = (now - measured) / (MEASURE_TO - MEASURE_FROM)
    fit = MEASURE_TO + int((options.max_seconds - (now - began)) / per_step)
    steps = min(options.steps, max(fit, MEASURE_TO + 1))
    print(
        f"{per_step * 1e3:.1f} ms a step: {steps} of {options.steps} steps fit into {options.max_seconds:g} s",
        flush=True,
    )
    return steps


def train(model: Qwen3ForCausalLM, rows: Rows, start_id: int, options: argparse.Namespace) -> int:
    """Train in place; returns the steps taken."""
    optimizer, stream = make_optimizer(model, options.lr), batches(rows, options.rows, options.seed)
    began = logged = measured = time.perf_counter()
    steps, step = options.steps, 0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, options)
        total, count = summed_loss(model, next(stream), start_id)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step in (MEASURE_FROM, MEASURE_TO):
            loss.item()  # wait for the device, so that the clock tells the truth
            if step == MEASURE_TO:
                steps = fitting_steps(options, began, measured)
            measured = time.perf_counter()
        if step % 10 == 0 and time.perf_counter() - logged > LOG_SECONDS or step in (1, steps):
            logged = time.perf_counter()
            speed = step * rows.ids.shape[1] * options.rows / (logged - began)
            print(
                f"step {step}/{steps} loss {loss.item():.4f} {speed / 1e6:.2f}M tokens/s {logged - began:.0f} s",
                flush=True,
            )
    return step


@torch.no_grad()
def perplexity(model: Qwen3ForCausalLM, rows: Rows, start_id: int) -> float:
    nats, tokens = 0.0, 0
    for first in range(0, len(rows.ids), 32):
        part = Rows(rows.ids[first : first + 32], rows.supervised[first : first + 32])
        total, count = summed_loss(model, part, start_id)
        nats, tokens = nats + total.item(), tokens + int(count)
    return math.exp(nats / tokens)


@torch.no_grad()
def file_perplexity(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: list[Any]) -> float:
    """exp of the mean cross-entropy of the assistant's tokens and end of turn, in float32, one conversation at a time."""
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


def by_kind(conversations: list[Any], count: int) -> list[Any]:
    """The first `count` conversations of each kind, kinds in alphabetical order."""
    kinds = sorted({row["source"] for row in conversations})
    return [row for kind in kinds for row in [r for r in conversations if r["source"] == kind][:count]]


def exact_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, conversations: list[Any]
) -> dict[str, float]:
    """Share of greedy answers that equal the reference word for word, per kind."""
    answers = greedy(model, tokenizer, [row["messages"][0]["content"] for row in conversations], 200)
    right: dict[str, list[bool]] = {}
    for row, answer in zip(conversations, answers, strict=True):
        right.setdefault(row["source"], []).append(answer == row["messages"][1]["content"] + tokenizer.eos_token)
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train the tiny target")
    parser.add_argument("--tokens", type=Path, required=True, help="folder that encode.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained target")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of 512 tokens in a step")
    parser.add_argument("--lr", type=float, required=True, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--max-seconds", type=float, required=True, help="shorten the schedule to fit into this")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer")
    return parser.parse_args()


def report(model: Qwen3ForCausalLM, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Where the target comes from."""
    corpus = json.loads((options.tokens / "corpus.json").read_text(encoding="utf-8"))
    train_rows = options.tokens / "train.npy"
    return {
        "sources": corpus["sources"],
        "kinds": corpus["kinds"],
        "licence": "Apache-2.0",
        "seeds": {"corpus": corpus["seed"], "training": options.seed},
        "corpus_sha256": hashlib.sha256(train_rows.read_bytes()).hexdigest(),
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens_seen": steps * options.rows * int(np.load(train_rows, mmap_mode="r").shape[1]),
        "command": shlex.join(["python", *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, shipped: list[Any], out: Path) -> None:
    model.generation_config.update(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in shipped]
    (out / "held_out.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokens / "tokenizer")
    start_id = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model = build_model(tokenizer).to(device)
    print(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}", flush=True)
    if options.compile:
        for layer in model.model.layers:
            layer.compile()  # one layer's graph serves all eight
    steps = train(model, Rows.load(options.tokens / "train.npy", device), start_id, options)
    lines = (options.tokens / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [json.loads(line) for line in lines]
    shipped = by_kind(held_out, SHIPPED_PER_KIND)
    save(model, tokenizer, shipped, options.out)
    model = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(device).eval()
    record = report(model, options, steps) | {
        "held_out_perplexity": file_perplexity(model, tokenizer, shipped),
        "validation_perplexity": perplexity(model, Rows.load(options.tokens / "held_out.npy", device), start_id),
        "exact_answers": exact_answers(model, tokenizer, by_kind(held_out, ANSWERED_PER_KIND)),
    }
    (options.out / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2), flush=True)
    samples = by_kind(held_out, ANSWERED_PER_KIND)[:: 2 * ANSWERED_PER_KIND]
    prompts = [row["messages"][0]["content"] for row in samples]
    for prompt, answer in zip(prompts, greedy(model, tokenizer, prompts, 200), strict=True):
        print(f"\n>>> {prompt}\n{answer}", flush=True)


if __name__ == "__main__":
    main()
