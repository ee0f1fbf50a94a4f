"""Conversations about everyday things. Every sentence and word list here was written for this project.

An answer is a function of its prompt (no free choices), which is what makes the trained target sharp: it can know every
next token, and a drafter can learn to foresee it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

Pair = tuple[str, str]  # prompt, answer

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo",
    "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Tom", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
NOUNS = (
    "apple", "anchor", "arrow", "basket", "bell", "bridge", "button", "candle", "castle", "chair", "cloud", "clock",
    "desk", "dolphin", "drum", "eagle", "engine", "feather", "fern", "field", "forest", "garden", "glove", "guitar",
    "hammer", "harbour", "honey", "island", "jacket", "jungle", "kettle", "kite", "ladder", "lamp", "lemon", "letter",
    "magnet", "mirror", "moon", "nest", "needle", "ocean", "orange", "owl", "paper", "pencil", "piano", "planet",
    "queen", "quilt", "rabbit", "river", "rocket", "sailor", "shell", "silver", "star", "table", "tiger", "train",
    "umbrella", "valley", "violin", "wagon", "water", "window", "winter", "yard", "yellow", "zebra",
)  # fmt: skip
PLACES = {
    "at the lake": ("swimming things and a towel", "a small boat pump"),
    "in the mountains": ("strong walking boots", "a map of the paths"),
    "by the sea": ("sun cream and a wide hat", "a bucket for shells"),
    "in the city": ("comfortable shoes", "tickets for the museum"),
    "on a farm": ("rubber boots", "old clothes for the stable"),
    "in the forest": ("a tent and a sleeping bag", "a bright torch"),
    "on an island": ("a snorkel and a mask", "the times of the ferry"),
    "in the desert": ("three large bottles of water", "a scarf against the dust"),
}
SEASONS = {
    "spring": ("a light jacket", "an umbrella"),
    "summer": ("two thin shirts", "a pair of sunglasses"),
    "autumn": ("a warm jumper", "a raincoat"),
    "winter": ("a thick coat", "gloves and a woollen hat"),
}
HOBBIES = {
    "painting": ("paint a picture of the garden", "a box of paints"),
    "chess": ("play two games of chess", "a travel chess set"),
    "reading": ("read a good book by the window", "two good books"),
    "cooking": ("cook a new dish for the family", "a notebook for recipes"),
    "swimming": ("swim twenty lengths in the pool", "a pair of goggles"),
    "music": ("practise some songs on the piano", "a pair of headphones"),
    "cycling": ("ride along the river", "a bicycle helmet"),
    "gardening": ("plant flowers behind the house", "a pair of garden gloves"),
    "photography": ("take photos of old buildings", "a camera and a spare battery"),
    "football": ("play football in the park", "a ball and a small pump"),
    "dancing": ("dance with friends at the club", "a pair of dancing shoes"),
    "birdwatching": ("look for birds in the woods", "a pair of binoculars"),
}
FILLINGS = ("cheese", "tomato", "cucumber", "egg", "ham", "tuna", "avocado", "lettuce", "onion", "chicken", "apple")
BREADS = ("white bread", "brown bread", "rye bread", "toast", "corn bread")
SPREADS = ("butter", "mustard", "cream cheese", "pesto", "mayonnaise", "hummus")
VEGETABLES = (
    "carrots", "potatoes", "leeks", "beans", "peas", "mushrooms", "peppers", "pumpkin", "spinach", "lentils", "celery",
)  # fmt: skip
HERBS = ("parsley", "basil", "thyme", "chives", "mint", "dill")
GIFTS = {
    "scarf": "I wear it every morning on my way to work",
    "teapot": "I used it at once and made tea for the whole family",
    "book": "I started to read it last night and could not stop",
    "plant": "It stands by the kitchen window and likes the sun there",
    "lamp": "It gives my desk a soft and friendly light",
    "clock": "It hangs in the hall, and now nobody is late",
    "puzzle": "We sat around it for hours on Sunday",
    "blanket": "It keeps me warm when I read on the sofa",
    "vase": "I have already filled it with flowers from the garden",
    "cake": "We shared it after dinner, and not a crumb was left",
}
LOOKS = {
    "blue": "Blue is my favourite colour",
    "red": "The red looks bright and cheerful",
    "green": "The green reminds me of the forest",
    "small": "It is small, but it means a lot to me",
    "large": "It is so large that everybody sees it at once",
    "lovely": "You always find such lovely things",
    "handmade": "I can see how much work went into it",
    "old-fashioned": "It looks just like the one my grandmother had",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def drawn(make: Callable[[Random], Pair]) -> Callable[[int, int], Iterator[Pair]]:
    """A kind of conversation from a function that makes one of them."""

    def pairs(seed: int, count: int) -> Iterator[Pair]:
        rng = Random(seed)
        for _ in range(count):
            yield make(rng)

    return pairs


def sorted_words(rng: Random) -> Pair:
    words = rng.sample(NOUNS, rng.randint(4, 6))
    order = sorted(words)
    steps = [f"{place}. {word}" for place, word in enumerate(order, start=1)]
    return f"Put these words in alphabetical order: {', '.join(words)}.", "\n".join(
        [
            "Let's compare the words letter by letter and write them down in order.",
            *steps,
            f"In alphabetical order, the words are {', '.join(order[:-1])} and {order[-1]}.",
        ]
    )


def packing_list(rng: Random) -> Pair:
    name, days, place = rng.choice(NAMES), rng.randint(2, 9), rng.choice(tuple(PLACES))
    season, hobby = rng.choice(tuple(SEASONS)), rng.choice(tuple(HOBBIES))
    prompt = f"Write a packing list for {name}, who likes {hobby} and spends {days} days {place} in {season}."
    things = [*SEASONS[season], *PLACES[place], f"{days} pairs of socks", HOBBIES[hobby][1]]
    lines = [f"{number}. {thing[0].upper()}{thing[1:]}" for number, thing in enumerate(things, start=1)]
    heading = f"Here is a packing list for {name}'s {days} days {place} in {season}:"
    return prompt, "\n".join([heading, *lines, f"Have a good trip, {name}!"])


def sandwich(rng: Random) -> Pair:
    (one, two), bread, spread = rng.sample(FILLINGS, 2), rng.choice(BREADS), rng.choice(SPREADS)
    return f"How do I make a sandwich with {one}, {two} and {spread} on {bread}?", "\n".join(
        [
            f"You need two slices of {bread}, some {spread}, {one} and {two}.",
            f"1. Spread the {spread} on both slices of {bread}.",
            f"2. Cut the {one} into thin pieces and lay them on one slice.",
            f"3. Put the {two} on top of the {one}.",
            "4. Close the sandwich and cut it in half.",
            "Enjoy your meal!",
        ]
    )


def soup(rng: Random) -> Pair:
    (one, two, three), herb = rng.sample(VEGETABLES, 3), rng.choice(HERBS)
    return f"How do I cook a soup with {one}, {two}, {three} and {herb}?", "\n".join(
        [
            f"You need {one}, {two}, {three}, a little {herb}, water and salt.",
            f"1. Wash the {one}, the {two} and the {three} and cut them into small pieces.",
            f"2. Fry the {one} in a large pot for five minutes.",
            f"3. Add the {two}, the {three} and one litre of water.",
            "4. Let the soup cook for twenty minutes and add some salt.",
            f"5. Sprinkle the {herb} on top.",
            "Enjoy your meal!",
        ]
    )


def recipe(rng: Random) -> Pair:
    return rng.choice((sandwich, soup))(rng)


def day_plan(rng: Random) -> Pair:
    name, day = rng.choice(NAMES), rng.choice(DAYS)
    first, second, third = rng.sample(tuple(HOBBIES), 3)
    return f"Plan a {day} for {name}, who likes {first}, {second} and {third}.", "\n".join(
        [
            f"Here is a plan for {name}'s {day}:",
            "- At 8 o'clock: have breakfast and a cup of tea.",
            f"- In the morning: {HOBBIES[first][0]}.",
            "- At noon: eat lunch and take a short rest.",
            f"- In the afternoon: {HOBBIES[second][0]}.",
            f"- In the evening: {HOBBIES[third][0]}.",
            f"I hope {name} has a wonderful {day}!",
        ]
    )


def thank_you_note(rng: Random) -> Pair:
    writer, friend = rng.sample(NAMES, 2)
    look, gift = rng.choice(tuple(LOOKS)), rng.choice(tuple(GIFTS))
    prompt = f"Write a thank-you note from {writer} to {friend} for the {look} {gift}."
    body = f"Thank you very much for the {look} {gift}. {LOOKS[look]}. {GIFTS[gift]}. I hope to see you again soon."
    return prompt, f"Dear {friend},\n\n{body}\n\nWarm wishes,\n{writer}"
