"""Conversations about numbers: each question comes with a worked answer, one short step a line.

reasoning-gym's seeded generators choose the numbers of five kinds, this file's own draws the rest; every sentence is
written here. Products stay small (a factor of at most 12) so that a model of a few million parameters can learn them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from random import Random
from typing import Any

import reasoning_gym

Pair = tuple[str, str]  # prompt, answer

LEGS = {
    "chicken": 2, "duck": 2, "bird": 2, "dog": 4, "cat": 4, "cow": 4, "horse": 4, "lion": 4, "tiger": 4, "elephant": 4,
    "giraffe": 4, "starfish": 5, "ant": 6, "bee": 6, "beetle": 6, "cricket": 6, "grasshopper": 6, "wasp": 6,
    "spider": 8, "scorpion": 8, "crab": 10, "lobster": 10,
}  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def facts(name: str, seed: int, count: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """The metadata of `count` seeded items of one reasoning-gym generator."""
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=count, **settings)
    for index in range(count):
        yield dataset[index]["metadata"]


def listed(items: list[str]) -> str:
    """English enumeration: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def additions(seed: int, count: int) -> Iterator[Pair]:
    asking = Random(seed)
    for fact in facts("chain_sum", seed, count, min_terms=3, max_terms=4, min_digits=2, max_digits=2):
        first, *rest = fact["expression"].split()
        total, steps = int(first), [f"1. Start with {first}."]
        for step, (sign, term) in enumerate(zip(rest[::2], rest[1::2], strict=True), start=2):
            after = total + int(term) if sign == "+" else total - int(term)
            steps.append(f"{step}. {total} {sign} {term} = {after}.")
            total = after
            if total < 0:
                break
        if total < 0:
            continue
        question = asking.choice(("What is {}?", "Please work out {}.", "How much is {}?"))
        yield (
            question.format(fact["expression"]),
            "\n".join(["Let's go from left to right, one step at a time.", *steps, f"The answer is {total}."]),
        )


def legs(seed: int, count: int) -> Iterator[Pair]:
    asking = Random(seed)
    settings = {"min_animals": 2, "max_animals": 3, "min_instances": 2, "max_instances": 12}
    for fact in facts("leg_counting", seed, count * 3, **settings):
        animals = fact["animals"]
        if not set(animals) <= set(LEGS):
            continue
        herd = [f"{n} {name if name == 'starfish' else name + 's'}" for name, n in animals.items()]
        totals = [n * LEGS[name] for name, n in animals.items()]
        lines = [
            f"- {group} have {LEGS[name]} legs each: {n} × {LEGS[name]} = {n * LEGS[name]}."
            for group, (name, n) in zip(herd, animals.items(), strict=True)
        ]
        question = asking.choice(("How many legs do {} have in total?", "Count the legs of {}."))
        yield (
            question.format(listed(herd)),
            "\n".join(
                [
                    "Let's count the legs of each kind of animal.",
                    *lines,
                    f"Together that is {' + '.join(map(str, totals))} = {sum(totals)}.",
                    f"So there are {sum(totals)} legs in total.",
                ]
            ),
        )


def sorted_numbers(seed: int, count: int) -> Iterator[Pair]:
    settings = {"min_numbers": 4, "max_numbers": 6, "max_decimals": 0, "min_value": 1.0, "max_value": 99.0}
    for fact in facts("number_sorting", seed, count, **settings):
        numbers = [int(float(text)) for text in fact["original_numbers"]]
        if len(set(numbers)) < len(numbers):
            continue
        down = fact["direction"] == "descending"
        order = sorted(numbers, reverse=down)
        ends, pick = ("largest to smallest", "largest") if down else ("smallest to largest", "smallest")
        steps = [f"{place}. {number}" for place, number in enumerate(order, start=1)]
        yield (
            f"Sort these numbers from {ends}: {', '.join(map(str, numbers))}.",
            "\n".join(
                [
                    f"Let's take the {pick} number first, then the next one, until none is left.",
                    *steps,
                    f"Sorted from {ends}, the numbers are {listed([str(n) for n in order])}.",
                ]
            ),
        )


def filtered_numbers(seed: int, count: int) -> Iterator[Pair]:
    settings = {"min_numbers": 4, "max_numbers": 6, "max_decimals": 0, "min_value": 1.0, "max_value": 99.0}
    for fact in facts("number_filtering", seed, count, **settings):
        numbers, limit = [int(text) for text in fact["original_numbers"]], int(fact["filter_value"])
        if limit in numbers or len(set(numbers)) < len(numbers):
            continue
        word = "larger" if "larger" in fact["operation"] else "smaller"
        kept = [str(n) for n in numbers if (n > limit) == (word == "larger")]
        lines = [f"- {n} is {'larger' if n > limit else 'smaller'} than {limit}." for n in numbers]
        found = {0: f"None of the numbers is {word} than {limit}.", 1: f"Only {listed(kept or [''])} is {word}."}
        last = found.get(len(kept), f"So the numbers {word} than {limit} are {listed(kept)}.")
        yield (
            f"Which of these numbers are {word} than {limit}: {', '.join(map(str, numbers))}?",
            "\n".join([f"Let's compare each number with {limit}.", *lines, last]),
        )


def weekdays(seed: int, count: int) -> Iterator[Pair]:
    for fact in facts("calendar_arithmetic", seed, count, tasks=["weekday_offset"], offset_upper_bound=80):
        start = date.fromisoformat(fact["start_date"])
        today = start.weekday()
        days = abs(fact["offset_days"])
        forward = fact["offset_days"] > 0
        if days < 8:
            continue
        weeks, rest = divmod(days, 7)
        left = "1 day" if rest == 1 else f"{rest} days"
        then = WEEKDAYS[(today + fact["offset_days"]) % 7]
        when = f"will it be in {days} days" if forward else f"was it {days} days ago"
        yield (
            f"Today is {WEEKDAYS[today]}, {start:%B} {start.day}. What day of the week {when}?",
            "\n".join(
                [
                    "A week has 7 days, so whole weeks do not change the day.",
                    f"1. {days} = {weeks} × 7 + {rest}, so {left} {'is' if rest == 1 else 'are'} left over.",
                    f"2. Counting {left} {'forward' if forward else 'back'} from {WEEKDAYS[today]} gives {then}.",
                    f"So it {'will be' if forward else 'was'} a {then}.",
                ]
            ),
        )


def sequences(seed: int, count: int) -> Iterator[Pair]:
    rng = Random(seed)
    for _ in range(count):
        step, length, falling = rng.randint(2, 12), rng.randint(4, 5), rng.random() < 0.3
        start = rng.randint(60, 160) if falling else rng.randint(1, 99)
        terms = [start + (-step if falling else step) * index for index in range(length + 1)]
        pairs = zip(terms[:-2], terms[1:-1], strict=True)
        lines = [f"- From {a} to {b} is {'down' if falling else 'up'} {step}." for a, b in pairs]
        sign, change = ("-", "less") if falling else ("+", "more")
        yield (
            f"Which number comes next: {', '.join(map(str, terms[:-1]))}?",
            "\n".join(
                [
                    "Let's look at the steps between the numbers.",
                    *lines,
                    f"Each number is {step} {change} than the one before.",
                    f"So the next number is {terms[-2]} {sign} {step} = {terms[-1]}.",
                ]
            ),
        )
