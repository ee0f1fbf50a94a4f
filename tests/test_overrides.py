"""Overrides in the open: declared, set in every thread, shown, dated; and what is changed undeclared is an alarm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from command import draftline_here
from draftline.config import Override, parse_recipe
from draftline.environment import variables
from draftline.environment.overrides import enter_overrides
from draftline.environment.switch_watch import SwitchWatch
from draftline.environment.switches import apply_settings
from draftline.errors import InputError
from draftline.monitor.events import Alarm, RunStarted, read_events
from runs import write_recipe

LIMIT = "torch._dynamo.config.recompile_limit"
TOMORROW = date.today() + timedelta(days=1)
CPU = torch.device("cpu")


def override(switch: str = LIMIT, value: Any = 64, until: date = TOMORROW) -> Override:
    return Override(switch=switch, value=value, reason="many shapes", until=until)


def declared(**changes: Any) -> dict[str, Any]:
    entry = {"switch": LIMIT, "value": 64, "reason": "many shapes", "until": str(TOMORROW)}
    return {name: value for name, value in (entry | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"switch": "recompile_limit"}, "overrides.0.switch: must be a torch setting (torch._dynamo.config.NAME) or a"),
        ({"value": [1]}, "overrides.0.value: must be true or false, a number or a word, got [1]"),
        ({"switch": "NCCL_P2P_DISABLE", "value": True}, "NCCL_P2P_DISABLE is an environment variable, which holds te"),
        ({"reason": None}, "overrides.0.reason: must be given"),
        ({"until": "soon"}, "overrides.0.until: must be a date YYYY-MM-DD, got 'soon'"),
        ({"untill": 1}, "overrides.0.untill: unknown key; allowed here: reason, switch, until, value"),
    ],
)
def test_a_bad_override_is_named_with_its_place_and_rule(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe({"target": {"path": "t"}, "data": {"train": "a"}, "overrides": [declared(**changes)]}, "r.yaml")
    assert said in str(caught.value)


def test_a_switch_is_declared_once() -> None:
    tree = {"target": {"path": "t"}, "data": {"train": "a"}, "overrides": [declared(), declared(value=65)]}
    with pytest.raises(InputError, match=f"overrides: {LIMIT} is given twice"):
        parse_recipe(tree, "r.yaml")


def test_a_recipe_with_overrides_survives_being_written_and_read() -> None:
    tree = {"target": {"path": "t"}, "data": {"train": "a"}, "overrides": [declared(until=TOMORROW)]}
    recipe = parse_recipe(tree, "r.yaml")
    again = parse_recipe(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json"))), "again")
    assert again == recipe and recipe.overrides[0].text == f"recompile_limit=64 (until {TOMORROW})"


def test_the_last_day_counts_and_the_day_after_is_refused() -> None:
    enter_overrides([override(until=date(2026, 5, 1))], today=date(2026, 5, 1))
    with pytest.raises(InputError) as caught:
        enter_overrides([override(until=date(2026, 5, 1))], today=date(2026, 5, 2))
    assert caught.value.what.splitlines() == [
        "overrides past their date (today is 2026-05-02):",
        "  recompile_limit=64 (until 2026-05-01): many shapes",
    ]


@pytest.mark.parametrize(
    ("switch", "value", "said"),
    [
        ("torch._dynamo.config.recompile_limits", 64, "has no setting torch._dynamo.config.recompile_limits"),
        ("torch.nn.Linear", 64, "has no setting torch.nn.Linear"),
        (LIMIT, True, f"{LIMIT} is 8, and True is no int"),
        ("torch._dynamo.config.suppress_errors", 1, "is False, and 1 is no bool"),
        ("NCCL_ALGO", "Ring", "NCCL_ALGO is not Ring in this process's environment"),
    ],
)
def test_an_override_that_torch_cannot_take_is_refused(switch: str, value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_settings([override(switch, value)])
    assert said in str(caught.value)


def test_an_undeclared_switch_is_told_once_and_a_declared_one_not() -> None:
    watch = SwitchWatch([override()], CPU)
    torch.use_deterministic_algorithms(True)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            assert watch.look("at the start") == []
            with torch._dynamo.config.patch(suppress_errors=True, recompile_limit=9):
                found = {switch.name: switch for switch in watch.look("at step 5")}
                assert watch.look("at step 6") == []
            torch.backends.cudnn.benchmark = True
            later = watch.look("at step 7")
    finally:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
    assert sorted(found) == [LIMIT, "torch._dynamo.config.suppress_errors"]
    said = found["torch._dynamo.config.suppress_errors"]
    assert said.evidence == (
        "torch._dynamo.config.suppress_errors is True at step 5; what fails to compile runs eagerly from then on, "
        "without an error"
    )
    assert found[LIMIT].value == 9  # declared as 64, and no longer that
    assert [switch.name for switch in later] == ["torch.backends.cudnn.benchmark"]


def test_a_declared_setting_that_somebody_takes_back_is_told() -> None:
    assert [switch.value for switch in SwitchWatch([override()], torch.device("cuda")).look("now")] == [8]


def in_fresh_process(code: str, *words: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(variables.COMPILER_PREFIXES)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_sets_what_it_declares_before_torch_reads_it_in_every_thread_and_shows_it(tmp_path: Path) -> None:
    """A variable that torch reads at its import, and a setting that another thread must see too."""
    recipe = write_recipe(tmp_path, train={"max_steps": 1})
    tree = yaml.safe_load(recipe.read_text())
    tree["overrides"] = [declared(), declared(switch="TORCHDYNAMO_SUPPRESS_ERRORS", value=1)]
    recipe.write_text(yaml.safe_dump(tree))
    code = (
        "import sys, threading\n"
        "from draftline.cli import main\n"
        "sys.argv = ['draftline', 'train', sys.argv[1]]\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "import torch\n"
        "look = lambda: print(torch._dynamo.config.recompile_limit, torch._dynamo.config.suppress_errors)\n"
        "look(); thread = threading.Thread(target=look); thread.start(); thread.join()"
    )
    lines = in_fresh_process(code, str(recipe)).splitlines()
    assert lines[-2:] == ["64 True", "64 True"]
    shown = next(line for line in lines if line.startswith("train 1/1"))
    assert shown.endswith(f"  recompile_limit=64 (until {TOMORROW})  TORCHDYNAMO_SUPPRESS_ERRORS=1 (until {TOMORROW})")
    events = [logged.event for logged in read_events(tmp_path / "run" / "events.jsonl").events]
    started = next(event for event in events if isinstance(event, RunStarted))
    assert [entry["switch"] for entry in started.recipe["overrides"]] == [LIMIT, "TORCHDYNAMO_SUPPRESS_ERRORS"]
    assert started.fingerprint["switches"] == (
        "TORCHDYNAMO_SUPPRESS_ERRORS=1; torch._dynamo.config.recompile_limit=64; "
        "torch._inductor.config.deterministic=True"
    )
    assert [event for event in events if isinstance(event, Alarm)] == []


MEDDLING = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
torch._dynamo.config.suppress_errors = True
class MeddlingForCausalLM(Qwen3ForCausalLM): ...
"""


