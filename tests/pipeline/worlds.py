"""Worlds of ranks for tests: real processes, forked from the test's own, so that none of them imports torch again."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

import draftline.train.run  # noqa: F401  # by the process that ranks are forked from, so that none of them loads it again
import draftline.train.start as start
from draftline.cli import main
from draftline.config import load_recipe
from draftline.monitor.notices import Notices, stdout_console
from draftline.train.folder import open_run_folder
from draftline.train.launch import launch, local_world
from draftline.train.plan import World

FORK = get_context("fork")
LIMIT_S = 90.0
Hook = Callable[[], None]  # run in every rank before its first line: where a test breaks one on purpose


def rank_main(hook: Hook | None = None) -> Callable[..., None]:
    """A rank as `launch` forks it, after `hook`."""

    def run(*words: str) -> None:
        all_are_forked()
        sys.argv = ["draftline", *words]
        if hook is not None:
            hook()
        main()

    return run


def all_are_forked() -> None:
    """The launcher's store has a thread, and a lock that it holds in a fork stays locked in the child: so no rank
    speaks to the store before the last one is there. A launcher that starts programs instead needs none of this."""
    launcher, limit = psutil.Process(os.getppid()), time.monotonic() + LIMIT_S
    while len(launcher.children()) < int(os.environ["LOCAL_WORLD_SIZE"]) and time.monotonic() < limit:
        time.sleep(0.01)


@dataclass
class Ended:
    """How a launched run ended, and after how long."""

    code: int | None
    out: str
    seconds: float


def run_world(
    recipe: Path, *overrides: str, hook: Hook | None = None, resume: bool = False, ranks: int | None = None
) -> Ended:
    """`draftline train`, its launcher in a process of its own, its ranks forked from that.

    ranks: as if this host had so many devices.
    """
    process, log = start_world(recipe, *overrides, hook=hook, resume=resume, ranks=ranks)
    return end_of(process, log)


def start_world(
    recipe: Path, *overrides: str, hook: Hook | None = None, resume: bool = False, ranks: int | None = None
) -> tuple[Any, Path]:
    log = recipe.parent / f"launcher-{time.monotonic_ns()}.log"
    process = FORK.Process(target=launcher, args=(recipe, overrides, hook, resume, ranks, log))
    process.started = time.monotonic()
    process.start()
    return process, log


def end_of(process: Any, log: Path) -> Ended:
    process.join(LIMIT_S)
    if process.is_alive():
        stacks = stacks_of(process.pid, log.parent)
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        process.kill()
        raise AssertionError(f"the world did not end within {LIMIT_S} s:\n{log.read_text()}\n{stacks}")
    return Ended(process.exitcode, log.read_text(), time.monotonic() - process.started)


def stacks_of(launcher: int, home: Path) -> str:
    """Where each process of a world stands: its launcher says so in its log, the ranks in theirs, returned here."""
    for process in (psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)):
        process.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    said = {path: path.read_text(errors="replace") for path in sorted(home.rglob("stderr.log"))}
    return "\n".join(f"{path.parent.name}: {text}" for path, text in said.items() if "most recent call first" in text)


def launcher(
    recipe: Path, overrides: Sequence[str], hook: Hook | None, resume: bool, ranks: int | None, log: Path
) -> None:
    """As `draftline train` does it, with ranks forked instead of started anew."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=2)  # the ranks', which inherit it, is another 2

    whole = start.train

    def verb(*_: Any, **__: Any) -> None:
        start.train = whole  # for the ranks, which are forked from here
        parsed = load_recipe(recipe, list(overrides))
        folder = open_run_folder(parsed.train.out, resume)
        world = local_world(parsed) if ranks is None else World(ranks, ranks, "cpu")
        launch(parsed, folder, world, Notices(stdout_console()), rank_main(hook))

    start.train = verb  # the verb parses its words, answers errors and chooses the exit code
    sys.argv = ["draftline", "train", str(recipe), *overrides, *(["--resume"] if resume else [])]
    main()


@dataclass(frozen=True)
class Fault:
    """What happens to one rank of the first attempt at the nth call of a method.

    once: a path that must exist first, at most `LIMIT_S` seconds later: a checkpoint, which is written while training
    goes on and so may be there later than the step after it.
    """

    rank: int
    owner: Any
    method: str
    call: int
    happens: Callable[[], None]
    once: Path | None = None

    def __call__(self) -> None:
        if os.environ["RANK"] != str(self.rank) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        whole, calls = getattr(self.owner, self.method), [0]

        def broken(*args: Any, **words: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.call:
                if self.once is not None:
                    until_exists(self.once)
                self.happens()
            return whole(*args, **words)

        setattr(self.owner, self.method, broken)


def until_exists(path: Path) -> None:
    limit = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > limit:
            raise AssertionError(f"{path} was not there after {LIMIT_S} s")
        time.sleep(0.01)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def frozen() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def busy() -> None:
    time.sleep(3600)


def raises() -> None:
    raise ValueError("a fault of this test's making")
