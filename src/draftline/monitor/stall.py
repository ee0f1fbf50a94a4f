"""Ranks that have stopped: silent ones, and ones that live but stay in one phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftline.monitor.limits import Limits
from draftline.monitor.notices import short_duration
from draftline.monitor.phases import PHASES, WAITING
from draftline.monitor.window import RankWindow, Window
from draftline.records import Verdict

LONG_PHASES = ("evaluation", "checkpoint")  # as long as they take; a silent process is still seen


def stalled(window: Window, limits: Limits) -> Iterator[Verdict]:
    """The rank that stands still, not those that wait for it."""
    if window.ended:
        return
    silent = [rank for rank in window.ranks if window.end_s - rank.heard_s > limits.silent_s]
    if silent and len(silent) == len(window.ranks) > 1:
        first = min(silent, key=lambda rank: rank.heard_s)
        since = short_duration(window.end_s - max(rank.heard_s for rank in silent))
        yield Verdict(
            "stalled", "severe", f"no rank has written anything for {since}; rank {first.rank} was the first to stop",
            "the run is gone or stopped as a whole: see the launcher's last lines, then go on with --resume",
            tuple(rank.rank for rank in silent),
        )  # fmt: skip
        return
    for rank in silent:
        since = short_duration(window.end_s - rank.heard_s)
        yield Verdict(
            "stalled", "severe", f"rank {rank.rank} has been silent for {since}, last seen in {last_phase(rank)}",
            f"its process is stopped, dead or cut off from the disk: look at rank {rank.rank} (ps, dmesg), then go on "
            "with --resume",
            (rank.rank,),
        )  # fmt: skip
    if not silent:
        yield from stuck(window, limits)


def stuck(window: Window, limits: Limits) -> Iterator[Verdict]:
    standing = [rank for rank in window.ranks if standing_s(rank, window.end_s) > patience_s(rank, limits)]
    causes = [rank for rank in standing if phase_of(rank) not in WAITING]
    for rank in causes or standing:
        since = short_duration(standing_s(rank, window.end_s))
        waiting = waiters(window.ranks, rank)
        yield Verdict(
            "stalled", "severe", f"rank {rank.rank} has been in {last_phase(rank)} for {since}{waiting}",
            f"py-spy dump on rank {rank.rank} shows where it stands; end the run and go on with --resume",
            (rank.rank,),
        )  # fmt: skip


def standing_s(rank: RankWindow, end_s: float) -> float:
    """How long the rank has been in the phase of its newest sample; 0 outside of phases that have to end soon."""
    newest = rank.newest
    if newest is None or newest.phase not in PHASES or newest.phase in LONG_PHASES:
        return 0.0
    return end_s - newest.phase_since_s


def patience_s(rank: RankWindow, limits: Limits) -> float:
    if rank.steps_done == 0:
        return limits.first_step_s
    return max(limits.stuck_s, limits.stuck_steps * rank.median_seconds())


def phase_of(rank: RankWindow) -> str:
    return "" if rank.newest is None else rank.newest.phase


def last_phase(rank: RankWindow) -> str:
    if rank.newest is None:
        return "no phase that it told of"
    return f"{rank.newest.phase} of step {rank.newest.step}"


def waiters(ranks: Sequence[RankWindow], cause: RankWindow) -> str:
    count = sum(phase_of(rank) in WAITING for rank in ranks if rank.rank != cause.rank)
    return f"; {count} other ranks wait" if count else ""
