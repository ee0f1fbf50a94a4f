"""Replicas that do the same work compared with each other: time, memory and rate."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from draftline.monitor.limits import Limits
from draftline.monitor.phases import WAITING, WORK
from draftline.monitor.window import RankWindow, Window
from draftline.records import Verdict

GIB = 2**30


def groups(window: Window, limits: Limits) -> Iterator[tuple[RankWindow, ...]]:
    """Ranks of one role, where there are several and each has done enough to be compared."""
    for role in ("colocated", "target", "drafter"):
        ranks = tuple(rank for rank in window.of(role) if len(rank.steps) >= limits.fewest_steps)
        if len(ranks) > 1:
            yield ranks


def straggler(window: Window, limits: Limits) -> Iterator[Verdict]:
    """Slower in its own work; waits for others and for data are not counted. The median of two is the faster one."""
    for ranks in groups(window, limits):
        seconds = {rank.rank: rank.median_seconds(*WORK) for rank in ranks}
        usual = median_low(seconds.values())
        for rank, own in seconds.items():
            if own > limits.straggler_factor * usual and own - usual > limits.straggler_s:
                waits = max(peer.share(*WAITING) for peer in ranks if peer.rank != rank)
                yield Verdict(
                    "straggler",
                    "warning",
                    f"rank {rank} works {own * 1e3:.0f} ms a step, its peers {usual * 1e3:.0f} ms: {own / usual:.1f} "
                    f"times as long; they wait up to {waits:.0%} of their time",
                    f"look at rank {rank}'s device and host: clocks, other processes, PCIe width (nvidia-smi)",
                    (rank,),
                )


def unlike_memory(window: Window, limits: Limits) -> Iterator[Verdict]:
    """A replica that holds less than its peers has lost or not loaded something; one that holds more leaks or shares
    its device."""
    for role in ("colocated", "target", "drafter"):
        held = {rank.rank: rank.memory_bytes for rank in window.of(role)}
        known = {rank: value for rank, value in held.items() if value is not None}
        if len(known) < 2:
            continue
        usual = median_low(known.values())
        for rank, own in known.items():
            if abs(own - usual) > max(limits.peer_gap * usual, limits.peer_gap_bytes):
                others = ", ".join(f"{value / GIB:.3g}" for peer, value in known.items() if peer != rank)
                yield Verdict(
                    "replica unlike its peers",
                    "severe" if own < usual else "warning",
                    f"{role} rank {rank} holds {own / GIB:.3g} GiB, its peers {others} GiB",
                    f"rank {rank} runs degraded or shares its device: see its log and nvidia-smi, then restart the run",
                    (rank,),
                )


def unlike_rate(window: Window, limits: Limits) -> Iterator[Verdict]:
    for ranks in groups(window, limits):
        rates = {rank.rank: rank.tokens_per_s for rank in ranks}
        usual = sorted(rates.values())[len(rates) // 2]
        for rank, own in rates.items():
            if own < (1 - limits.peer_gap) * usual:
                yield Verdict(
                    "replica unlike its peers",
                    "warning",
                    f"rank {rank} takes {own:,.0f} tokens/s, its peers {usual:,.0f}",
                    f"look at what rank {rank} waits for in the table of draftline watch",
                    (rank,),
                )
