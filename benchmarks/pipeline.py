"""How fast each placement trains, beside what each stage reaches alone, and a picture of what overlaps.

    python benchmarks/pipeline.py --out build/pipeline                  # two GPUs: random Qwen3-8B, no download
    python benchmarks/pipeline.py --out build/pipeline --size tiny      # two CPU cores: proves that it runs

Every placement is a `draftline train` of its own on the same random target and tokens; its rate is taken from the event
log after the first steps. `alone` measures capture and training one after the other on one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftline.config import load_recipe
from draftline.monitor.events import Step, read_events
from draftline.monitor.trace import read_spans
from draftline.train.auto import measure_stages
from draftline.train.ranks import alone, choose_rank_device

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHATML = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
WORDS = 1000
WARM_STEPS = 3
COLOURS = {"capture": "tab:blue", "waiting": "lightgrey", "forward and backward": "tab:orange", "step": "tab:red"}
SLOTS = 3  # micro-batches in flight: enough to hide one, few enough that the picture shows a steady state


@dataclass(frozen=True)
class Size:
    target: dict[str, Any]
    sequence_length: int
    anchors: int
    rows_per_step: int
    steps: int
    dtype: torch.dtype


SIZES = {
    "8b": Size(
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
        },
        4096, 512, 8, 12, torch.bfloat16,
    ),
    "tiny": Size(
        {
            "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
        },
        256, 32, 4, 8, torch.float32,
    ),
}  # fmt: skip

PLACEMENTS = {
    "colocated on 1": ["placement.drafters=1"],
    "colocated on 2": ["placement.drafters=2"],
    "split 1+1": ["placement.kind=split", "placement.targets=1", "placement.drafters=1"],
    "split 1+1, torch.distributed": [
        "placement.kind=split", "placement.targets=1", "placement.drafters=1", "placement.channel=distributed",
    ],
}  # fmt: skip


def make_target(folder: Path, size: Size) -> None:
    """Random weights of the family's own initialisation, in shards, with a tokenizer of one word a token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(
        **size.target, max_position_embeddings=40960, rope_parameters=rope, eos_token_id=3, pad_token_id=1,
        bos_token_id=None, dtype=size.dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(size.dtype)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    special = ["<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|mask|>", "user", "assistant"]
    names = special + [f"w{i}" for i in range(WORDS)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def make_data(path: Path, size: Size) -> None:
    """As many conversations of one row each as the steps need."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(size.rows_per_step * size.steps):
            words = [f"w{i}" for i in rng.integers(0, WORDS, size.sequence_length - 12)]
            turns = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": " ".join(words[1:])}]
            file.write(json.dumps({"messages": turns}) + "\n")


def write_recipe(home: Path, size: Size) -> Path:
    tree = {
        "target": {"path": str(home / "target")},
        "data": {"train": str(home / "data.jsonl"), "sequence_length": size.sequence_length},
        "train": {
            "epochs": 1, "rows_per_step": size.rows_per_step, "rows_per_micro_batch": 1, "anchors": size.anchors,
            "checkpoint_every": 10**6, "trace": True, "log_every": 1,
        },
        "placement": {"channel_gib": SLOTS * slot_bytes(size) / 2**30},
    }  # fmt: skip
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def slot_bytes(size: Size) -> int:
    """Features of one row: as many taps as the recipe's default spreads over the depth, and the final state."""
    width = min(5, size.target["num_hidden_layers"] - 3) + 1
    return size.sequence_length * width * int(size.target["hidden_size"]) * size.dtype.itemsize


def rate_of(run: Path) -> float:
    """Tokens/s of the steps after the first few."""
    events = [logged.event for logged in read_events(run / "events.jsonl").events]
    steady = [event.report for event in events if isinstance(event, Step)][WARM_STEPS:]
    return sum(report.tokens for report in steady) / sum(report.seconds for report in steady)


def measure_alone(recipe: Path) -> dict[str, float]:
    parsed = load_recipe(recipe)
    device = choose_rank_device(parsed.placement.device)
    rates = measure_stages(parsed, alone(parsed.placement, device), device)
    return {"capture alone": rates.capture_tokens_per_s, "training alone": rates.train_tokens_per_s}


def draw(run: Path, ranks: int, split: bool, path: Path) -> None:
    """A bar for every span of two steps in the middle of the run, a row for every rank."""
    spans = {rank: read_spans(run / f"trace-rank{rank}.jsonl") for rank in range(ranks)}
    ends = [span.end_s for span in spans[0] if span.kind == "optimizer step"]
    window = (ends[len(ends) // 2], ends[len(ends) // 2 + 2])
    kinds = {"optimizer step": "step", "features": "waiting" if split else "capture"}
    figure, axes = plt.subplots(figsize=(12, 1.6 + 0.6 * ranks))
    for rank, rows in spans.items():
        for span in rows:
            kind = kinds.get(span.kind, span.kind)
            if kind in COLOURS and span.end_s > window[0] and span.start_s < window[1]:
                begin, end = max(span.start_s, window[0]), min(span.end_s, window[1])
                axes.barh(rank, end - begin, left=begin - window[0], color=COLOURS[kind], edgecolor="white")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("seconds")
    axes.set_title(run.name, loc="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, list(COLOURS), loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--size", choices=list(SIZES), default="8b")
    words.add_argument("--only", nargs="*", choices=[*PLACEMENTS, "alone"], default=[*PLACEMENTS, "alone"])
    chosen = words.parse_args()
    home, size = chosen.out, SIZES[chosen.size]
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "target").exists():
        subprocess.run([sys.executable, __file__, "--make", str(home), chosen.size], check=True)
    recipe = write_recipe(home, size)
    table = measure_alone_in_a_process(recipe) if "alone" in chosen.only else {}
    for name, overrides in PLACEMENTS.items():
        if name not in chosen.only:
            continue
        run = home / name.replace(" ", "_").replace(",", "")
        command = [sys.executable, "-m", "draftline", "train", str(recipe), f"train.out={run}", *overrides]
        subprocess.run(command, check=True)
        table[name] = rate_of(run)
        draw(run, 1 if name.endswith("on 1") else 2, name.startswith("split"), home / f"{run.name}.png")
    (home / "rates.json").write_text(json.dumps(table, indent=1))
    for name, rate in table.items():
        print(f"{name:30s} {rate:12,.0f} tokens/s")


def measure_alone_in_a_process(recipe: Path) -> dict[str, float]:
    """So that this process never holds a GPU that a placement is to be measured on."""
    done = subprocess.run(
        [sys.executable, __file__, "--alone", str(recipe)], check=True, stdout=subprocess.PIPE, text=True
    )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


if __name__ == "__main__":
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(measure_alone(Path(sys.argv[2]))))
    elif sys.argv[1:2] == ["--make"]:
        make_target(Path(sys.argv[2]) / "target", SIZES[sys.argv[3]])
        make_data(Path(sys.argv[2]) / "data.jsonl", SIZES[sys.argv[3]])
    else:
        main()
