"""Arithmetic word problems with worked answers. Every sentence here was written for this project."""

from __future__ import annotations

from random import Random

from everyday import NAMES, Pair

GOODS = ("notebooks", "candles", "mugs", "plates", "balls", "cushions", "brushes", "baskets", "lamps", "caps")
FLOWERS = ("tulips", "roses", "daisies", "lilies", "sunflowers", "poppies")
SNACKS = ("biscuits", "cherries", "muffins", "nuts", "pancakes", "grapes")
TREASURES = ("stamps", "coins", "shells", "marbles", "postcards", "stickers", "buttons")
WISHES = ("a kite", "a game", "a backpack", "a radio", "a pair of skates", "a tent")


def worked(steps: list[str], conclusion: str) -> str:
    lines = [f"{number}. {step}" for number, step in enumerate(steps, start=1)]
    return "\n".join(["Let's solve this step by step.", *lines, conclusion])


def shopping(rng: Random) -> Pair:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    count, price, note = rng.randint(2, 9), rng.randint(2, 11), 100
    cost = count * price
    return (
        f"{name} buys {count} {goods} for {price} dollars each and pays with a {note} dollar note. "
        f"How much money does {name} get back?",
        worked(
            [
                f"The {count} {goods} cost {count} × {price} = {cost} dollars.",
                f"From the note, {note} - {cost} = {note - cost} dollars remain.",
            ],
            f"So {name} gets {note - cost} dollars back.",
        ),
    )


def flower_bed(rng: Random) -> Pair:
    name, flowers = rng.choice(NAMES), rng.choice(FLOWERS)
    rows, each, more = rng.randint(3, 9), rng.randint(3, 12), rng.randint(5, 40)
    return (
        f"{name} has {rows} rows of {each} {flowers} in the garden and plants {more} more. "
        f"How many {flowers} are there now?",
        worked(
            [
                f"At first there are {rows} × {each} = {rows * each} {flowers}.",
                f"With the new ones there are {rows * each} + {more} = {rows * each + more} {flowers}.",
            ],
            f"So {name} now has {rows * each + more} {flowers}.",
        ),
    )


def savings(rng: Random) -> Pair:
    name, wish, weekly, weeks = rng.choice(NAMES), rng.choice(WISHES), rng.randint(3, 12), rng.randint(4, 10)
    saved = weekly * weeks
    price = rng.randint(5, saved - 2)
    return (
        f"{name} saves {weekly} dollars a week for {weeks} weeks and then buys {wish} for {price} dollars. "
        f"How many dollars are left?",
        worked(
            [
                f"In {weeks} weeks, {name} saves {weeks} × {weekly} = {saved} dollars.",
                f"After buying {wish}, {saved} - {price} = {saved - price} dollars remain.",
            ],
            f"So {name} has {saved - price} dollars left.",
        ),
    )


def reading(rng: Random) -> Pair:
    name, daily, days = rng.choice(NAMES), rng.randint(5, 12), rng.randint(3, 9)
    done = daily * days
    pages = done + rng.randint(10, 90)
    return (
        f"{name} reads {daily} pages of a book every day. The book has {pages} pages. "
        f"How many pages are left after {days} days?",
        worked(
            [
                f"In {days} days, {name} reads {days} × {daily} = {done} pages.",
                f"Of the {pages} pages, {pages} - {done} = {pages - done} pages remain.",
            ],
            f"So {name} still has {pages - done} pages to read.",
        ),
    )


def sharing(rng: Random) -> Pair:
    name, snacks, friends, each = rng.choice(NAMES), rng.choice(SNACKS), rng.randint(3, 9), rng.randint(4, 12)
    eaten = rng.randint(1, each - 2)
    return (
        f"{name} shares {friends * each} {snacks} equally among {friends} friends. Each friend eats {eaten} of them. "
        f"How many {snacks} does each friend have left?",
        worked(
            [
                f"Each friend gets {friends * each} / {friends} = {each} {snacks}.",
                f"After eating, each friend has {each} - {eaten} = {each - eaten} {snacks}.",
            ],
            f"So each friend has {each - eaten} {snacks} left.",
        ),
    )


def journey(rng: Random) -> Pair:
    vehicle, speed = rng.choice(("bus", "train", "lorry", "car")), 10 * rng.randint(4, 12)
    hours, rest = rng.randint(2, 6), rng.randint(5, 95)
    driven = speed * hours
    return (
        f"A {vehicle} covers {speed} kilometres an hour. After {hours} hours, {rest} kilometres of the way remain. "
        f"How long is the whole way?",
        worked(
            [
                f"In {hours} hours, the {vehicle} covers {hours} × {speed} = {driven} kilometres.",
                f"With the rest, the way is {driven} + {rest} = {driven + rest} kilometres long.",
            ],
            f"So the whole way is {driven + rest} kilometres long.",
        ),
    )


def collection(rng: Random) -> Pair:
    (name, friend), things = rng.sample(NAMES, 2), rng.choice(TREASURES)
    first, more = rng.randint(8, 90), rng.randint(3, 40)
    second = first + more
    return (
        f"{name} has {first} {things}. {friend} has {more} more {things} than {name}. How many do they have together?",
        worked(
            [
                f"{friend} has {first} + {more} = {second} {things}.",
                f"Together they have {first} + {second} = {first + second} {things}.",
            ],
            f"So {name} and {friend} have {first + second} {things} together.",
        ),
    )


def word_problem(rng: Random) -> Pair:
    return rng.choice((shopping, flower_bed, savings, reading, sharing, journey, collection))(rng)
