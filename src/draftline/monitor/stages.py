"""Which stage limits a run, from who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from draftline.monitor.limits import Limits
from draftline.monitor.phases import CAPTURING, DRAFTING
from draftline.monitor.window import RankWindow, Window
from draftline.records import Verdict


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def listed(ranks: Sequence[RankWindow]) -> str:
    """ "rank 3" or "drafter ranks 5, 6, 7"."""
    if len(ranks) == 1:
        return f"{ranks[0].role} rank {ranks[0].rank}" if ranks[0].role != "colocated" else f"rank {ranks[0].rank}"
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"{ranks[0].role} ranks {numbers}" if ranks[0].role != "colocated" else f"ranks {numbers}"


def bottleneck(window: Window, limits: Limits) -> Iterator[Verdict]:
    """At most one verdict: what limits the run. Data before stages, as a stage that lacks data makes others wait."""
    ranks = [rank for rank in window.ranks if len(rank.steps) >= limits.fewest_steps]
    if not ranks or len(ranks) < len(window.ranks):
        return
    late = [rank for rank in ranks if rank.share("data") >= limits.data_share]
    if late:
        worst = max(late, key=lambda rank: rank.share("data"))
        yield Verdict(
            "data-bound",
            "warning",
            f"{listed(late)} wait for rows {worst.share('data'):.0%} of the time "
            f"({worst.median_seconds('data') * 1e3:.0f} ms of a {worst.median_seconds() * 1e3:.0f} ms step)",
            "put the data on a faster disk, or give the host more free cores",
            numbers_of(late),
        )
    elif window.of("target"):
        yield from between_stages(window, limits)
    else:
        yield from within_ranks(window, limits)


def between_stages(window: Window, limits: Limits) -> Iterator[Verdict]:
    targets, drafters = window.of("target"), window.of("drafter")
    put, get = mean(rank.share("put") for rank in targets), mean(rank.share("get") for rank in drafters)
    fill = mean(rank.queue_fill or 0.0 for rank in targets)
    if max(put, get) < limits.wait_share:
        return
    numbers = f"the targets wait {put:.0%} of their time in put, the drafters {get:.0%} in get; queues {fill:.0%} full"
    if min(put, get) >= limits.wait_share:
        yield Verdict("channel-bound", "warning", numbers, "the transport is slow: draftline doctor measures its rates")
    elif get > put:
        starved = get >= limits.starved_share
        yield Verdict(
            "channel starved" if starved else "target-bound",
            "warning" if starved else "note",
            numbers,
            "let more ranks hold the target, fewer train the drafter",
            numbers_of(targets),
        )
    else:
        full = put >= limits.starved_share
        yield Verdict(
            "channel full" if full else "drafter-bound",
            "warning" if full else "note",
            numbers,
            "let more ranks train the drafter, fewer hold the target",
            numbers_of(drafters),
        )


def within_ranks(window: Window, limits: Limits) -> Iterator[Verdict]:
    """Colocated ranks: the stage that takes most of the step. Nothing is wrong with either."""
    capture = mean(rank.share(*CAPTURING) for rank in window.ranks)
    drafting = mean(rank.share(*DRAFTING) for rank in window.ranks)
    numbers = f"of a step, {capture:.0%} is the target's forward and {drafting:.0%} the drafter's"
    if capture >= limits.main_share:
        remedy = "target.keep_features_gib keeps what fits, so that one capture serves all epochs"
        yield Verdict("target-bound", "note", numbers, remedy)
    elif drafting >= limits.main_share:
        yield Verdict("drafter-bound", "note", numbers, "as it should be with one device: the drafter is what trains")


def numbers_of(ranks: Sequence[RankWindow]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)
