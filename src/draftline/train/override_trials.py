"""`draftline doctor --overrides RECIPE`: which declared overrides this environment still needs, by trying without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Literal

import torch

from draftline.config import Override, Recipe
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.processes import Ended, run_together
from draftline.errors import InputError
from draftline.monitor.notices import Notices

LIMIT_S = 900.0
SLOWER = 1.15  # a step that takes so much longer without the override needs it
LOSS_TOLERANCE = 1e-3
Answer = Literal["not needed", "needed", "cannot tell"]


@dataclass(frozen=True)
class Trial:
    switch: str
    value: bool | int | float | str
    until: str
    expired: bool
    answer: Answer
    found: str


def try_overrides(recipe: Recipe, notices: Notices | None) -> None:
    """Run a small compiled step with all overrides, then without each, and print what that shows; as JSON without
    notices. Raises InputError for a recipe that declares none."""
    if not recipe.overrides:
        raise InputError("the recipe declares no overrides", "there is nothing to try")
    use_compile_cache()
    device = "cuda" if torch.cuda.is_available() and recipe.placement.device != "cpu" else "cpu"
    if notices is not None:
        notices.say(f"a small compiled step on {device}, with the overrides and without each:")
    everything = run_with(recipe.overrides, device)
    trials = [trial(override, everything, recipe.overrides, device) for override in recipe.overrides]
    if notices is None:
        print(json.dumps({"device": device, "overrides": [asdict(each) for each in trials]}))
        return
    for each in trials:
        late = ", and past it" if each.expired else ""
        notices.say(f"  {each.answer:<12} {each.switch}={each.value} (until {each.until}{late}): {each.found}")


def trial(override: Override, everything: Ended, overrides: Sequence[Override], device: str) -> Trial:
    kept = tuple(other for other in overrides if other != override)
    answer, found = judge(everything, run_with(kept, device))
    expired = override.until < date.today()
    return Trial(override.switch, override.value, str(override.until), expired, answer, found)


def run_with(kept: Sequence[Override], device: str) -> Ended:
    """The probe in a process of its own, with `kept` set; what is left out is as this machine has it."""
    change: dict[str, str | None] = {override.switch: str(override.value) for override in kept if override.is_variable}
    words = json.dumps([override.model_dump(mode="json") for override in kept])
    (ended,) = run_together([["-m", "draftline.train.compile_probe", device, words]], [change], LIMIT_S)
    return ended


def judge(everything: Ended, without: Ended) -> tuple[Answer, str]:
    """What two runs of the probe say about the override that the second one lacks."""
    before, after = everything.result, without.result
    if after is None:
        if before is None:
            return "cannot tell", f"the step fails with it as well: {everything.last_words}"
        return "needed", f"without it: {without.last_words}"
    if before is None:
        return "not needed", f"without it the step runs, with it: {everything.last_words}"
    return judge_figures(before, after)


def judge_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Answer, str]:
    ratio = after["step_s"] / before["step_s"]
    speed = f"a step takes {after['step_s'] * 1e3:.2f} ms without it, {before['step_s'] * 1e3:.2f} ms with it"
    if abs(after["loss"] - before["loss"]) > LOSS_TOLERANCE * abs(before["loss"]):
        return "needed", f"the loss is {after['loss']:.6f} without it and {before['loss']:.6f} with it"
    return ("needed" if ratio > SLOWER else "not needed"), speed
