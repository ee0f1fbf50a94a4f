"""Small Python tasks composed of parts (keep, change, reduce), with examples that are computed, not written.

A task is a sentence in plain words and a function that does what the sentence says, so every example in a prompt is right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from topics import NAMES, phrases


@dataclass(frozen=True)
class Part:
    """One step of a task: its name in a function's name, its wording, and what it does to a value."""

    name: str
    wording: str
    apply: Callable[[Any], Any]


@dataclass(frozen=True)
class Task:
    """A composed task: a function name, its one argument, the annotations, what to do, and the function itself."""

    name: str
    argument: str
    annotations: tuple[str, str]
    wording: str
    solve: Callable[[Any], Any]
    sample: Callable[[Random], Any]


VOWELS = "aeiou"
WORDS = [name.lower() for name in NAMES] + phrases("""
level | noon | river | stone | apple | orange | civic | radar | music | window | Garden | Castle | tree | echo | island | ocean | umbrella | yellow | summer | Winter |
bee | moon | Kite | lamp | queen | violin | zebra | anna | idea | under | Open | letter | balloon | coffee | street | little | Mississippi | banana | refer | solo
""")


def is_prime(number: int) -> bool:
    """Whether `number` has exactly two divisors."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def digit_sum(number: int) -> int:
    """Sum of the decimal digits, the sign left aside."""
    return sum(int(digit) for digit in str(abs(number)))


def running_totals(values: list[int]) -> list[int]:
    """Sums of the first one, two, three ... values."""
    return [sum(values[: end + 1]) for end in range(len(values))]


def number_filters(k: int) -> list[Part]:
    """Predicates over one integer, some of them with the constant `k`."""
    return [
        Part("even", "are even", lambda x: x % 2 == 0),
        Part("odd", "are odd", lambda x: x % 2 == 1),
        Part("positive", "are greater than zero", lambda x: x > 0),
        Part("negative", "lie below zero", lambda x: x < 0),
        Part(f"above_{k}", f"are larger than {k}", lambda x: x > k),
        Part(f"below_{k}", f"are smaller than {k}", lambda x: x < k),
        Part(f"multiples_of_{k}", f"can be divided by {k} without a remainder", lambda x: x % k == 0),
        Part(f"not_multiples_of_{k}", f"leave a remainder when divided by {k}", lambda x: x % k != 0),
        Part("prime", "are prime", is_prime),
        Part("composite", "are greater than one and not prime", lambda x: x > 1 and not is_prime(x)),
        Part("one_digit", "have a single digit", lambda x: abs(x) < 10),
        Part("two_digit", "have exactly two digits", lambda x: 9 < abs(x) < 100),
        Part("square", "are perfect squares", lambda x: x >= 0 and int(x**0.5 + 0.5) ** 2 == x),
        Part(f"ending_in_{k}", f"end with the digit {k}", lambda x: abs(x) % 10 == k),
        Part("even_digit_sum", "have digits that add up to an even number", lambda x: digit_sum(x) % 2 == 0),
    ]


def number_changes(k: int) -> list[Part]:
    """Maps of one integer, some of them with the constant `k`."""
    return [
        Part("squared", "square each of them", lambda x: x * x),
        Part("cubed", "raise each of them to the third power", lambda x: x**3),
        Part("doubled", "double each of them", lambda x: 2 * x),
        Part("absolute", "drop their signs", abs),
        Part("negated", "flip the sign of each", lambda x: -x),
        Part(f"plus_{k}", f"add {k} to each of them", lambda x: x + k),
        Part(f"minus_{k}", f"subtract {k} from each of them", lambda x: x - k),
        Part(f"times_{k}", f"multiply each of them by {k}", lambda x: x * k),
        Part(f"modulo_{k}", f"replace each by its remainder after division by {k}", lambda x: x % k),
        Part("digit_sum", "replace each by the sum of its digits", digit_sum),
        Part("halved", "halve each of them, rounding down", lambda x: x // 2),
        Part("bits", "replace each by the number of ones in its binary form", lambda x: bin(abs(x)).count("1")),
        Part("unchanged", "leave them as they are", lambda x: x),
    ]


def number_reductions() -> list[tuple[Part, str]]:
    """What is returned of a list of integers, with the annotation of the result; none fails on an empty list."""
    return [
        (Part("sum", "the sum of the results", sum), "int"),
        (Part("largest", "the largest result, or None if there is none", lambda v: max(v, default=None)), "Optional[int]"),
        (Part("smallest", "the smallest result, or None if there is none", lambda v: min(v, default=None)), "Optional[int]"),
        (Part("count_distinct", "how many different results there are", lambda v: len(set(v))), "int"),
        (Part("list", "the results as a list, in their original order", list), "List[int]"),
        (Part("sorted", "the results sorted from small to large", sorted), "List[int]"),
        (Part("descending", "the results sorted from large to small", lambda v: sorted(v, reverse=True)), "List[int]"),
        (Part("reversed", "the results in reverse order", lambda v: v[::-1]), "List[int]"),
        (Part("unique", "the results without repetitions", lambda v: list(dict.fromkeys(v))), "List[int]"),
        (Part("running", "the running totals of the results", running_totals), "List[int]"),
        (Part("spread", "the gap between the largest and the smallest result (0 if empty)",
              lambda v: max(v) - min(v) if v else 0), "int"),
        (Part("mean", "the mean of the results rounded to two decimals (0.0 if empty)",
              lambda v: round(sum(v) / len(v), 2) if v else 0.0), "float"),
        (Part("text", "the results joined by hyphens in one string", lambda v: "-".join(map(str, v))), "str"),
        (Part("any_repeated", "True if some result occurs more than once", lambda v: len(set(v)) < len(v)), "bool"),
        (Part("ascending_check", "True if the results never decrease", lambda v: v == sorted(v)), "bool"),
    ]


def word_filters(k: int, letter: str) -> list[Part]:
    """Predicates over one word, some with a length `k` or a `letter`."""
    return [
        Part(f"longer_than_{k}", f"have more than {k} letters", lambda w: len(w) > k),
        Part(f"up_to_{k}", f"have at most {k} letters", lambda w: len(w) <= k),
        Part("vowel_first", "begin with a vowel", lambda w: w[0].lower() in VOWELS),
        Part("consonant_first", "begin with a consonant", lambda w: w[0].lower() not in VOWELS),
        Part(f"with_{letter}", f'contain the letter "{letter}"', lambda w: letter in w.lower()),
        Part(f"without_{letter}", f'do not contain the letter "{letter}"', lambda w: letter not in w.lower()),
        Part("palindromes", "are the same when read backwards", lambda w: w.lower() == w.lower()[::-1]),
        Part("capitalised", "start with a capital letter", lambda w: w[0].isupper()),
        Part("isograms", "use no letter twice", lambda w: len(set(w.lower())) == len(w)),
        Part("even_length", "have an even number of letters", lambda w: len(w) % 2 == 0),
        Part("double_letter", "have two equal letters in a row",
             lambda w: any(a == b for a, b in zip(w, w[1:], strict=False))),
    ]


def word_changes(letter: str) -> list[Part]:
    """Maps of one word to a word."""
    return [
        Part("upper", "turn them into upper case", str.upper),
        Part("lower", "turn them into lower case", str.lower),
        Part("backwards", "spell each of them backwards", lambda w: w[::-1]),
        Part("initials", "keep only their first letters", lambda w: w[0]),
        Part("last_letters", "keep only their last letters", lambda w: w[-1]),
        Part("no_vowels", "take the vowels out of each", lambda w: "".join(c for c in w if c.lower() not in VOWELS)),
        Part("stuttered", "write every letter twice", lambda w: "".join(c * 2 for c in w)),
        Part("rotated", "move the first letter of each to its end", lambda w: w[1:] + w[0]),
        Part("letters_sorted", "put the letters of each in alphabetical order", lambda w: "".join(sorted(w))),
        Part(f"ending_{letter}", f'append the letter "{letter}" to each', lambda w: w + letter),
        Part("swapped", "swap upper and lower case", str.swapcase),
        Part("as_is", "leave them unchanged", str),
    ]


def word_reductions() -> list[tuple[Part, str]]:
    """What is returned of a list of words, with the annotation of the result."""
    return [
        (Part("list", "them as a list", list), "List[str]"),
        (Part("sentence", "them joined by single spaces", " ".join), "str"),
        (Part("joined", "them joined without anything in between", "".join), "str"),
        (Part("sorted", "them in alphabetical order", sorted), "List[str]"),
        (Part("by_length", "them sorted by length, ties in the original order", lambda v: sorted(v, key=len)), "List[str]"),
        (Part("longest", "the longest one (the first of several), or an empty string",
              lambda v: max(v, key=len, default="")), "str"),
        (Part("lengths", "the list of their lengths", lambda v: [len(w) for w in v]), "List[int]"),
        (Part("total_length", "the number of letters in all of them together", lambda v: sum(map(len, v))), "int"),
        (Part("length_table", "a dictionary from each of them to its length", lambda v: {w: len(w) for w in v}), "Dict[str, int]"),
        (Part("distinct", "how many different ones there are", lambda v: len(set(v))), "int"),
    ]


def number_task(rng: Random) -> Task:
    """A task over a list of integers."""
    k = rng.randint(2, 9)
    keep, change = rng.choice(number_filters(k)), rng.choice(number_changes(rng.randint(2, 9)))
    reduce, returned = rng.choice(number_reductions())
    argument = rng.choice(["values", "numbers", "xs", "items", "data", "readings", "scores", "nums"])
    wording = rng.choice([
        f"Take the numbers in {argument} that {keep.wording}, {change.wording}, and return {reduce.wording}.",
        f"From the list {argument} keep only the integers that {keep.wording}. Then {change.wording}. Return {reduce.wording}.",
        f"Given a list of integers, look at those that {keep.wording}; {change.wording} and give back {reduce.wording}.",
        f"Ignore every element of {argument} unless it is among those that {keep.wording}. Of the others, {change.wording}. "
        f"The function returns {reduce.wording}.",
    ])
    name = "_".join(rng.sample([keep.name, change.name, reduce.name], 3)) if rng.random() < 0.4 else f"{reduce.name}_{keep.name}_{change.name}"
    low = rng.choice([-20, 0, 1])
    return Task(
        name, argument, ("List[int]", returned), wording,
        lambda values: reduce.apply([change.apply(value) for value in values if keep.apply(value)]),
        lambda r: [r.randint(low, r.choice([12, 40, 120])) for _ in range(r.randint(3, 7))],
    )


def word_task(rng: Random) -> Task:
    """A task over a list of words, or over the words of a sentence."""
    keep, change = rng.choice(word_filters(rng.randint(3, 6), rng.choice("aeionrst"))), rng.choice(word_changes(rng.choice("sxyz")))
    reduce, returned = rng.choice(word_reductions())
    whole = rng.random() < 0.4
    argument = rng.choice(["text", "sentence", "line", "phrase"] if whole else ["words", "names", "strings", "tokens"])
    origin = f"the words of the string {argument} (separated by spaces)" if whole else f"the strings in the list {argument}"
    wording = rng.choice([
        f"Take {origin} that {keep.wording}, {change.wording}, and return {reduce.wording}.",
        f"Among {origin}, choose those that {keep.wording}. Next, {change.wording}. Return {reduce.wording}.",
        f"Look at {origin}. Those that {keep.wording} are kept; {change.wording} and return {reduce.wording}.",
    ])

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
        f"{argument} is a list of rows of equal length. In every {line}, take all numbers, {change.wording}, and compute "
        f"{inner.wording}. Then treat these values, one per {line}, as the results and return {outer.wording}."
    )

    def solve(grid: Any) -> Any:
        lines = [list(column) for column in zip(*grid, strict=True)] if columns else grid
        return outer.apply([inner.apply([change.apply(value) for value in one]) for one in lines])

    def sample(r: Random) -> Any:
        width = r.randint(2, 3)
        return [[r.randint(-9, 20) for _ in range(width)] for _ in range(r.randint(2, 3))]

    return Task(f"{line}_{inner.name}_{change.name}_{outer.name}", argument, ("List[List[int]]", returned), wording, solve, sample)


def tasks(rng: Random) -> Iterator[Task]:
    """Endless tasks: half over numbers, the others over words and grids."""
    while True:
        yield rng.choice([number_task, number_task, word_task, word_task, grid_task])(rng)


def examples(task: Task, rng: Random) -> str:
    """Two to four worked calls, in one of the notations that docstrings use."""
    style = rng.choice([">>> {call}\n{result}", ">>> {call}\n{result}", "{call} == {result}", "{call} -> {result}", "{call} ➞ {result}"])
    calls = [task.sample(rng) for _ in range(rng.randint(2, 4))]
    return "\n".join(style.format(call=f"{task.name}({given!r})", result=repr(task.solve(given))) for given in calls)


def stub(task: Task, rng: Random) -> str:
    """The head of a Python function for the task: imports, signature, docstring with examples."""
    typed = rng.random() < 0.6
    given, returned = task.annotations
    names = [name for name in ("Dict", "List", "Optional") if name in given + returned]
    lead = f"from typing import {', '.join(names)}\n\n\n" if typed and names else rng.choice(["\n", "\n\n"])
    head = f"def {task.name}({task.argument}: {given}) -> {returned}:" if typed else f"def {task.name}({task.argument}):"
    body = task.wording + rng.choice(["\n", "\n\n", "\n\nExamples:\n", "\nFor example:\n"]) + examples(task, rng)
    quotes = rng.choice(['"""', '"""', '"""', "'''"])
    text = rng.choice(["", " ", "\n"]) + body + "\n" + quotes
    return f"{lead}{head}\n    {quotes}" + text.replace("\n", "\n    ")
