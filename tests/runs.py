"""A small run for tests of the verbs: a random target, a few conversations, a recipe of eight steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from builders import save_target

STEPS = 8


def write_rows(path: Path, count: int = 24, shift: int = 0) -> Path:
    with path.open("w") as file:
        for i in range(count):
            answer = " ".join(f"w{(i + j + shift) % 11}" for j in range(4 + i % 5))
            messages = [
                {"role": "user", "content": f"w{i % 11} w{i * 3 % 11}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_recipe(home: Path, **sections: dict[str, object]) -> Path:
    """Recipe of a run in home/run on home/target and home/data.jsonl, both of which it makes if they are not there."""
    if not (home / "target").exists():
        save_target(home / "target")
    if not (home / "data.jsonl").exists():
        write_rows(home / "data.jsonl")
    tree: dict[str, dict[str, object]] = {
        "target": {"path": str(home / "target")},
        "data": {"train": str(home / "data.jsonl"), "sequence_length": 32},
        "drafter": {"layers": 1, "block_size": 8, "taps": [0, 2]},
        "train": {
            "out": str(home / "run"), "epochs": 3, "max_steps": STEPS, "rows_per_step": 4, "rows_per_micro_batch": 2,
            "anchors": 6, "checkpoint_every": 4,
        },
    }  # fmt: skip
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def checkpoint_names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def tensors_of(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("drafter", "optimizer"):
        for key, value in load_file(checkpoint / f"{name}.safetensors").items():
            yield f"{name}: {key}", value


def assert_same_bits(one: Path, other: Path) -> None:
    """Drafter and optimizer tensors of two checkpoints, bit for bit."""
    left, right = dict(tensors_of(one)), dict(tensors_of(other))
    assert len(left) > 40 and left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
