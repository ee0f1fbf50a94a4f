"""`draftline train` on one host: it starts its ranks itself, through torch.distributed's elastic process layer.

Everything binds to loopback. Whatever ends one rank ends the attempt: the cause is named, and the world starts again
from the newest complete checkpoint, a bounded number of times. On many hosts torchrun does this, and ranks join.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from draftline.config import Recipe
from draftline.environment import variables
from draftline.errors import InputError, Interrupted, RunError
from draftline.monitor.notices import Notices
from draftline.train.folder import RunFolder, complete_checkpoints
from draftline.train.interruption import SIGNALS
from draftline.train.plan import Plan, World, make_plan, ranks_wanted

RESTARTS = 3  # where the recipe says nothing
LAST_LINES = 12
POLL_S = 0.1
END_S = 3.0  # that ranks get to end by themselves once another has died; one in a collective on its GPU does not
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast is refused inside many containers, and one all-reduce a step needs it not
}


def local_world(recipe: Recipe) -> World:
    """The world that this host would start for a recipe."""
    cuda = recipe.placement.device != "cpu" and torch.cuda.is_available()
    devices = torch.cuda.device_count() if cuda else 1
    ranks = ranks_wanted(recipe.placement, devices, recipe.micro_batches_per_step)
    if cuda and ranks > devices:
        raise InputError(
            f"placement asks for {ranks} ranks, and this host has {devices} CUDA devices",
            "lower placement.targets or placement.drafters, or start the ranks on more hosts with torchrun",
        )
    return World(ranks, ranks, "cuda" if cuda else "cpu")


def needs_launcher(recipe: Recipe, world: World) -> bool:
    """Whether ranks run in processes of their own. One rank does on a GPU, where the 2 s that a launcher takes to load
    torch vanish beside loading and compiling, and a restart may save a night; on a CPU only if restarts are asked for,
    so that a quickstart starts at once."""
    return world.ranks > 1 or world.device == "cuda" or bool(recipe.placement.max_restarts)


def launch(
    recipe: Recipe, folder: RunFolder, world: World, notices: Notices, rank_main: Callable[..., None] | None = None
) -> None:
    """Run the recipe on `world` to its end. Raises RunError naming the rank that failed last, Interrupted after a
    signal. The ranks' own output is kept under RUN/ranks.

    rank_main: what a rank does with the words of its command line, forked from this process; None: a new `draftline`.
    """
    plan = make_plan(recipe.placement, world)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said better here
    restarts = RESTARTS if recipe.placement.max_restarts is None else recipe.placement.max_restarts
    logs = folder.ranks
    logs.mkdir(exist_ok=True)
    recipe_file = logs / "recipe.yaml"
    recipe_file.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    name = f"{variables.OWN_LAUNCH}{os.getpid()}-{time.time_ns()}"
    for attempt in range(restarts + 1):
        resume = attempt > 0 or bool(complete_checkpoints(folder.checkpoints))
        words = ("train", str(recipe_file), *(["--resume"] if resume else []))
        outcome = run_attempt(Attempt(plan, world, words, logs, attempt, name), rank_main)
        if outcome.signal is not None:
            raise interrupted(outcome, folder)
        if outcome.failure is None:
            return
        outcome.failure.refuse_what_a_restart_cannot_mend()
        found = complete_checkpoints(folder.checkpoints)
        since = found[-1].name if found else "the first step, for there is no checkpoint yet"
        if attempt < restarts:
            notices.warn("a rank ended", outcome.failure.text, f"restart {attempt + 1} of {restarts}, from {since}")
    assert outcome.failure is not None
    raise RunError(
        f"{outcome.failure.text}\n  ended after {restarts} restarts", "mend the cause, then go on with --resume"
    )


@dataclass(frozen=True)
class Attempt:
    plan: Plan
    world: World
    words: tuple[str, ...]
    logs: Path
    number: int
    launch: str  # a name that no other launch has

    def environment(self, local: int, port: int) -> dict[str, str]:
        """What torchrun would set, loopback, a share of the cores, and one visible device."""
        count = self.world.ranks
        gpus = variables.visible_gpus() or [str(index) for index in range(count)]
        return {
            "RANK": str(local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": self.launch,
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            **({"CUDA_VISIBLE_DEVICES": gpus[local]} if self.world.device == "cuda" else {}),
            **variables.missing(LOOPBACK | {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}),
        }  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """The rank that ended an attempt."""

    role: str  # "rank 1 (drafter 1, cpu)"
    how: str  # signal or exception
    exit_code: int
    last_lines: list[str]

    @property
    def text(self) -> str:
        return "\n    ".join([f"{self.role}: {self.how}", *self.last_lines])

    def refuse_what_a_restart_cannot_mend(self) -> None:
        """Bad input stays bad, and so does a loss that is not finite or a full disk."""
        if self.exit_code == 2:
            raise InputError(self.how.removeprefix("InputError: "))
        if self.how.startswith("RunError: "):
            raise RunError(f"{self.role}: {self.how.removeprefix('RunError: ')}")


@dataclass
class Outcome:
    failure: Failure | None = None
    signal: signal.Signals | None = None  # that was forwarded to the ranks


def run_attempt(attempt: Attempt, rank_main: Callable[..., None] | None) -> Outcome:
    """Start every rank and wait for the end of all, or of one."""
    store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, and not said so
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    local = range(attempt.world.ranks)
    words = attempt.words if rank_main is not None else ("-m", "draftline", *attempt.words)
    context = start_processes(
        "draftline",
        sys.executable if rank_main is None else rank_main,
        args={rank: words for rank in local},
        envs={rank: attempt.environment(rank, store.port) for rank in local},
        logs_specs=DefaultLogsSpecs(
            str(attempt.logs), redirects={rank: Std.ERR if rank == 0 else Std.ALL for rank in local}
        ),
        start_method="fork",
    )
    outcome = Outcome()
    with forwarded_signals(context, outcome):
        failures = wait_for_end(context)
    if failures:
        outcome.failure = failure_of(attempt.plan, context, find_cause(failures))
    return outcome


@dataclass(frozen=True)
class Ended:
    """A rank that ended badly; `later`: after others, by the launcher's own signal or not."""

    failure: ProcessFailure
    later: bool

    @property
    def is_consequence(self) -> bool:
        code = self.failure.exitcode
        ended_here = self.later and code in (-signal.SIGTERM, -signal.SIGKILL)
        return ended_here or message_of(self.failure).startswith("PeerLost")