def test_a_target_whose_own_code_changes_a_switch_is_an_alarm(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, target={"path": str(tmp_path / "target"), "trust_remote_code": True})
    config_file = tmp_path / "target" / "config.json"
    config = json.loads(config_file.read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "meddling.MeddlingForCausalLM"}
    config_file.write_text(json.dumps(config))
    (tmp_path / "target" / "meddling.py").write_text(MEDDLING)
    try:
        done = draftline_here("train", recipe, "train.max_steps=1")
    finally:
        torch._dynamo.config.suppress_errors = False
    assert done.code == 0, done.err
    events = [logged.event for logged in read_events(tmp_path / "run" / "events.jsonl").events]
    (alarm,) = [event for event in events if isinstance(event, Alarm)]
    assert (alarm.name, events.index(alarm)) == ("undeclared-switch", 1)
    assert alarm.evidence.startswith("torch._dynamo.config.suppress_errors is True after the target was loaded; what")
    assert "warning: undeclared-switch" in done.out


def test_with_on_alarm_stop_an_undeclared_switch_ends_the_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train={"on_alarm": "stop"})
    with torch._dynamo.config.patch(suppress_errors=True):
        done = draftline_here("train", recipe)
    assert done.code == 1
    assert "alarm undeclared-switch: torch._dynamo.config.suppress_errors is True at the start; what fails" in done.err


def test_a_run_past_the_date_of_an_override_is_refused_before_it_starts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, overrides={})
    tree = yaml.safe_load(recipe.read_text()) | {"overrides": [declared(until="2020-01-31")]}
    recipe.write_text(yaml.safe_dump(tree))
    done = draftline_here("train", recipe)
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert "recompile_limit=64 (until 2020-01-31): many shapes" in done.err
