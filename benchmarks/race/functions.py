"""Prompts about code, made of functions and task descriptions in installed packages.

Sources: CodeI/O as shipped in reasoning-gym (Apache-2.0), the standard library (PSF licence), SymPy and mpmath (BSD).
"""

import ast
import gzip
import json
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import mpmath
import sympy
from compositions import stub, tasks
from reasoning_gym.data import get_data_file_path

LONGEST_CHARS = 1400  # about 400 tokens; the exact limit is applied later, this one only saves work
TASK_LEAD = "Write a Python function for this task.\n\n"
COMPLETE_LEAD = "Complete this Python function.\n\n"
COMMON_WORDS = frozenset(
    "given that this with from what which your into have each their number does will task function".split()  # noqa: SIM905
)
MAIN = "main_solution"  # what CodeI/O calls every entry point
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__", "ensurepip"}


@dataclass(frozen=True)
class Function:
    """One function: its signature on one line, docstring (may be empty) and the whole source, dedented."""

    name: str
    signature: str
    docstring: str
    source: str
    is_method: bool


@dataclass(frozen=True)
class Record:
    """One CodeI/O problem: what is asked, the parameters in words, and the functions of its reference code."""

    task: str
    parameters: str
    functions: tuple[Function, ...]


def functions_in(source: str) -> Iterator[Function]:
    """Functions and methods of a module's text in order; text that is not Python gives none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    methods = {child for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.end_lineno is None:
            continue
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f"def {node.name}({ast.unparse(node.args)}){returns}:"
        yield Function(node.name, head, ast.get_docstring(node) or "", whole, node in methods)


@cache
def records(withheld: frozenset[str]) -> tuple[Record, ...]:
    """CodeI/O problems of reasoning-gym. Of one that a withheld prompt asks for neither task nor code is used."""
    with gzip.open(get_data_file_path("codeio.jsonl.gz"), "rt", encoding="utf-8") as rows:
        loaded = [json.loads(row) for row in rows]
    return tuple(
        Record(
            row["task_description"].strip(), row["input_output_spec"].strip(), tuple(functions_in(row["code_sample"]))
        )
        for row in loaded
        if TASK_LEAD + row["task_description"].strip() not in withheld
    )


@cache
def library_functions() -> tuple[Function, ...]:
    """Documented functions and methods of the standard library, mpmath and SymPy, in the order of their paths."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(mpmath.__file__).parent]
    roots += [
        Path(sympy.__file__).parent / part
        for part in ("ntheory", "utilities", "combinatorics", "discrete", "crypto", "geometry")
    ]
    found: list[Function] = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
                text = path.read_text(encoding="utf-8", errors="replace")
                found += [function for function in functions_in(text) if len(function.docstring) > 30]
    return tuple(found)


def opening(docstring: str, limit_chars: int = 700) -> str:
    """The first paragraphs of a docstring, as many as fit in the limit (at least one)."""
    kept = ""
    for paragraph in docstring.split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit_chars:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept


def shuffled(items: list[str], rng: Random) -> list[str]:
    """A copy in random order."""
    return rng.sample(items, len(items))


def slug(text: str, words: int) -> str:
    """A function name from the content words of a description."""
    content = [word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3 and word not in COMMON_WORDS]
    return "_".join(list(dict.fromkeys(content))[:words])


def parameters_of(function: Function) -> str:
    """What stands between the parentheses of a signature, on one line."""
    inside = function.signature.partition("(")[2].rpartition(")")[0]
    return re.sub(r"\s+", " ", inside).strip()


def main_function(record: Record) -> Function | None:
    """The entry point of a problem's reference code."""
    return next((function for function in record.functions if function.name == MAIN), None)


def task_requests(withheld: frozenset[str], rng: Random) -> Iterator[str]:
    """Requests in CodeI/O's wording: with the parameters, shortened, for helper functions and for library functions."""
    texts: list[str] = []
    for record in records(withheld):
        main, sentences = main_function(record), re.split(r"(?<=[.?!]) ", record.task)
        texts += [record.task, f"{record.task}\n\n{record.parameters}"]
        if main is not None:
            texts.append(f"{record.task}\n\nThe function is called `{slug(record.task, 3)}({parameters_of(main)})`.")
        if len(sentences) > 1:
            texts += [" ".join(sentences[:-1]), " ".join(sentences[1:])]
        texts += [opening(function.docstring, 400) for function in record.functions if len(function.docstring) > 40]
        texts += [
            f"{opening(function.docstring, 300)}\n\n"
            f"The function is called `{function.name}({parameters_of(function)})`."
            for function in record.functions
            if len(function.docstring) > 40 and function.name != MAIN
        ]
    texts += [opening(function.docstring, 400) for function in library_functions()]
    yield from (TASK_LEAD + text for text in shuffled(texts, rng) if len(text) > 40)


