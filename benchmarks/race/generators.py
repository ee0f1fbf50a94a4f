"""Prompts from reasoning-gym's generators, each in its own wording at its default difficulty."""

from collections.abc import Iterator
from random import Random

import reasoning_gym

# Those of the race's training rows ...
RACE_GENERATORS = [
    "base_conversion",
    "basic_arithmetic",
    "bitwise_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "complex_arithmetic",
    "count_primes",
    "decimal_arithmetic",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "group_anagrams",
    "gsm_symbolic",
    "isomorphic_strings",
    "knights_knaves",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_filtering",
    "number_sequence",
    "number_sorting",
    "palindrome_generation",
    "polynomial_equations",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "sentence_reordering",
    "simple_equations",
    "spell_backward",
    "string_manipulation",
    "syllogism",
    "time_intervals",
    "word_ladder",
    "word_sorting",
]
# ... and more of them whose questions are plain text: maths and reasoning for the open sets.
OTHER_GENERATORS = [
    "advanced_geometry",
    "aiw",
    "coin_flip",
    "count_bits",
    "decimal_chain_sum",
    "dice",
    "letter_jumble",
    "list_functions",
    "needle_haystack",
    "number_format",
    "polynomial_multiplication",
    "ransom_note",
    "simple_geometry",
    "simple_integration",
    "string_insertion",
    "word_sequence_reversal",
]
BATCH_ROWS = 100


def questions(name: str, rng: Random) -> Iterator[str]:
    """Endless questions of one generator, from seeds drawn of `rng`."""
    while True:
        rows = reasoning_gym.create_dataset(name, seed=rng.getrandbits(31), size=BATCH_ROWS)
        yield from (rows[index]["question"] for index in range(BATCH_ROWS))
