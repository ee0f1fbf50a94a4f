"""A run trains on every row of every epoch, also where the rows do not fill its last step."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from command import draftline_here
from draftline.monitor.events import Step, read_events
from runs import write_recipe


def reports(home: Path, rows_per_step: int) -> list[Step]:
    home.mkdir()
    recipe = write_recipe(home)
    tree = yaml.safe_load(recipe.read_text())
    tree["train"] |= {"epochs": 2, "max_steps": None, "rows_per_step": rows_per_step, "rows_per_micro_batch": 1}
    recipe.write_text(yaml.safe_dump(tree))
    done = draftline_here("train", recipe)
    assert done.code == 0, done.err
    events = [logged.event for logged in read_events(home / "run" / "events.jsonl").events]
    return [event for event in events if isinstance(event, Step)]


def test_the_last_step_takes_the_rows_that_are_left(tmp_path: Path) -> None:
    one_by_one = reports(tmp_path / "whole", 1)
    rows = len(one_by_one)
    grouped = reports(tmp_path / "grouped", rows - 1)
    assert [event.report.step for event in grouped] == [0, 1]
    tokens = [event.report.tokens for event in one_by_one]
    assert [event.report.tokens for event in grouped] == [sum(tokens[:-1]), tokens[-1]]
    assert json.loads((tmp_path / "grouped" / "run" / "summary.json").read_text())["target_tokens"] == sum(tokens)
