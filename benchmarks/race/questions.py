"""Open questions: templates times topics, small generated records to extract from, and short chat."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import chatterbot_corpus
import yaml
from reasoning_gym.data import read_data_file
from topics import (
    CHARACTERS,
    COMPUTING,
    COUNTRIES,
    EVERYDAY,
    GOODS,
    NAMES,
    PEOPLE,
    ROLES,
    SCIENCE,
    SETTINGS,
    SOCIETY,
    THINGS,
    phrases,
)

SLOTS = {
    "science": SCIENCE,
    "computing": COMPUTING,
    "society": SOCIETY,
    "everyday": EVERYDAY,
    "setting": SETTINGS,
    "character": CHARACTERS,
    "role": ROLES,
    "person": PEOPLE,
    "country": COUNTRIES,
    "thing": THINGS,
    "name": NAMES,
    "goods": GOODS,
    "topic": SCIENCE + COMPUTING + SOCIETY,
    "count": ["two", "three", "four", "five", "six"],
    "length": [
        "in one paragraph",
        "in two paragraphs",
        "in under 100 words",
        "in about 150 words",
        "briefly",
        "in detail",
    ],
    "audience": phrases(
        "a ten-year-old | a university student | a new colleague | my grandmother | someone who has never heard of "
        "it | a curious teenager"
    ),
    "feeling": phrases(
        "joy | longing | fear | relief | anger | wonder | loneliness | hope | guilt | pride | surprise | calm"
    ),
    "language": ["Python", "JavaScript", "C++", "Java", "C", "SQL", "HTML and CSS", "Go", "Bash"],
    "reader": phrases(
        "my landlord | a customer | my manager | a neighbour | a professor | a hotel | an old friend | the city "
        "council | a supplier | my team | a job applicant"
    ),
    "aim": phrases("""
