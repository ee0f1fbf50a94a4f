"""A run that was stopped and went on is the run that was never stopped, bit for bit; another run is refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from builders import save_target
from command import draftline_here
from draftline.monitor.events import RunEnded, RunStarted, Step, read_events
from draftline.train.loop import Launched, Loop
from runs import assert_same_bits, checkpoint_names, write_recipe, write_rows

FIRST, LAST = "step-0000004", "step-0000008"
AT_STEP = 6  # where runs are stopped: after a checkpoint, in the middle of what it does not hold
STEPS_SEEN = [0, 1, 2, 3, 4, 4, 5, 6, 7]  # a step is reported while the next one works: the kill takes the report of 5

KILLED = f"""
import os, pathlib, signal, sys, time
from draftline.cli import main
from draftline.train.loop import Loop
whole_step = Loop.train_step
def train_step(loop):
    launched = whole_step(loop)
    if loop.step == {AT_STEP}:
        limit = time.monotonic() + 60
        while not pathlib.Path(os.environ["ONCE"]).exists() and time.monotonic() < limit:
            time.sleep(0.01)  # a checkpoint is written while training goes on: a slow disk has it later than this step
        os.kill(os.getpid(), signal.SIGKILL)
    return launched
Loop.train_step = train_step
sys.argv[0] = "draftline"
main()
"""


DISPOSITION = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextmanager
def signal_at(step: int, number: signal.Signals, times: int = 1) -> Iterator[None]:
    """The process gets the signal while it works on a step."""
    whole_step = Loop.train_step
    before = signal.signal(number, DISPOSITION[number])  # a runner in the background ignores SIGINT

    def train_step(loop: Loop) -> Launched:
        for _ in range(times if loop.step == step else 0):
            signal.raise_signal(number)  # to this thread: two from outside may arrive as one
        return whole_step(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "train_step", train_step)
        yield
    signal.signal(number, before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run that nobody disturbed."""
    home = tmp_path_factory.mktemp("straight")
    done = draftline_here("train", write_recipe(home))
    assert done.code == 0, done.err
    assert checkpoint_names(home / "run") == [FIRST, LAST]
    return home


@pytest.fixture
def stopped(straight: Path, tmp_path: Path) -> Path:
    """The same run as it lay on the disk after its first checkpoint; target and data are shared with `straight`."""
    for name in ("target", "data.jsonl"):
        (tmp_path / name).symlink_to(straight / name)
    write_recipe(tmp_path)
    shutil.copytree(straight / "run" / "checkpoints" / FIRST, tmp_path / "run" / "checkpoints" / FIRST)
    return tmp_path


def test_killed_in_mid_step_and_resumed(straight: Path, tmp_path: Path) -> None:
    for name in ("target", "data.jsonl"):
        (tmp_path / name).symlink_to(straight / name)
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = [sys.executable, "-c", KILLED, "train", str(recipe)]
    once = {"ONCE": str(run / "checkpoints" / FIRST)}
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | once)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint_names(run) == [FIRST]
    done = draftline_here("train", recipe, "--resume")
    assert done.code == 0, done.err
    assert_same_bits(run / "checkpoints" / LAST, straight / "run" / "checkpoints" / LAST)
    events = [logged.event for logged in read_events(run / "events.jsonl").events]
    assert [event.resumed_from_step for event in events if isinstance(event, RunStarted)] == [None, 4]
    assert [event.report.step for event in events if isinstance(event, Step)] == STEPS_SEEN
    summary, whole = (json.loads((home / "run" / "summary.json").read_text()) for home in (tmp_path, straight))
    for key in ("steps", "target_tokens", "loss", "proxy_tau"):
        assert summary[key] == whole[key]


