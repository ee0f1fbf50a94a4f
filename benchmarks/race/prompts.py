"""Write many prompts for the race: reasoning-gym generators, tasks about code, completions, open questions and chat.

    python benchmarks/race/prompts.py --out prompts.jsonl --count 60000 --seed 1 --exclude train.jsonl \
        --withhold held.jsonl mtbench.jsonl humaneval.jsonl

Needs `pip install reasoning-gym==0.1.25 chatterbot-corpus==1.3.3`. A row is {"messages": [one user turn], "source"}.
The same options, package versions and Python give the same bytes. Texts in the files of --exclude are left out.
--withhold (evaluation sets) is stricter: besides its texts it keeps out everything that shares ten words in a row with
them, generators' fixed wording aside, functions of the same name, and all that is made of a CodeI/O problem in them.
"""

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import functions
import questions
from generators import OTHER_GENERATORS, RACE_GENERATORS
from generators import questions as generator_questions
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

SHINGLE_WORDS = 10
PATIENCE = 3000  # prompts refused in a row after which a family counts as exhausted


@dataclass(frozen=True)
class Family:
    """One source of prompts with its share of the whole; `guarded`: compared with withheld texts by shingles."""

    source: str
    share: float
    prompts: Callable[[Random], Iterator[str]]
    guarded: bool = True


@dataclass
class Filter:
    """Decides which prompts stay and counts the others by reason; every text stays once."""

    tokens_of: Callable[[str], int]
    most_tokens: int
    seen: set[str] = field(default_factory=set)
    shingles: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)

    def reason(self, text: str, guarded: bool) -> str | None:
        """Why the text is refused, or None if it stays."""
        if plain(text) in self.seen:
            return "seen before or excluded"
        if guarded and (not self.shingles.isdisjoint(shingles_of(text)) or not self.names.isdisjoint(defined_in(text))):
            return "shares text with a withheld set"
        return "too long" if self.tokens_of(text) > self.most_tokens else None

    def keep(self, text: str, guarded: bool) -> bool:
        """Whether the text stays; remembers it if so."""
        refused = self.reason(text, guarded)
        if refused is not None:
            self.dropped[refused] += 1
            return False
        self.seen.add(plain(text))
        return True


def families(withheld: frozenset[str]) -> list[Family]:
    """All families; shares add up to one. Endless ones take over what finite ones lack."""
    race = [
        Family(f"rg:{name}", 0.31 / len(RACE_GENERATORS), partial(generator_questions, name), False)
        for name in RACE_GENERATORS
    ]
    more = [
        Family(f"rg:{name}", 0.03 / len(OTHER_GENERATORS), partial(generator_questions, name), False)
        for name in OTHER_GENERATORS
    ]
    return (
        race
        + more
        + [
            Family("codeio", 0.16, partial(functions.task_requests, withheld)),
            Family("codeio", 0.02, functions.composed_tasks),
            Family("code:question", 0.04, partial(functions.code_questions, withheld)),
            Family("code:request", 0.03, partial(functions.code_requests, withheld)),
            Family("code:complete", 0.12, partial(functions.completions, withheld)),
            Family("code:compose", 0.05, functions.composed_completions),
            Family("chat", 0.015, questions.utterances),
            Family("chat", 0.045, questions.short_chat),
            Family("open:writing", 0.04, questions.writing),
            Family("open:roleplay", 0.03, questions.roleplay),
            Family("open:explaining", 0.065, questions.explaining),
            Family("open:extraction", 0.02, questions.record_questions),
            Family("open:passage", 0.01, questions.passages),
            Family("open:reasoning", 0.02, questions.sums),
        ]
    )


def plain(text: str) -> str:
    """The text in lower case with single spaces: what counts as the same prompt."""
    return " ".join(text.lower().split())


def shingles_of(text: str) -> set[str]:
    """Every ten words in a row below the request's first line; a shorter text is its own shingle."""
    words = re.findall(r"\w+", text.lower().partition("\n\n")[2] or text.lower())
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in range(max(1, len(words) - SHINGLE_WORDS + 1))}