ask for more time | say thank you | complain about noise | cancel an order | propose a meeting | share good news |
decline an invitation | ask for feedback on a draft | explain a delay | report a broken heater | request a refund |
introduce a new member | announce a change of plan | offer help
"""),
    "form": phrases(
        "a short poem | a haiku | a limerick | a short story | a dialogue | a monologue | a fable | a song | a "
        "letter | a diary entry | a news report | a scene for the stage"
    ),
}

WRITING = phrases("""
Write {form} about {setting}. | Write {form} in which {character} meets {character}. | Write {form} about {topic}. |
Describe {setting} {length}, so that the reader feels {feeling}. | Start a story with {character} arriving at
{setting}. Write only the first paragraph. | Write an e-mail to {reader} to {aim}. Keep it polite and short. | Draft a
letter to {reader} in order to {aim}. | Write a blog post about {everyday}. | Make an outline for an article about
{topic}, with headings and key points. | Suggest {count} titles for an essay on {society}. | Write a product
description for {goods}. | Write a speech about {society} for a school assembly. | Write a review of a novel about
{character}. | Invent a legend that explains {thing}. | Continue this sentence as a story: "Nobody in {setting}
expected {character}." | Write a travel article about {country}, with food, sights and people. | Argue for and against
{society} {length}. | Write a persuasive paragraph that makes people try {everyday}. | Write a conversation between
{character} and {character} about {topic}. | Give {count} metaphors for {feeling}. | Write a toast for {name}, who
loves {everyday}. | Write a headline and an opening sentence about a discovery in {science}.
""")
ROLEPLAY = phrases("""
You are {role}. Explain {topic} in your own voice. | Pretend to be {role} and tell me about your day. | Act as {role}.
I will ask you for advice: how should I go about {everyday}? | Take on the role of {role}. What do you think of
{topic}? | Imagine that you are {role} and you meet {person}. What do you say? | Speak like {role}. Why should I visit
{country}? | I want you to be {role}. Introduce yourself and ask me {count} questions. | Play {role} who has to
convince a crowd that {everyday} is worth the effort. | You are {person}. Tell a child what you are known for. | Be
{role} for this conversation and stay in character. My first question: what are you most afraid of? | As {role}, write
a postcard from {setting}. | Suppose you were {role} and could change one thing in the world. What would it be, and
why? | Answer as {person} would: what did you think about {society}? | You play {role}, I play {character}. Open the
scene in {setting}.
""")
EXPLAINING = phrases("""
What is meant by {topic}? | Explain {topic} to {audience}. | Explain {topic} {length}. | How does {science} work? |
Why does {science} matter in daily life? | What are the main causes and effects of {society}? | Compare {science} with
{science}: what do they share, and where do they differ? | Give {count} examples of {science} and explain each. | List
{count} common misunderstandings about {topic}. | What are the advantages and disadvantages of {computing}? | When
would you use {computing} rather than {computing}? | Summarise the history of {topic} {length}. | What would happen if
there were no {science}? | Who contributed most to our understanding of {science}, and how? | Describe an experiment
that shows {science}. | What should every citizen know about {society}? | How did {society} change everyday life? List
{count} effects. | Discuss how {society} and {society} are connected. | How has {person} influenced the world? | What
can we learn from {society} today? | Make a lesson plan on {topic} for two hours. | Write {count} quiz questions about
{topic}, with answers. | Define {topic} and name {count} key terms that belong to it. | What are the ethical questions
raised by {computing}? | How do customs around {society} differ between {country} and {country}? | Recommend {count}
books or films to somebody interested in {society}, and say why. | Give me a plan for {everyday}, step by step. | What
are {count} tips for {everyday}? | What mistakes do people make with {everyday}? | Is {everyday} worth the trouble?
Give reasons on both sides. | How does {computing} work? Give an example in {language}. | Write a small {language}
program that shows {computing}. | Design a simple system that uses {computing} and {computing}; describe its parts. |
What equations describe {science}? Explain the symbols.
""")
SHORT_CHAT = phrases("""
what is {thing} | What is {thing}? | tell me about {thing} | tell me about {person} | Who was {person}? | who is
{person} | What is {person} famous for? | When did {person} live? | Where was {person} born? | What is the capital of
{country}? | what language do they speak in {country} | Which countries border {country}? | What is the currency of
{country}? | How many people live in {country}? | Name a famous dish from {country} | have you been to {country} | do
you like {everyday} | do you know {person} | what do you think about {topic} | can you help me with {everyday} | i am
bored, tell me something about {thing} | Who invented {thing}? | What is the purpose of {thing}? | how old is {thing}
| why is {thing} important | Where can I find {thing}? | what is {topic} | define {topic} | what is the opposite of
{feeling} | how do you feel about {feeling} | my name is {name} | {name} says hello | tell me a joke about {thing} |
how do i start with {everyday} | In which year did {society} begin? | What is the difference between {thing} and
{thing}? | can you explain {computing} | how do I use {computing} in {language}? | what is the best way of {everyday}
| are you {role} | Which is bigger, {country} or {country}?
""")
PASSAGE_REQUESTS = phrases("""
Summarise the following passage in one sentence. | Summarise this text in {count} bullet points. | List the people,
places and organisations in the passage below. | What is the main idea of this passage? | Rewrite this passage in
simpler words. | Find the verbs in the following text. | Correct any mistakes in the text below and explain them. |
Write {count} questions that this passage answers. | Rewrite the following text as a dialogue. | Give the passage a
title. | What is the tone of this text? Answer with one word and a reason. | Extract all numbers and dates from this
text as a JSON list. | How many sentences does this text have? Which one is the longest? | Continue the passage with
one more paragraph.
""")


def filled(templates: list[str], rng: Random) -> Iterator[str]:
    """Endless: a template with a different phrase in each of its slots."""
    while True:
        text = rng.choice(templates)
        for slot, values in SLOTS.items():
            for value in rng.sample(values, text.count(f"{{{slot}}}")):
                text = text.replace(f"{{{slot}}}", value, 1)
        yield text[0].upper() + text[1:] if text[-1] in ".?" else text


def writing(rng: Random) -> Iterator[str]:
    """Endless requests to write something."""
    return filled(WRITING, rng)


def roleplay(rng: Random) -> Iterator[str]:
    """Endless requests to speak as somebody."""
    return filled(ROLEPLAY, rng)


def explaining(rng: Random) -> Iterator[str]:
    """Endless requests to explain, compare, plan and discuss."""
    return filled(EXPLAINING, rng)


def short_chat(rng: Random) -> Iterator[str]:
    """Endless short questions and remarks, as people type them."""
    return filled(SHORT_CHAT, rng)


def utterances(rng: Random) -> Iterator[str]:
    """What either side says in the English conversations of chatterbot-corpus (BSD)."""
    said: list[str] = []
    for path in sorted((Path(chatterbot_corpus.__file__).parent / "data" / "english").glob("*.yml")):
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        said += [str(line).strip() for conversation in loaded["conversations"] for line in conversation]
    unique = [line for line in dict.fromkeys(said) if line]
    yield from rng.sample(unique, len(unique))


def passages(rng: Random) -> Iterator[str]:
    """Endless requests about two to five sentences of "In the Year 2889" (public domain, shipped in reasoning-gym)."""
    text = read_data_file("in_the_year_2889.txt").partition("***\n")[2].partition("*** END")[0]
    sentences = [part.strip() + "." for part in " ".join(text.split()).split(". ")]
    while True:
        start = rng.randrange(10, len(sentences) - 6)
        request = next(filled(PASSAGE_REQUESTS, rng))
        yield f"{request}\n\n{' '.join(sentences[start : start + rng.randint(2, 5)])}"


def record_questions(rng: Random) -> Iterator[str]:
    """Endless small tables and notes with something to extract, count or format."""
    while True:
        people, goods, places = rng.sample(NAMES, 4), rng.sample(GOODS, 4), rng.sample(COUNTRIES, 4)
        counts, years = [rng.randint(2, 99) for _ in range(4)], [rng.randint(2001, 2023) for _ in range(4)]
        style = rng.choice(
            [
                "{p} from {c} sold {n} {g} in {y}.",
                "{y}: {p} ({c}), {n} {g}",
                "- {p}, {c}: {n} {g} (order of {y})",
                "{p};{c};{n};{g};{y}",
                "In {y}, {p} moved to {c} with {n} {g}.",
                "Order {n}: {g}, shipped to {p} in {c}, {y}",
            ]
        )
        lines = [
            style.format(p=p, g=g, c=c, n=n, y=y)
            for p, g, c, n, y in zip(people, goods, places, counts, years, strict=True)
        ]
        request = rng.choice(
            [
                "Turn these lines into a JSON list with one object each.",
                "Make a Markdown table of the following.",
                "Who has the largest number? Answer with the name only.",
                "Write the lines as CSV with a header.",
                f"Which country belongs to {rng.choice(people)}?",
                "Sort these lines by year, the oldest first.",
                "List all countries that are mentioned, in alphabetical order.",
                "Add up the numbers of goods and show the calculation.",
                f"Extract the names and the years. Leave out everything about {rng.choice(goods)}.",
                "Summarise the following in one sentence.",
                "Which lines mention a country in Europe? Give the names only.",
                "Sort the goods into categories of your choice.",
            ]
        )
        yield f"{request}\n\n" + "\n".join(lines[: rng.randint(3, 4)])


SUMS = phrases("""
{a} buys {n} {g} at ${p} each and {m} {h} at ${q} each. How much does {a} pay? | A shop has {n} {g}. It sells {m} of
them in the morning and half of the rest in the afternoon. How many are left? | {a} is {m} years older than {b}.
Together they are {n} years old. How old is {a}? | A train covers {n} kilometres in {m} hours. How far does it get in
{p} hours at the same speed? | What is {m}% of {n}? | The sides of a rectangle are {n} cm and {m} cm. Find its area
and its perimeter. | If f(x) = {m}x^2 - {p}x + {q}, what is f({r})? | Solve for x: {m}x + {n} = {p}. | Solve the
inequality {m}x - {p} > {n}. | Find the mean and the median of {n}, {m}, {p}, {q} and {r}. | A bag holds {m} red and
{p} blue balls. What is the probability of drawing a red one? | How many ways are there to choose {r} of {m} {g}? |
{a} saves ${p} a week. After how many weeks does {a} have ${n}? | A price of ${n} rises by {m}% and then falls by
{m}%. What is it now? | The remainder of a number divided by {m} is {r}. What is the remainder of {p} times the
number? | A circle has a radius of {m} cm. What is its area? | What comes next: {m}, {p}, {n}, ...? Explain your
guess. | {a} finished before {b}. {c} finished after {b}. Who came last? | {a} has {r} brothers and {r} sisters. How
many children are there in the family? | Every {g} on the table is red. {a} holds something red. Is it certainly one
of the {g}? | {a} is the mother of {b}. {b} is the brother of {c}. How is {a} related to {c}? | Which one does not
fit: {g}, {h}, {t}, {u}? Explain. | {a} walks {m} metres north, {p} metres east and {m} metres south. How far from the
start is {a}? | It takes {r} machines {r} minutes to make {r} {g}. How long do {n} machines take to make {n}? | {a}
says that {b} lies. {b} says that {c} lies. {c} says that both lie. Who tells the truth? | If all {g} cost more than
{h}, and {h} cost more than {t}, do {t} cost less than {g}? | The lights are out, but {a} reads a book without any
trouble. How can that be? | The day after tomorrow is {d}. Which day was yesterday? | {a} faces north and turns right
{r} times. Which way does {a} face? | {a} invests ${n}0 at {r}% interest a year. How much is there after {r} years?
""")


def sums(rng: Random) -> Iterator[str]:
    """Endless small problems of arithmetic, algebra and everyday logic."""
    days = phrases("Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday")
    while True:
        a, b, c = rng.sample(NAMES, 3)
        g, h, t, u = rng.sample(GOODS, 4)
        yield rng.choice(SUMS).format(
            a=a,
            b=b,
            c=c,
            g=g,
            h=h,
            t=t,
            u=u,
            d=rng.choice(days),
            n=rng.randint(30, 400),
            m=rng.randint(3, 28),
            p=rng.randint(5, 30),
            q=rng.randint(2, 20),
            r=rng.randint(2, 9),
        )
