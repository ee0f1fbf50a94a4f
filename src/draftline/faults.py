"""What pydantic finds wrong with a recipe, in a person's words."""

from __future__ import annotations

from typing import Any, get_args

RULE_OF = {  # pydantic's words for these speak of Python
    "model_type": "a section is a mapping of keys",
    "tuple_type": "must be a list",
    "too_short": "the list must not be empty",
    "invalid_key": "a key is a word",
}


def describe_problem(problem: Any, model: Any) -> str:
    """One line for one pydantic problem of a `model`: dotted path, rule, value, and the keys that exist where one is
    unknown."""
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key; allowed here: {', '.join(known_keys(problem['loc'][:-1], model))}"
    if problem["type"] == "missing":
        return f"{path}: must be given"
    rule = RULE_OF.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    hint = " (YAML reads 6e-4 as text: write 6.0e-4)" if looks_like_bare_exponent(problem["input"]) else ""
    value = "" if isinstance(problem["input"], dict) else f", got {problem['input']!r}"
    return f"{path}: {rule}{value}{hint}" if path else rule


def looks_like_bare_exponent(value: Any) -> bool:
    if not isinstance(value, str) or "e" not in value.lower():
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def known_keys(loc: tuple[Any, ...], model: Any) -> list[str]:
    for part in loc:
        model = get_args(model)[0] if isinstance(part, int) else model.model_fields[part].annotation
    return sorted(model.model_fields)
