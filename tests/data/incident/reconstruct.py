"""Writes the incident's event logs from its published figures: python reconstruct.py FOLDER.

Not a recording. What is known: five target and three drafter replicas on one host of eight GPUs; the drafters on
devices 5, 6, 7 at 0, 3 and 1% utilisation with 86, 96 and 31 GB in use; target queues full, the drafters' queue empty;
4.6 thousand tokens/s where 12.8 had been usual, 37 days to go. All else (60 s, step lengths, clocks, power, the
targets' figures, GB taken as GiB) is filled in so that these come out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftline.monitor.events import (
    Derived,
    Event,
    GpuSample,
    LoggedEvent,
    Phases,
    Resources,
    RunStarted,
    encode,
    log_path,
)

START_S = 1_790_000_000.0
SECONDS = 60
STEP_S = 4.0
TOKENS_PER_S = 4600
GIB = 2**30
DRAFTERS = {5: (0.00, 86), 6: (0.03, 96), 7: (0.01, 31)}  # device: (utilisation, GB in use)
QUEUE_BYTES = 4 * GIB
HEADER = {"reconstructed": __doc__.split("\n\n")[1].replace("\n", " ").strip() if __doc__ else ""}
STARTED = RunStarted(
    {"placement": {"device": "cuda"}}, {"torch": "2.11.0+cu128", "gpus": "8 GPUs"}, 800_200, None, 12800
)


def events_of(rank: int) -> list[tuple[float, Event]]:
    events: list[tuple[float, Event]] = [(0.0, STARTED), (0.0, Derived(HEADER))] if rank == 0 else []
    step = 1000
    for second in range(1, SECONDS + 1):
        if second % STEP_S == 0:
            events.append((float(second), phases_of(rank, step)))
            step += 1
        if second % 5 == 0:
            events.append((second + 0.5, resources_of(rank, step, second)))
    return events


def phases_of(rank: int, step: int) -> Phases:
    tokens = round(TOKENS_PER_S * STEP_S)
    if rank in DRAFTERS:
        seconds = {"get": 0.1, "forward": 1.5, "backward": 2.2, "optimizer": 0.1}
        return Phases(step, "drafter", STEP_S, seconds, tokens // 3, 0, QUEUE_BYTES, 6)
    seconds = {"data": 0.02, "capture": 1.1, "put": 2.8}
    return Phases(step, "target", STEP_S, seconds, tokens // 5, QUEUE_BYTES, QUEUE_BYTES, 0)


def resources_of(rank: int, step: int, second: int) -> Resources:
    busy, held = DRAFTERS.get(rank, (0.27, 71))
    gpu = GpuSample(busy, held * GIB, 141 * GIB, 1980, 1980, 130.0 + 400 * busy, ())
    phase = "backward" if rank in DRAFTERS else "put"
    return Resources(f"cuda:{rank}", step, phase, START_S + second - 1, 1.0, 0.0, 9 * GIB, held * GIB - GIB, gpu)


def write(folder: Path) -> None:
    for rank in range(8):
        lines = [encode(LoggedEvent(START_S + at, rank, event)) + "\n" for at, event in events_of(rank)]
        log_path(folder, rank).write_text("".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
