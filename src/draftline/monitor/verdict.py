"""Health verdicts: from one window of events to what is so, with the numbers that show it and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftline.monitor.history import KnownGood, differences
from draftline.monitor.limits import LIMITS, Limits
from draftline.monitor.notices import short_count, short_duration
from draftline.monitor.peers import straggler, unlike_memory, unlike_rate
from draftline.monitor.phases import DRAFTING, WORK
from draftline.monitor.stages import bottleneck, listed, mean
from draftline.monitor.stall import stalled
from draftline.monitor.window import RankWindow, Window, memory_of
from draftline.records import Severity, Verdict

SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "note", "ok")
DEGRADED = "degraded kernels"
GIB = 2**30


def judge(window: Window, best: KnownGood | None, limits: Limits = LIMITS) -> tuple[Verdict, ...]:
    """Every verdict that holds, the worst first; "balanced" where nothing limits and nothing is wrong.

    best: this recipe's fastest run on this kind of device so far, where there is one. A pure function: the same
    window always gives the same verdicts. A window without enough steps gives "warming up".
    """
    found = [verdict for rule in RULES for verdict in rule(window, limits)]
    if not any(verdict.name == DEGRADED for verdict in found):  # more ranks would be no cure for those
        found += bottleneck(window, limits)
    found += below_best(window, best, limits)
    if not found:
        found = [Verdict("balanced", "ok", balance(window))] if measurable(window, limits) else [WARMING_UP]
    return tuple(sorted(found, key=lambda verdict: SEVERITIES.index(verdict.severity)))


WARMING_UP = Verdict("warming up", "ok", "too few steps after the warm-up to say anything")


def measurable(window: Window, limits: Limits) -> bool:
    return bool(window.ranks) and all(len(rank.steps) >= limits.fewest_steps for rank in window.ranks)


def balance(window: Window) -> str:
    waits = mean(rank.share("get", "put", "data") for rank in window.ranks)
    return f"{short_count(window.tokens_per_s)} tokens/s; {waits:.0%} of the time is spent waiting"


def degraded_kernels(window: Window, limits: Limits) -> Iterator[Verdict]:
    """A stage that limits the run while its devices idle: what it runs is not the kernel that it should run.

    The incident's signs: target queues full, so the drafters are the slow stage, yet their GPUs are at 0 to 3%.
    """
    for ranks, why in limiting(window, limits):
        shown = [rank.utilisation for rank in ranks]
        known = [value for value in shown if value is not None]
        if not known or max(known) >= limits.idle_share or launch_bound(ranks, limits):
            continue
        busy = ", ".join(f"{value:.0%}" for value in known)
        yield Verdict(
            DEGRADED,
            "severe",
            f"{listed(ranks)} limit{'s' if len(ranks) == 1 else ''} the run ({why}), yet the "
            f"device{'s are' if len(known) > 1 else ' is'} {busy} busy; a stage that limits is above "
            f"{limits.idle_share:.0%}",
            "compiled code has fallen back or waits for the host: draftline doctor tries the kernels, draftline "
            "compare says what changed since the last good run; take out any switch that hides compiler errors",
            tuple(rank.rank for rank in ranks),
        )


def launch_bound(ranks: tuple[RankWindow, ...], limits: Limits) -> bool:
    """Whether the steps of GPU ranks are so short that the host's launches may leave the devices idle."""
    on_gpu = any(sample.gpu is not None for rank in ranks for sample in rank.samples)
    return on_gpu and all(rank.median_seconds() < limits.launch_bound_s for rank in ranks)


def limiting(window: Window, limits: Limits) -> Iterator[tuple[tuple[RankWindow, ...], str]]:
    """(ranks of a stage that limits, the numbers that say so)."""
    targets, drafters = window.of("target"), window.of("drafter")
    if enough(targets, limits) and enough(drafters, limits):
        put, get = mean(r.share("put") for r in targets), mean(r.share("get") for r in drafters)
        if put >= limits.wait_share > get:
            fill = mean(r.queue_fill or 0.0 for r in targets)
            yield drafters, f"the targets wait {put:.0%} of their time to hand over, their queues {fill:.0%} full"
        elif get >= limits.wait_share > put:
            yield targets, f"the drafters wait {get:.0%} of their time for features"
    for rank in window.of("colocated"):
        if enough((rank,), limits) and rank.share(*WORK) >= limits.main_share:
            yield (rank,), f"{rank.share(*WORK):.0%} of its step is computing, {rank.share(*DRAFTING):.0%} the drafter"


def enough(ranks: tuple[RankWindow, ...], limits: Limits) -> bool:
    return bool(ranks) and all(len(rank.steps) >= limits.fewest_steps for rank in ranks)


