"""Write the tiny target's corpus and the quickstart prompts, deterministic by seed.

    python scripts/tiny_target/corpus.py --out build/corpus --prompts src/draftline/assets/prompts --seed 1

Needs `pip install reasoning-gym==0.1.25` (Apache-2.0). Writes OUT/train.jsonl and OUT/held_out.jsonl (whole
conversations) and PROMPTS/train.jsonl and PROMPTS/held_out.jsonl (the user's side only). No prompt text is in two of
the sets: the corpus, the training prompts and the held-out prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import calculation
import everyday
import stories

Pair = tuple[str, str]  # prompt, answer
SOURCES = [
    {
        "name": "reasoning-gym 0.1.25",
        "licence": "Apache-2.0",
        "use": "seeded generators chain_sum, leg_counting, number_sorting, number_filtering and calendar_arithmetic "
        "choose the numbers, animals and dates; none of its wording is used",
    },
    {
        "name": "scripts/tiny_target",
        "licence": "Apache-2.0",
        "use": "every sentence, written for draftline",
    },
]
VALIDATION_PER_KIND = 100  # whole conversations kept out of the training corpus to measure the target on


@dataclass(frozen=True)
class Kind:
    """A kind of conversation: how it is made, how often it is drawn, and how many of the prompts are of it."""

    make: Callable[[int, int], Iterator[Pair]]  # seed, count -> at most that many pairs
    draws: int
    train_prompts: int = 24
    held_out_prompts: int = 4


KINDS = {
    "word_problem": Kind(everyday.drawn(stories.word_problem), 46_000, train_prompts=56),
    "addition": Kind(calculation.additions, 26_000),
    "leg_counting": Kind(calculation.legs, 14_000),
    "number_sorting": Kind(calculation.sorted_numbers, 14_000),
    "number_filtering": Kind(calculation.filtered_numbers, 14_000),
    "weekday": Kind(calculation.weekdays, 14_000),
    "sequence": Kind(calculation.sequences, 14_000),
    "word_sorting": Kind(everyday.drawn(everyday.sorted_words), 14_000),
    "packing_list": Kind(everyday.drawn(everyday.packing_list), 7_000),
    "recipe": Kind(everyday.drawn(everyday.recipe), 7_000),
    "day_plan": Kind(everyday.drawn(everyday.day_plan), 7_000),
    "thank_you_note": Kind(everyday.drawn(everyday.thank_you_note), 7_000),
}


def conversation(kind: str, pair: Pair) -> dict[str, Any]:
    user, assistant = ({"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True))
    return {"messages": [user, assistant], "source": kind}


def prompt_of(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


def split(name: str, kind: Kind, seed: int) -> dict[str, list[dict[str, Any]]]:
    """One kind's distinct conversations, dealt to the four sets."""
    distinct = dict(kind.make(seed, kind.draws))  # the answer is a function of the prompt
    rows = [conversation(name, pair) for pair in distinct.items()]
    Random(seed).shuffle(rows)
    cuts = [kind.held_out_prompts, kind.train_prompts, VALIDATION_PER_KIND]
    sets: dict[str, list[dict[str, Any]]] = {}
    for part, count in zip(("held_out_prompts", "train_prompts", "held_out"), cuts, strict=True):
        sets[part], rows = rows[:count], rows[count:]
    return sets | {"train": rows}


def build(seed: int) -> dict[str, list[dict[str, Any]]]:
    """All kinds together, shuffled. Raises AssertionError when a prompt is in two sets."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for offset, (name, kind) in enumerate(KINDS.items()):
        for part, rows in split(name, kind, seed * 1_000_000_007 + offset * 10_000_019).items():
            sets.setdefault(part, []).extend(rows)
    for part, rows in sets.items():
        Random(seed).shuffle(rows)
        print(f"{part}: {len(rows):,} conversations")
    prompts = [prompt_of(row) for rows in sets.values() for row in rows]
    assert len(prompts) == len(set(prompts)), "a prompt text is in two sets"
    return sets


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="write the tiny target's corpus and the quickstart prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--prompts", type=Path, required=True, help="folder for the prompts")
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    sets = build(options.seed)
    for part in ("train", "held_out"):
        write(options.out / f"{part}.jsonl", sets[part])
        asked = [row | {"messages": row["messages"][:1]} for row in sets[f"{part}_prompts"]]
        write(options.prompts / f"{part}.jsonl", asked)
    record = {"seed": options.seed, "kinds": list(KINDS), "sources": SOURCES}  # goes into the target's provenance.json
    (options.out / "corpus.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