def composed_tasks(rng: Random) -> Iterator[str]:
    """Endless requests in CodeI/O's wording for composed tasks."""
    for task in tasks(rng):
        kind = {"List[int]": "a list of integers", "str": "a string", "List[str]": "a list of words"}.get(
            task.annotations[0], "a list of lists of integers"
        )
        given = task.sample(rng)
        example = rng.choice(["", "", f" For `{given!r}` the result is `{task.solve(given)!r}`."])
        yield f"{TASK_LEAD}You are given {kind} `{task.argument}`. {task.wording}{example}"


def composed_completions(rng: Random) -> Iterator[str]:
    """Endless completion requests for composed tasks, with examples."""
    for task in tasks(rng):
        yield f"{COMPLETE_LEAD}```python\n{stub(task, rng)}\n```"


def completion(signature: str, docstring: str, rng: Random) -> str:
    """A completion request: an empty line or two, the signature, the docstring."""
    body = textwrap.indent(docstring.strip(), "    ").strip()
    above, gap = rng.choice(["", "\n", "\n\n"]), rng.choice(["", " "])
    return f'{COMPLETE_LEAD}```python\n{above}{signature}\n    """{gap}{body}\n    """\n```'


def completions(withheld: frozenset[str], rng: Random) -> Iterator[str]:
    """Completion requests for documented functions and for CodeI/O's main functions under names of their own."""
    found = [function for record in records(withheld) for function in record.functions] + list(library_functions())
    texts = [
        completion(function.signature, opening(function.docstring), rng)
        for function in found
        if len(function.docstring) > 20 and not function.is_method and function.name != MAIN
    ]
    for record in records(withheld):
        main = main_function(record)
        if main is not None:
            name, task = slug(record.task, rng.randint(2, 4)), textwrap.fill(record.task, 80)
            texts.append(completion(main.signature.replace(MAIN, name), task, rng))
            texts.append(
                completion(f"def {slug(record.task, 2)}({parameters_of(main)}):", f"{task}\n\n{record.parameters}", rng)
            )
    yield from shuffled(texts, rng)


ABOUT_A_FUNCTION = [
    "Explain what this Python function does.",
    "What does the following function return, and how does it get there?",
    "Describe the following code step by step.",
    "Write a docstring for this function.",
    "Write three unit tests for this function.",
    "Is there a bug in this function? If so, correct it.",
    "Rewrite this function so that it is easier to read.",
    "Add type annotations to this function.",
    "What is the time complexity of this function?",
    "Translate this Python function to JavaScript.",
    "Translate this Python function to C++.",
    "Suggest a better name for this function and say why.",
    "Which inputs would make this function fail?",
    "Add comments to this code.",
    "Summarise this code in one sentence.",
    "Show an example call of this function and its result.",
    "How could this function be made faster?",
    "Add error handling to this function.",
]


def code_questions(withheld: frozenset[str], rng: Random) -> Iterator[str]:
    """Questions about a function that is shown: explain, test, correct, translate, improve."""
    found = [function for record in records(withheld) for function in record.functions] + list(library_functions())
    shown = [function.source for function in found if 120 < len(function.source) < LONGEST_CHARS]
    for source in shuffled(shown, rng):
        yield f"{rng.choice(ABOUT_A_FUNCTION)}\n\n```python\n{source}\n```"


OTHER_WORDINGS = [
    "Write a {language} program for the following problem.\n\n{task}",
    "How would you solve this problem in {language}?\n\n{task}",
    "Implement a function in {language}: {task}",
    "Describe an algorithm, without code, for this problem.\n\n{task}",
    "{task}\n\nGive a short solution in {language} and its time complexity.",
    "Give pseudocode for the following. {task}",
]


def code_requests(withheld: frozenset[str], rng: Random) -> Iterator[str]:
    """Endless: programming tasks in other words and other languages."""
    languages = ["C++", "Java", "JavaScript", "Go", "Rust", "C", "Python", "Python", "TypeScript", "SQL or Python"]
    for task in tasks(rng):
        text = rng.choice(records(withheld)).task if rng.random() < 0.7 else task.wording
        yield rng.choice(OTHER_WORDINGS).format(language=rng.choice(languages), task=text)
