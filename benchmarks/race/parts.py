"""Steps of small Python tasks: which elements to keep, how to change them, what to return of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from topics import NAMES, phrases


@dataclass(frozen=True)
class Part:
    """One step of a task: its name in a function's name, its wording, and what it does to a value."""

    name: str
    wording: str
    apply: Callable[[Any], Any]


VOWELS = "aeiou"
WORDS = [name.lower() for name in NAMES] + phrases("""
level | noon | river | stone | apple | orange | civic | radar | music | window | Garden | Castle | tree | echo |
island | ocean | umbrella | yellow | summer | Winter | bee | moon | Kite | lamp | queen | violin | zebra | anna | idea
| under | Open | letter | balloon | coffee | street | little | Mississippi | banana | refer | solo
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
        (
            Part("largest", "the largest result, or None if there is none", lambda v: max(v, default=None)),
            "Optional[int]",
        ),
        (
            Part("smallest", "the smallest result, or None if there is none", lambda v: min(v, default=None)),
            "Optional[int]",
        ),
        (Part("count_distinct", "how many different results there are", lambda v: len(set(v))), "int"),
        (Part("list", "the results as a list, in their original order", list), "List[int]"),
        (Part("sorted", "the results sorted from small to large", sorted), "List[int]"),
        (Part("descending", "the results sorted from large to small", lambda v: sorted(v, reverse=True)), "List[int]"),
        (Part("reversed", "the results in reverse order", lambda v: v[::-1]), "List[int]"),
        (Part("unique", "the results without repetitions", lambda v: list(dict.fromkeys(v))), "List[int]"),
        (Part("running", "the running totals of the results", running_totals), "List[int]"),
        (
            Part(
                "spread",
                "the gap between the largest and the smallest result (0 if empty)",
                lambda v: max(v) - min(v) if v else 0,
            ),
            "int",
        ),
        (
            Part(
                "mean",
                "the mean of the results rounded to two decimals (0.0 if empty)",
                lambda v: round(sum(v) / len(v), 2) if v else 0.0,
            ),
            "float",
        ),
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
        Part(
            "double_letter",
            "have two equal letters in a row",
            lambda w: any(a == b for a, b in zip(w, w[1:], strict=False)),
        ),
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
        (
            Part("by_length", "them sorted by length, ties in the original order", lambda v: sorted(v, key=len)),
            "List[str]",
        ),
        (
            Part(
                "longest",
                "the longest one (the first of several), or an empty string",
                lambda v: max(v, key=len, default=""),
            ),
            "str",
        ),
        (Part("lengths", "the list of their lengths", lambda v: [len(w) for w in v]), "List[int]"),
        (Part("total_length", "the number of letters in all of them together", lambda v: sum(map(len, v))), "int"),
        (
            Part("length_table", "a dictionary from each of them to its length", lambda v: {w: len(w) for w in v}),
            "Dict[str, int]",
        ),
        (Part("distinct", "how many different ones there are", lambda v: len(set(v))), "int"),
    ]
