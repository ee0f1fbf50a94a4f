"""Real ranks for the verdicts' tests: processes that train a small drafter on what other processes capture, timed by
the real clock and sampler into real event logs, each with the fault that a test gives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
from torch import nn

from draftline.monitor.events import CheckpointWritten, EventLog, Phases, Role, log_path
from draftline.monitor.phases import PhaseClock, compiled_graphs
from draftline.monitor.resources import ResourceSampler

CPU = torch.device("cpu")
BATCH_BYTES = 4 * 64 * 64
QUEUE_BATCHES = 4
TOKENS = 64


@dataclass(frozen=True)
class Rank:
    """One rank and its fault. Work is done until its time is over, so that it lasts as long on a busy machine."""

    role: Role = "colocated"
    work_s: float = 0.01  # capture of a target, forward and backward of a drafter; both in a colocated rank
    idle: bool = False  # the work waits instead of computing, as a kernel does that fell back to the host
    data_s: float = 0.0
    checkpoint_s: float = 0.0  # every fifth step
    leak_bytes: int = 0  # kept from every step
    ballast_bytes: int = 0  # held from the start
    new_shape_every: int = 0  # steps; 0: the compiled function always sees one shape
    stuck_at: int | None = None  # the step whose backward does not return


def work(seconds: float, idle: bool, compute: Callable[[], object]) -> None:
    """Compute for three fifths of the time, or wait for all of it. Who always computes is starved on a full machine."""
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        while not idle and time.perf_counter() < now + 0.0015:
            compute()
        time.sleep(min(0.001, seconds))


class Process:
    """What one rank runs."""

    def __init__(self, rank: Rank, channel: Queue[np.ndarray]) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.channel = channel
        self.clock = PhaseClock(CPU)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.kept: list[torch.Tensor] = [torch.ones(rank.ballast_bytes // 4)]
        self.compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)

    def step(self, number: int) -> None:
        rank, clock = self.rank, self.clock
        if rank.role != "drafter":
            with clock.phase("data"):
                work(rank.data_s, True, list)
            with clock.phase("capture"):
                batch = self.capture()
        if rank.role == "target":
            with clock.phase("put"):
                self.channel.put(batch.numpy())
            return
        if rank.role == "drafter":
            with clock.phase("get"):
                batch = torch.from_numpy(self.channel.get())
        self.train(number, batch)

    def capture(self) -> torch.Tensor:
        features = torch.randn(64, 64)
        if self.rank.role == "target":
            work(self.rank.work_s, self.rank.idle, lambda: features @ features)
        return features

    def train(self, number: int, batch: torch.Tensor) -> None:
        rank, clock = self.rank, self.clock
        with clock.phase("forward"):
            if rank.new_shape_every:
                self.compiled(torch.ones(2 + number // rank.new_shape_every))
            loss = self.model(batch).square().mean()
            work(rank.work_s / 2, rank.idle, lambda: batch @ batch)
        with clock.phase("backward"):
            loss.backward()
            work(rank.work_s / 2, rank.idle, lambda: batch @ batch)
            if number == rank.stuck_at:
                time.sleep(600)
        with clock.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.kept.append(torch.ones(rank.leak_bytes // 4))

    def checkpoint(self, log: EventLog, number: int) -> None:
        started = time.perf_counter()
        with self.clock.phase("checkpoint"):
            time.sleep(self.rank.checkpoint_s)
        log.write(CheckpointWritten(number, "step", 4096, time.perf_counter() - started))

    def phases(self, number: int) -> Phases:
        lap = self.clock.lap()
        used = min(self.channel.qsize(), QUEUE_BATCHES) * BATCH_BYTES
        limit = 0 if self.rank.role == "colocated" else QUEUE_BATCHES * BATCH_BYTES
        return Phases(number, self.rank.role, lap.seconds, lap.phases(), TOKENS, used if limit else 0, limit,
                      compiled_graphs())  # fmt: skip


def run_rank(rank: Rank, number: int, run: Path, channel: Queue[np.ndarray]) -> None:
    process = Process(rank, channel)
    with EventLog(log_path(run, number), rank=number) as log, ResourceSampler(log, process.clock, every_s=0.2):
        for step in range(10**9):
            process.step(step)
            if rank.checkpoint_s and step % 5 == 4:
                process.checkpoint(log, step)
            log.write(process.phases(step))


def run_ranks(run: Path, ranks: list[Rank], seconds: float, steps: int, pause: int | None = None) -> None:
    """Run all ranks for `seconds`, and until each that can has done `steps`; then end them. Rank `pause` is stopped
    (SIGSTOP) then, and the others run for `seconds` more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "draftline.monitor.resources"])
    channel = context.Queue(QUEUE_BATCHES)
    processes = [context.Process(target=run_rank, args=(rank, n, run, channel)) for n, rank in enumerate(ranks)]
    for process in processes:
        process.start()
    try:
        while not all(steps_done(run, n) >= (rank.stuck_at or steps) for n, rank in enumerate(ranks)):
            time.sleep(0.1)
            assert all(process.is_alive() for process in processes)
        time.sleep(seconds)
        if pause is not None:
            os.kill(processes[pause].pid, signal.SIGSTOP)
            time.sleep(seconds)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def steps_done(run: Path, rank: int) -> int:
    path = log_path(run, rank)
    return path.read_bytes().count(b'"kind": "phases"') if path.exists() else 0
