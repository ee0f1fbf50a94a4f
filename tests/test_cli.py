"""The command line as a person meets it: words, exit codes, and how long an answer takes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline import __version__

VERBS = ["quickstart", "train", "regenerate", "export", "eval", "check", "compare"]
HELP_LIMIT_S = 0.5
TRIES = 8


def draftline(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "draftline", *words], capture_output=True, text=True, check=False)


def test_help_names_every_verb_within_half_a_second() -> None:
    times_s = []
    for _ in range(TRIES):  # a busy machine is not a slow import
        start_s = time.perf_counter()
        done = draftline("--help")
        times_s.append(time.perf_counter() - start_s)
        assert done.returncode == 0
        assert [verb for verb in VERBS if f"\n  {verb} " not in done.stdout] == []
        if times_s[-1] < HELP_LIMIT_S:
            return
    pytest.fail(f"--help took {min(times_s):.2f} s at best; at most {HELP_LIMIT_S} s")


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['draftline', '--help']\n"
        "from draftline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    done = draftline(verb, "--help")
    assert done.returncode == 0
    assert f"draftline {verb} [OPTIONS]" in done.stdout.splitlines()[0]


def test_version() -> None:
    done = draftline("--version")
    assert (done.returncode, done.stdout) == (0, f"draftline {__version__}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch"], "No such command 'launch'"),
        (["train"], "Missing argument"),
        (["train", "recipe.yaml", "--frobnicate"], "No such option"),
        (["eval", "--target", "t", "--prompts", "p.jsonl"], "Missing option '--draft'"),
        (["export", "a", "b", "--format", "gguf"], "'gguf' is not one of 'reference', 'speculators'"),
        (["regenerate", "--target", "t", "--prompts", "p", "--out", "o", "--batch-size", "0"], "'--batch-size'"),
    ],
)
def test_a_wrong_word_is_said_without_traceback_and_ends_with_2(words: list[str], message: str) -> None:
    done = draftline(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_recipe_is_said_on_stderr_with_2(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("target: {path: t}\ndata: {train: a.jsonl}\n")
    done = draftline("train", str(recipe), "train.epochs=0", "train.epoch=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: recipe {recipe}:\n")
    assert "train.epoch: unknown key; allowed here: " in done.stderr
    assert "train.epochs: Input should be greater than or equal to 1, got 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        (
            "InputError('option --x 3 is odd', 'give an even one')",
            2,
            "error: option --x 3 is odd\n  give an even one\n",
        ),
        ("RunError('loss is not finite at step 7')", 1, "error: loss is not finite at step 7\n"),
        ("KeyboardInterrupt", 130, None),
        ("ZeroDivisionError('a bug')", 1, None),
    ],
)
def test_exit_codes_of_what_a_verb_raises(raised: str, code: int, stderr: str | None) -> None:
    script = (
        "import sys; from draftline.cli import app, main; from draftline.errors import InputError, RunError\n"
        f"def fail():\n    raise {raised}\n"
        "app.command('fail')(fail); sys.argv = ['draftline', 'fail']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    if stderr is not None:
        assert done.stderr == stderr


def test_a_bug_shows_its_plain_traceback() -> None:
    script = (
        "import sys; from draftline.cli import app, main\n"
        "app.command('fail')(lambda: 1 / 0); sys.argv = ['draftline', 'fail']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "\x1b" not in done.stderr