def test_resumed_with_features_kept_on_the_device(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, target={"path": str(tmp_path / "target"), "keep_features_gib": 1.0})
    whole = draftline_here("train", recipe, f"train.out={tmp_path / 'whole'}")
    assert whole.code == 0 and "GiB kept" in whole.out, whole.err
    with signal_at(AT_STEP, signal.SIGINT):
        assert draftline_here("train", recipe).code == 130
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000007")
    done = draftline_here("train", recipe, "--resume")
    assert done.code == 0 and "GiB kept" in done.out, done.err
    assert_same_bits(tmp_path / "run" / "checkpoints" / LAST, tmp_path / "whole" / "checkpoints" / LAST)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_then_ends(straight: Path, stopped: Path, number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with signal_at(AT_STEP, number):
        ended = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert ended.code == code
    assert ended.err.endswith(f"interrupted by {number.name}\n  checkpoint of step 7 of 8 saved: go on with --resume\n")
    assert signal.getsignal(number) == before
    run = stopped / "run"
    assert checkpoint_names(run) == [FIRST, "step-0000007"]
    assert not (run / "export").exists()
    assert read_events(run / "events.jsonl").events[-1].event == RunEnded(
        "interrupted", f"interrupted by {number.name}"
    )
    done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 0, done.err
    assert checkpoint_names(run) == ["step-0000007", LAST]
    assert_same_bits(run / "checkpoints" / LAST, straight / "run" / "checkpoints" / LAST)


def test_a_signal_before_the_first_step_is_done(straight: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "run")
    with signal_at(0, signal.SIGINT):
        assert draftline_here("train", stopped / "recipe.yaml").code == 130
    assert checkpoint_names(stopped / "run") == ["step-0000001"]
    assert draftline_here("train", stopped / "recipe.yaml", "--resume").code == 0
    assert_same_bits(stopped / "run" / "checkpoints" / LAST, straight / "run" / "checkpoints" / LAST)


def test_a_signal_that_the_process_ignores_stays_ignored(stopped: Path) -> None:
    with signal_at(AT_STEP, signal.SIGINT):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 0, done.err


def test_a_second_signal_ends_at_once(stopped: Path) -> None:
    with signal_at(AT_STEP, signal.SIGINT, times=2):
        ended = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert ended.code == 130
    assert checkpoint_names(stopped / "run") == [FIRST]
    assert read_events(stopped / "run" / "events.jsonl").events[-1].event == RunEnded("interrupted")


def test_a_half_written_checkpoint_is_ignored(straight: Path, stopped: Path) -> None:
    """Killed while writing step 8: what lies there is neither resumed from nor in the way."""
    checkpoints = stopped / "run" / "checkpoints"
    half = checkpoints / f".partial-{LAST}"
    half.mkdir()
    (half / "drafter.safetensors").write_bytes(b"half")
    done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 0, done.err
    assert checkpoint_names(stopped / "run") == [FIRST, LAST]
    assert_same_bits(checkpoints / LAST, straight / "run" / "checkpoints" / LAST)


def test_a_disk_that_is_full_harms_no_earlier_checkpoint(straight: Path, stopped: Path) -> None:
    """Files may not grow past 80,000 bytes: the event log and an export still fit, the next checkpoint does not."""
    checkpoints = stopped / "run" / "checkpoints"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, limits[1]))
    try:
        full = draftline_here("train", stopped / "recipe.yaml", "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.code == 1
    assert f"error: checkpoint {checkpoints / LAST} could not be written: " in full.err
    assert "earlier checkpoints are whole: go on with --resume" in full.err
    assert checkpoint_names(stopped / "run") == [FIRST]
    assert_same_bits(checkpoints / FIRST, straight / "run" / "checkpoints" / FIRST)
    last = read_events(stopped / "run" / "events.jsonl").events[-1].event
    assert isinstance(last, RunEnded) and last.status == "failed" and "could not be written" in last.reason
    assert draftline_here("train", stopped / "recipe.yaml", "--resume").code == 0
    assert_same_bits(checkpoints / LAST, straight / "run" / "checkpoints" / LAST)


def other_target(home: Path) -> None:
    (home / "target").unlink()
    save_target(home / "target", seed=1)


def other_template(home: Path) -> None:
    folder = Path(shutil.copytree((home / "target").resolve(), home / "copy"))
    (home / "target").unlink()
    folder.rename(home / "target")
    template = home / "target" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# the same text #}")


def other_data(home: Path) -> None:
    (home / "data.jsonl").unlink()
    write_rows(home / "data.jsonl", shift=1)


def unchanged(home: Path) -> None:
    pass


DIFFERENT: list[tuple[Callable[[Path], None], list[str], list[str]]] = [
    (other_target, [], ["target weights"]),
    (other_template, [], ["chat template"]),
    (other_data, [], ["data"]),
    (unchanged, ["drafter.taps=[0, 3]"], ["drafter.target_layer_ids: checkpoint [0, 2], now [0, 3]"]),
    (unchanged, ["train.seed=1"], ["train.seed: checkpoint 0, now 1"]),
    (unchanged, ["optim.lr=1.0e-3"], ["optim.lr: checkpoint 0.0006, now 0.001"]),
    (unchanged, ["train.epochs=4"], ["train.epochs: checkpoint 3, now 4"]),
    (unchanged, ["train.max_steps=9"], ["train.max_steps: checkpoint 8, now 9"]),
    (unchanged, ["target.dtype=bfloat16"], ["target dtype: checkpoint 'float32', now 'bfloat16'"]),
    (
        other_data,
        ["loss.kind=ce", "train.anchors=5"],
        ["data", "loss.kind: checkpoint 'kl', now 'ce'", "train.anchors: checkpoint 6, now 5"],
    ),
]


@pytest.mark.parametrize(("change", "words", "named"), DIFFERENT)
def test_another_run_is_refused_naming_what_differs(
    stopped: Path, change: Callable[[Path], None], words: list[str], named: list[str]
) -> None:
    change(stopped)
    done = draftline_here("train", stopped / "recipe.yaml", *words, "--resume")
    assert done.code == 2
    message = done.err[done.err.index("error: ") :].splitlines()
    assert message[0] == f"error: cannot resume from {stopped / 'run' / 'checkpoints' / FIRST}:"
    assert message[-1] == "  restore what differs, or start a new run in another train.out"
    differences = [line.strip() for line in message[1:-1]]
    assert len(differences) == len(named)
    assert [
        want for want, line in zip(sorted(named), sorted(differences), strict=True) if not line.startswith(want)
    ] == []
    assert checkpoint_names(stopped / "run") == [FIRST]


def test_a_checkpoint_with_spoilt_tensors_is_no_traceback(stopped: Path) -> None:
    path = stopped / "run" / "checkpoints" / FIRST / "drafter.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if name != "fc.weight"}, path)
    done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 2 and "drafter.safetensors" in done.err and "missing: fc.weight" in done.err
    path.write_bytes(b"not safetensors")
    done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 2 and "drafter.safetensors: not a whole safetensors file" in done.err


def test_a_finished_run_resumed_trains_nothing_and_writes_no_checkpoint_again(straight: Path) -> None:
    last = straight / "run" / "checkpoints" / LAST
    before = last.stat()
    done = draftline_here("train", straight / "recipe.yaml", "--resume")
    assert done.code == 0, done.err
    assert "none: no step was left to do" in done.out
    assert (last.stat().st_ino, last.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_resumed_before_any_checkpoint_was_written(straight: Path, stopped: Path) -> None:
    """A launcher restarts with --resume in any case; here it begins again, and says so."""
    shutil.rmtree(stopped / "run" / "checkpoints" / FIRST)
    done = draftline_here("train", stopped / "recipe.yaml", "--resume")
    assert done.code == 0, done.err
    assert f"{stopped / 'run' / 'checkpoints'} holds no checkpoint yet: from the first step" in done.out
    assert_same_bits(stopped / "run" / "checkpoints" / LAST, straight / "run" / "checkpoints" / LAST)
