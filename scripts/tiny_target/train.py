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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measure import by_kind, exact_answers, file_perplexity, greedy, perplexity
from rows import Rows, summed_loss
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

SHIPPED_PER_KIND = 2  # held-out conversations that go with the target, to check its perplexity
ANSWERED_PER_KIND = 20  # held-out prompts whose greedy answer is compared with the reference
LOG_SECONDS = 3.0
MEASURE_FROM, MEASURE_TO = 20, 80  # steps whose rate decides whether the schedule fits into --max-seconds


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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


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


def take_step(model: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, rows: Rows, start_id: int) -> Tensor:
    """One optimizer step; returns the loss without waiting for the device."""
    total, count = summed_loss(model, rows, start_id)
    loss = total / count
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(model: Qwen3ForCausalLM, rows: Rows, start_id: int, options: argparse.Namespace) -> int:
    """Train in place; returns the steps taken."""
    optimizer, stream = make_optimizer(model, options.lr), batches(rows, options.rows, options.seed)
    began = logged = measured = time.perf_counter()
    steps, step = options.steps, 0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, options)
        loss = take_step(model, optimizer, next(stream), start_id)
        step += 1
        if step in (MEASURE_FROM, MEASURE_TO):
            loss.item()  # wait for the device, so that the clock tells the truth
            steps = fitting_steps(options, began, measured) if step == MEASURE_TO else steps
            measured = time.perf_counter()
        if time.perf_counter() - logged > LOG_SECONDS or step in (1, steps):
            value, logged = loss.item(), time.perf_counter()
            speed = step * options.rows * rows.ids.shape[1] / (logged - began)
            print(
                f"step {step}/{steps} loss {value:.4f}, {speed / 1e6:.2f}M tokens/s, {logged - began:.0f} s", flush=True
            )
    return step


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
    packed = np.load(train_rows)
    tokens_per_row = (packed != 0).sum() / len(packed)  # id 0 pads
    return {
        "sources": corpus["sources"],
        "kinds": corpus["kinds"],
        "licence": "Apache-2.0",
        "seeds": {"corpus": corpus["seed"], "training": options.seed},
        "corpus_sha256": hashlib.sha256(train_rows.read_bytes()).hexdigest(),
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens_seen": round(steps * options.rows * tokens_per_row),
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, shipped: list[Any], out: Path) -> None:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in shipped]
    (out / "held_out.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokens / "tokenizer")
    start_id = tokenizer.get_vocab()["<|im_start|>"]
    model = build_model(tokenizer)
    model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    print(f"{model.num_parameters():,} parameters, vocabulary {model.config.vocab_size}", flush=True)
    if options.compile:
        for layer in model.model.layers:
            layer.compile()  # one layer's graph serves all eight
    steps = train(model, Rows.load(options.tokens / "train.npy", device), start_id, options)
    lines = (options.tokens / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [json.loads(line) for line in lines]
    shipped = by_kind(held_out, SHIPPED_PER_KIND)
    save(model, tokenizer, shipped, options.out)
    model = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32).eval()
    model.to(device)
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
