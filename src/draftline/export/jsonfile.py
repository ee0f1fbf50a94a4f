"""JSON files of an export folder: read with errors that name file and key, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import InputError


@dataclass(frozen=True, slots=True)
class JsonObject:
    """One JSON object and where it came from. Every read checks presence and type; nothing has a default."""

    where: str  # "drafter/config.json" or "drafter/config.json: dflash_config"
    tree: dict[str, Any]

    def require(self, keys: Iterable[str]) -> None:
        """Raises one InputError that names all missing keys."""
        if missing := [key for key in keys if key not in self.tree]:
            raise InputError(
                f"{self.where}: missing {', '.join(missing)}", "an export states them all: export it again"
            )

    def value(self, key: str) -> Any:
        self.require([key])
        return self.tree[key]

    def checked(self, key: str, rule: str, holds: Callable[[Any], bool]) -> Any:
        value = self.value(key)
        if not holds(value):
            raise InputError(f"{self.where}: {key} must be {rule}, got {value!r}")
        return value

    def integer(self, key: str, minimum: int = 0) -> int:
        value: int = self.checked(key, f"an integer >= {minimum}", lambda v: is_integer(v) and v >= minimum)
        return value

    def optional_integer(self, key: str) -> int | None:
        """The integer, or None where the key is null or absent."""
        return None if self.tree.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        return float(self.checked(key, "a positive number", lambda v: is_number(v) and v > 0))

    def boolean(self, key: str) -> bool:
        value: bool = self.checked(key, "true or false", lambda v: isinstance(v, bool))
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        def holds(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(is_integer(v) and v >= 0 for v in value)

        return tuple(self.checked(key, "a list of integers >= 0", holds))

    def section(self, key: str) -> JsonObject:
        return JsonObject(f"{self.where}: {key}", self.checked(key, "an object", lambda v: isinstance(v, dict)))


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path: Path) -> JsonObject:
    """Raises InputError when the file is absent, not UTF-8, not JSON, or not an object."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give the folder of an exported drafter") from error
    except ValueError as error:  # both UnicodeDecodeError and JSONDecodeError
        raise InputError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must hold a JSON object, got {type(tree).__name__}")
    return JsonObject(str(path), tree)


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(as_text(tree), encoding="utf-8")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content atomically: readers see the old text or the new, also across a crash."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content or a folder's entries durable: a rename is only safe on disk once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_text(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, allow_nan=False) + "\n"