def defined_in(text: str) -> set[str]:
    """Names of the Python functions that a prompt defines."""
    return set(re.findall(r"^def (\w+)", text, flags=re.MULTILINE))


def requests_in(path: Path) -> Iterator[str]:
    """The first user turn of every row of a JSONL file."""
    with path.open(encoding="utf-8") as rows:
        for row in rows:
            yield json.loads(row)["messages"][0]["content"]


def take(family: Family, want: int, prompts: Iterator[str], sieve: Filter) -> list[str]:
    """Up to `want` prompts of a family; fewer if it ends or only repeats itself."""
    kept: list[str] = []
    refused = 0
    while len(kept) < want and refused < PATIENCE:
        text = next(prompts, None)
        if text is None:
            break
        stays = sieve.keep(text, family.guarded)
        refused = 0 if stays else refused + 1
        if stays:
            kept.append(text)
    return kept


def gather(count: int, seed: int, withheld: frozenset[str], sieve: Filter) -> list[tuple[str, str]]:
    """(source, text) pairs, `count` of them in random order; what a family lacks is shared out among the others."""
    opened = [(family, family.prompts(Random(f"{seed} {index}"))) for index, family in enumerate(families(withheld))]
    pairs: list[tuple[str, str]] = []
    while opened and len(pairs) < count:
        missing, total, going = count - len(pairs), sum(family.share for family, _ in opened), []
        for family, prompts in opened:
            want = min(max(1, round(missing * family.share / total)), count - len(pairs))
            kept = take(family, want, prompts, sieve)
            pairs += [(family.source, text) for text in kept]
            if len(kept) == want:
                going.append((family, prompts))
        opened = going
    Random(seed).shuffle(pairs)
    return pairs


def report(pairs: list[tuple[str, str]], dropped: Counter[str], tokens_of: Callable[[str], int]) -> None:
    """Print counts and mean prompt length per source, and what was dropped and why."""
    lengths: dict[str, list[int]] = {}
    for source, text in pairs:
        lengths.setdefault(source, []).append(tokens_of(text))
    table = Table("source", "prompts", "share", "mean tokens")
    for source in sorted(lengths, key=lambda name: (-len(lengths[name]), name)):
        own = lengths[source]
        table.add_row(source, f"{len(own):,}", f"{len(own) / len(pairs):.1%}", f"{sum(own) / len(own):.0f}")
    console = Console(width=100)
    console.print(
        table,
        f"{len(pairs):,} prompts; dropped: "
        + ", ".join(f"{name} {number:,}" for name, number in sorted(dropped.items())),
    )


def main() -> None:
    """Read the options, gather the prompts, write the rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--exclude", type=Path, nargs="+", default=[], help="JSONL files whose prompts are left out")
    parser.add_argument(
        "--withhold", type=Path, nargs="+", default=[], help="evaluation sets: no shared wording either"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--max-tokens", type=int, default=400, help="longest prompt, before the chat template")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    sieve = Filter(lambda text: len(tokenizer.tokenize(text)), options.max_tokens)
    for path in options.exclude + options.withhold:
        sieve.seen.update(map(plain, requests_in(path)))
    withheld = frozenset(text for path in options.withhold for text in requests_in(path))
    for text in withheld:
        sieve.shingles.update(shingles_of(text))
        sieve.names.update(defined_in(text))
    random.seed(options.seed)  # reasoning-gym's list_functions draws from the module's generator in places
    pairs = gather(options.count, options.seed, withheld, sieve)
    with options.out.open("w", encoding="utf-8") as out:
        for source, text in pairs:
            out.write(
                json.dumps({"messages": [{"role": "user", "content": text}], "source": source}, ensure_ascii=False)
                + "\n"
            )
    report(pairs, sieve.dropped, sieve.tokens_of)


if __name__ == "__main__":
    # Some generators iterate over sets of strings, whose order follows the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    main()