def throttled(window: Window, limits: Limits) -> Iterator[Verdict]:
    for rank in window.ranks:
        gpus = [sample.gpu for sample in rank.samples if sample.gpu is not None]
        held = [gpu for gpu in gpus if set(gpu.throttle_reasons) - {"power cap"}]
        if len(gpus) >= limits.fewest_steps and len(held) >= limits.throttled_share * len(gpus):
            reasons = sorted({reason for gpu in held for reason in gpu.throttle_reasons})
            clock = mean(gpu.clock_mhz for gpu in held)
            yield Verdict(
                "throttled GPU",
                "warning",
                f"rank {rank.rank}: {', '.join(reasons)} in {len(held)} of {len(gpus)} looks; clock {clock:.0f} of "
                f"{held[0].max_clock_mhz} MHz",
                "see to the machine's cooling and power supply (nvidia-smi -q -d PERFORMANCE)",
                (rank.rank,),
            )


def recompiling(window: Window, limits: Limits) -> Iterator[Verdict]:
    """Twice or more: the last, lighter step of the data may be one."""
    for rank in window.ranks:
        counts = [step.graphs for step in rank.steps]
        grown = [step.step for step, before in zip(rank.steps[1:], counts, strict=False) if step.graphs > before]
        if len(grown) >= 2:
            steps = ", ".join(str(step) for step in grown[-3:])
            yield Verdict(
                "recompiling",
                "warning",
                f"rank {rank.rank} went from {counts[0]} to {counts[-1]} compiled graphs after its warm-up, last in "
                f"steps {steps}",
                "a shape or a flag changes from step to step: TORCH_LOGS=recompiles names it",
                (rank.rank,),
            )


def checkpoint_stalls(window: Window, limits: Limits) -> Iterator[Verdict]:
    """Only the time in which the loop waits for it counts: what is written beside the training costs nothing."""
    for rank in window.ranks:
        if len(rank.saves) < 3:  # the last one may follow the one before it at once
            continue
        each = mean(seconds for _, seconds in rank.saves)
        apart = (rank.saves[-1][0] - rank.saves[0][0]) / (len(rank.saves) - 1)
        if each > limits.checkpoint_share * apart:
            yield Verdict(
                "checkpoint stalls",
                "warning",
                f"rank {rank.rank} waits {each:.2g} s for a checkpoint, every {apart:.3g} s: {each / apart:.0%} of the "
                "time",
                "raise train.checkpoint_every, or put train.out on a faster disk",
                (rank.rank,),
            )


def memory_creep(window: Window, limits: Limits) -> Iterator[Verdict]:
    """Grows from quarter to quarter of the kept samples at a steady pace; an allocator that fills up slows down."""
    for rank in window.ranks:
        past = rank.past_samples
        if len(past) < 8 or past[-1][0] - past[0][0] < limits.creep_span_s:
            continue
        cut = [len(past) * quarter // 4 for quarter in range(5)]
        levels = [mean(memory_of(s) for _, s in past[start:end]) for start, end in zip(cut, cut[1:], strict=False)]
        gains = [after - before for before, after in zip(levels, levels[1:], strict=False)]
        total = levels[-1] - levels[0]
        if total >= max(limits.creep_bytes, limits.creep_share * levels[0]) and min(gains) >= total / 6:
            span_s = (past[-1][0] - past[0][0]) * 3 / 4
            yield Verdict(
                "memory creeping",
                "warning",
                f"rank {rank.rank} grew from {levels[0] / GIB:.2f} to {levels[-1] / GIB:.2f} GiB in "
                f"{short_duration(span_s)}: {total / span_s * 60 / 2**20:.0f} MiB a minute",
                "something keeps a reference to every step's tensors; the run will end out of memory",
                (rank.rank,),
            )


def below_best(window: Window, best: KnownGood | None, limits: Limits) -> Iterator[Verdict]:
    if best is None or not enough(window.drafting, limits):
        return
    share = window.tokens_per_s / best.tokens_per_s
    if share >= 1 - limits.below_best:
        return
    waited = max((mean(s.cpu_wait_share for s in rank.samples) for rank in window.ranks if rank.samples), default=0.0)
    others = f"; other processes had its cores {waited:.0%} of the time" if waited >= limits.below_best else ""
    severity: Severity = "warning"
    if share >= (1 - limits.below_best) * (1 - waited):
        severity = "note"  # what the others took explains it
    elif share < limits.far_below_best * (1 - waited):
        severity = "severe"
    changed = differences(best.fingerprint, best.now)
    yield Verdict(
        "below its own best",
        severity,
        f"{short_count(window.tokens_per_s)} tokens/s, {share:.0%} of the {short_count(best.tokens_per_s)} of "
        f"{best.run}{others}" + (f"; since then: {changed}" if changed else ""),
        "end the other processes" if severity == "note" else "draftline compare with that run says what differs",
    )


Rule = Callable[[Window, Limits], Iterator[Verdict]]
RULES: tuple[Rule, ...] = (
    stalled, degraded_kernels, straggler, unlike_memory, unlike_rate, throttled, recompiling, checkpoint_stalls,
    memory_creep,
)  # fmt: skip