def wait_for_end(context: PContext) -> list[Ended]:
    """Until all ranks have ended; once one has ended badly the others are made to in END_S (torch itself takes 30 s
    over ranks that hang in a collective). None where all went well."""
    pids = context.pids()
    while not (first := ended_badly(pids, context)):
        result = context.wait(timeout=0)
        if result is not None:
            return [Ended(failure, False) for failure in result.failures.values()]
        time.sleep(POLL_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        limit = time.monotonic() + END_S
        running = [pid for pid in pids.values() if exit_code(pid) is None]
        for pid in running:
            os.kill(pid, number)
        while any(exit_code(pid) is None for pid in running) and time.monotonic() < limit:
            time.sleep(POLL_S)
    last = ended_badly(pids, context)
    context.close(signal.SIGKILL)
    return [Ended(failure, rank not in first) for rank, failure in last.items()]


def ended_badly(pids: dict[int, int], context: PContext) -> dict[int, ProcessFailure]:
    """By rank."""
    codes = {rank: exit_code(pid) for rank, pid in pids.items()}
    return {r: ProcessFailure(r, pids[r], code, context.error_files[r]) for r, code in codes.items() if code}


def exit_code(pid: int) -> int | None:
    """None while the process runs, minus the signal's number where one has ended it. Leaves it to be waited for."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # has been waited for: it ended well, or `context` tells
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@contextmanager
def forwarded_signals(context: PContext, outcome: Outcome) -> Iterator[None]:
    """The first SIGINT or SIGTERM is handed to every rank, which save and end; a second ends them at once."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if outcome.signal is not None:
            context.close(signal.SIGKILL)
            return
        outcome.signal = signal.Signals(number)
        for pid in context.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_cause(ended: list[Ended]) -> ProcessFailure:
    """The failure that came first and is not the loss of another rank."""
    return min(ended, key=lambda one: (one.is_consequence, one.later, one.failure.timestamp)).failure


def failure_of(plan: Plan, context: PContext, cause: ProcessFailure) -> Failure:
    """With what the rank said last."""
    role = plan.roles[cause.local_rank]
    logs = [context.stderrs[cause.local_rank], context.stdouts[cause.local_rank]]
    lines = [line for path in logs if path for line in tail(Path(path))]
    return Failure(f"rank {role.rank} ({role.name}, {role.device})", how_it_ended(cause), cause.exitcode, lines)


def message_of(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message["message"] if isinstance(message, dict) else message)


def how_it_ended(failure: ProcessFailure) -> str:
    said = message_of(failure)
    if failure.exitcode < 0 and not said.startswith("stalled"):
        return f"ended by {signal.Signals(-failure.exitcode).name}"
    return said if failure.error_file != "<N/A>" else f"exit code {failure.exitcode}"


def tail(path: Path) -> list[str]:
    """The last lines; of a rank that was made to print its stacks, those of the thread that stood still."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    stuck = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    return lines[stuck[-1] :][:LAST_LINES] if stuck else lines[-LAST_LINES:]


def interrupted(outcome: Outcome, folder: RunFolder) -> Interrupted:
    assert outcome.signal is not None
    found = complete_checkpoints(folder.checkpoints)
    saved = f"checkpoint {found[-1].name} saved: go on with --resume" if found else "no checkpoint was written"
    return Interrupted(outcome.signal.name, outcome.signal, saved)
