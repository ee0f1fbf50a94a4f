"""Watch over process-wide switches: what is changed and not declared in the recipe is told once, with its moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from draftline.config import Override
from draftline.environment.switches import changed_switches, danger_of, own_changes, setting


@dataclass(frozen=True)
class UndeclaredSwitch:
    name: str
    value: object
    moment: str  # "at the start", "after loading the target"
    danger: str

    @property
    def evidence(self) -> str:
        return f"{self.name} is {self.value!r} {self.moment}; {self.danger}"

    @property
    def remedy(self) -> str:
        return (
            "remove what sets it, or declare it in the recipe: "
            f"overrides: [{{switch: {self.name}, value: {self.value}, reason: ..., until: YYYY-MM-DD}}]"
        )


class SwitchWatch:
    """Compares this process's switches with what the recipe declares and what draftline itself sets."""

    def __init__(self, overrides: Iterable[Override], device: torch.device) -> None:
        overrides = tuple(overrides)
        self.declared: dict[str, object] = {o.switch: o.value for o in overrides if not o.is_variable}
        variables = {o.switch: str(o.value) for o in overrides if o.is_variable}
        self.expected = own_changes(device) | self.declared | variables
        self.told: set[tuple[str, str]] = set()

    def look(self, moment: str) -> list[UndeclaredSwitch]:
        """Changed switches that nobody declared, each value once; one that left its declared value is among them."""
        now = {name: setting(name) for name in self.declared} | changed_switches()
        found = [
            UndeclaredSwitch(name, value, moment, danger_of(name))
            for name, value in now.items()
            if not self.is_expected(name, value) and (name, repr(value)) not in self.told
        ]
        self.told.update((switch.name, repr(switch.value)) for switch in found)
        return found

    def is_expected(self, name: str, value: object) -> bool:
        return name in self.expected and self.expected[name] == value
