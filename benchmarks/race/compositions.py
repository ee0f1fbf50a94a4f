"""Small Python tasks composed of parts (keep, change, reduce), with examples that are computed, not written.

A task is a sentence in plain words and a function that does what it says, so every example in a prompt is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from parts import (
    WORDS,
    number_changes,
    number_filters,
    number_reductions,
    word_changes,
    word_filters,
    word_reductions,
)


@dataclass(frozen=True)
class Task:
    """A composed task: a function name, its one argument, the annotations, what to do, and the function itself."""

    name: str
    argument: str
    annotations: tuple[str, str]
    wording: str
    solve: Callable[[Any], Any]
    sample: Callable[[Random], Any]


def number_task(rng: Random) -> Task:
    """A task over a list of integers."""
    k = rng.randint(2, 9)
    keep, change = rng.choice(number_filters(k)), rng.choice(number_changes(rng.randint(2, 9)))
    reduce, returned = rng.choice(number_reductions())
    argument = rng.choice(["values", "numbers", "xs", "items", "data", "readings", "scores", "nums"])
    wording = rng.choice(
        [
            f"Take the numbers in {argument} that {keep.wording}, {change.wording}, and return {reduce.wording}.",
            f"From the list {argument} keep only the integers that {keep.wording}. "
            f"Then {change.wording}. Return {reduce.wording}.",
            f"Given a list of integers, look at those that {keep.wording}; "
            f"{change.wording} and give back {reduce.wording}.",
            f"Ignore every element of {argument} unless it is among those that {keep.wording}. "
            f"Of the others, {change.wording}. "
            f"The function returns {reduce.wording}.",
        ]
    )
    name = (
        "_".join(rng.sample([keep.name, change.name, reduce.name], 3))
        if rng.random() < 0.4
        else f"{reduce.name}_{keep.name}_{change.name}"
    )
    low = rng.choice([-20, 0, 1])
    return Task(
        name,
        argument,
        ("List[int]", returned),
        wording,
        lambda values: reduce.apply([change.apply(value) for value in values if keep.apply(value)]),
        lambda r: [r.randint(low, r.choice([12, 40, 120])) for _ in range(r.randint(3, 7))],
    )


def word_task(rng: Random) -> Task:
    """A task over a list of words, or over the words of a sentence."""
    keep, change = (
        rng.choice(word_filters(rng.randint(3, 6), rng.choice("aeionrst"))),
        rng.choice(word_changes(rng.choice("sxyz"))),
    )
    reduce, returned = rng.choice(word_reductions())
    whole = rng.random() < 0.4
    argument = rng.choice(["text", "sentence", "line", "phrase"] if whole else ["words", "names", "strings", "tokens"])
    origin = (
        f"the words of the string {argument} (separated by spaces)" if whole else f"the strings in the list {argument}"
    )
    wording = rng.choice(
        [
            f"Take {origin} that {keep.wording}, {change.wording}, and return {reduce.wording}.",
            f"Among {origin}, choose those that {keep.wording}. Next, {change.wording}. Return {reduce.wording}.",
            f"Look at {origin}. Those that {keep.wording} are kept; {change.wording} and return {reduce.wording}.",
        ]
    )

    def solve(given: Any) -> Any:
        words = given.split() if whole else given
        return reduce.apply([change.apply(word) for word in words if keep.apply(word)])

    def sample(r: Random) -> Any:
        words = r.sample(WORDS, r.randint(2, 5))
        return " ".join(words) if whole else words

    name = f"{keep.name}_{rng.choice(['words', change.name])}_{reduce.name}"
    return Task(name, argument, ("str" if whole else "List[str]", returned), wording, solve, sample)


def grid_task(rng: Random) -> Task:
    """A task over the rows or columns of a rectangular grid of integers."""
    inner, _ = rng.choice([pair for pair in number_reductions() if pair[1] in ("int", "Optional[int]")])
    outer, returned = rng.choice(number_reductions())
    change = rng.choice(number_changes(rng.randint(2, 9)))
    columns = rng.random() < 0.5
    argument, line = rng.choice(["grid", "matrix", "table", "rows"]), "column" if columns else "row"
    wording = (
        f"{argument} is a list of rows of equal length. In every {line}, take all numbers, {change.wording}, "
        "and compute "
        f"{inner.wording}. Then treat these values, one per {line}, as the results and return {outer.wording}."
    )

    def solve(grid: Any) -> Any:
        lines = [list(column) for column in zip(*grid, strict=True)] if columns else grid
        return outer.apply([inner.apply([change.apply(value) for value in one]) for one in lines])

    def sample(r: Random) -> Any:
        width = r.randint(2, 3)
        return [[r.randint(-9, 20) for _ in range(width)] for _ in range(r.randint(2, 3))]

    return Task(
        f"{line}_{inner.name}_{change.name}_{outer.name}",
        argument,
        ("List[List[int]]", returned),
        wording,
        solve,
        sample,
    )


def tasks(rng: Random) -> Iterator[Task]:
    """Endless tasks: half over numbers, the others over words and grids."""
    while True:
        yield rng.choice([number_task, number_task, word_task, word_task, grid_task])(rng)


def examples(task: Task, rng: Random) -> str:
    """Two to four worked calls, in one of the notations that docstrings use."""
    style = rng.choice(
        [
            ">>> {call}\n{result}",
            ">>> {call}\n{result}",
            "{call} == {result}",
            "{call} -> {result}",
            "{call} ➞ {result}",
        ]
    )
    calls = [task.sample(rng) for _ in range(rng.randint(2, 4))]
    return "\n".join(style.format(call=f"{task.name}({given!r})", result=repr(task.solve(given))) for given in calls)


def stub(task: Task, rng: Random) -> str:
    """The head of a Python function for the task: imports, signature, docstring with examples."""
    typed = rng.random() < 0.6
    given, returned = task.annotations
    names = [name for name in ("Dict", "List", "Optional") if name in given + returned]
    lead = f"from typing import {', '.join(names)}\n\n\n" if typed and names else rng.choice(["\n", "\n\n"])
    head = (
        f"def {task.name}({task.argument}: {given}) -> {returned}:" if typed else f"def {task.name}({task.argument}):"
    )
    body = task.wording + rng.choice(["\n", "\n\n", "\n\nExamples:\n", "\nFor example:\n"]) + examples(task, rng)
    quotes = rng.choice(['"""', '"""', '"""', "'''"])
    text = rng.choice(["", " ", "\n"]) + body + "\n" + quotes
    return f"{lead}{head}\n    {quotes}" + text.replace("\n", "\n    ")
