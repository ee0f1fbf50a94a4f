"""What must not go unnoticed while a run trains: rules over its reports, each an alarm with evidence and remedy.

Pure: fed with reports and counts, it returns the alarms that are new. Each rule speaks once. The thresholds come from
clean runs (quickstart; 6 answers of SmolLM2 learned by heart; the curves of benchmarks/race) and from runs with the
fault put in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from draftline.monitor.events import Alarm
from draftline.records import StepReport

WINDOW = 20  # steps that a rule looks at together
# Leak. Once the first slot is in this band, the last one's accuracy is at most 0.77 of the first's in quickstart and
# 0.44 in the race; where blocks see their answers it is 0.98 to 1. Below the band both are chance, above it both may
# be 1.
LEAK_BAND, LEAK_RATIO = (0.3, 0.97), 0.95
# 6 answers learned by heart (233 supervised tokens, one of the answers "hello" twenty times) reach 0.96 of the first
# slot.
LEAK_LEAST_TOKENS = 2_000
# Loss. Clean runs stay above 4.0 (quickstart), 2.9 (by heart) and 1.0 (race) nats this early and end at 0.13 or more;
# blocks that are fed their answers are below 0.001 at once, in a target whose head is its embedding.
LOW_LOSS, EARLY_SHARE, EARLY_STEPS = 0.05, 0.05, (WINDOW, 500)
# Proxy tau and decoding on the same answers are equal in float32: 1.1984 and 1.1984 over 207 steps of a tiny target.
# SPEC 7 states the limit. Fewer steps than this say little in bfloat16, where near-ties fall either way.
TAU_APART, TAU_LEAST_STEPS = 0.10, 30
# Supervised tokens a step: the lightest median of 20 steps in clean runs is 0.89 of the first one (0.97 but for by
# heart).
COLLAPSED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the rules must know of a run."""

    total_steps: int
    supervised_tokens: int  # of the whole data set, once
    max_unusable_share: float  # data.max_unusable_share
    max_skipped_steps: int  # train.max_skipped_steps


class Alarms:
    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self.spoken: set[str] = set()
        self.recent: deque[StepReport] = deque(maxlen=WINDOW)
        self.first_supervised: float | None = None  # median of the first window
        self.rows_seen = 0
        self.rows_lost = 0
        self.skipped_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether more steps were skipped than the recipe allows."""
        return self.skipped_steps > self.facts.max_skipped_steps

    def step(self, report: StepReport, rows: int) -> list[Alarm]:
        """A step that was taken, on so many documents."""
        self.recent.append(report)
        self.rows_seen += rows
        found = [self.low_loss()]
        if len(self.recent) == WINDOW:
            if self.first_supervised is None:
                self.first_supervised = median(r.supervised_tokens for r in self.recent)
            found += [self.leak(), self.collapse()]
        return self.new(found)

    def skipped(self, step: int, loss: float, grad_norm: float, rows: int, where: str) -> list[Alarm]:
        """A step that was not taken, for its loss or gradient is not finite. Speaks every time."""
        self.skipped_steps += 1
        self.rows_seen += rows
        self.rows_lost += rows
        alarm = Alarm(
            "not-finite",
            f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; the step was not taken, its {rows} rows are in "
            f"{where}; {self.skipped_steps} of at most {self.facts.max_skipped_steps} such steps "
            "(train.max_skipped_steps)",
            "look at the rows; lower optim.lr, or run the target in float32 (target.dtype) if it overflows",
        )
        return [alarm, *self.new([self.lost_rows()])]

    def unmoved(self, step: int, names: Sequence[str]) -> list[Alarm]:
        """Tensors of which no sampled number changed since the last look."""
        if not names:
            return []
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        alarm = Alarm(
            "parameters-still",
            f"step {step}: {len(names)} tensors have not moved: {shown}",
            "are the masters float32, and is optim.lr above 0? such a tensor is not being trained",
        )
        return self.new([alarm])

    def decoded(self, step: int, tau: float, proxy_tau: float, verify_steps: int) -> list[Alarm]:
        """A small decoding run, and the training forward's proxy on the very answers that it decoded."""
        apart = abs(proxy_tau - tau) / tau
        if verify_steps < TAU_LEAST_STEPS or apart <= TAU_APART:
            return []
        alarm = Alarm(
            "tau-apart",
            f"step {step}: proxy tau {proxy_tau:.2f} and decoded tau {tau:.2f} of the same answers are {apart:.0%} "
            f"apart (limit {TAU_APART:.0%}, over {verify_steps} verification steps)",
            "training sees what decoding does not, or decoding runs another drafter: `draftline check` on an export "
            "says which; do not trust this run's proxy tau",
        )
        return self.new([alarm])

    def low_loss(self) -> Alarm | None:
        last = self.recent[-1]
        early = min(max(EARLY_STEPS[0], EARLY_SHARE * self.facts.total_steps), EARLY_STEPS[1])
        mean = fmean(report.loss for report in list(self.recent)[-3:])
        if len(self.recent) < 3 or last.step >= early or mean >= LOW_LOSS or not last.blocks:
            return None
        return Alarm(
            "loss-too-low",
            f"step {last.step} of {self.facts.total_steps}: the loss is {mean:.3g} nats, and no drafter learns to "
            f"foretell text that fast (limit {LOW_LOSS} in the first {early:.0f} steps)",
            "likely blocks that see their own answers, or data of one repeated text",
        )

    def leak(self) -> Alarm | None:
        first, last = (fmean(report.slot_accuracy[slot] for report in self.recent) for slot in (0, -1))
        low, high = LEAK_BAND
        slots = len(self.recent[-1].slot_accuracy)
        few = self.facts.supervised_tokens < LEAK_LEAST_TOKENS
        if few or slots < 3 or not low <= first <= high or last < LEAK_RATIO * first:
            return None
        return Alarm(
            "leak",
            f"step {self.recent[-1].step}: slot {slots} is right in {last:.0%} and slot 1 in {first:.0%} of the blocks "
            f"(means of {WINDOW} steps); text further ahead is harder to foretell",
            "likely blocks that see their own answers: such a drafter accepts nothing when it is served",
        )

    def collapse(self) -> Alarm | None:
        now = median(report.supervised_tokens for report in self.recent)
        if self.first_supervised is None or now >= COLLAPSED_SHARE * self.first_supervised:
            return None
        return Alarm(
            "supervision-collapsed",
            f"step {self.recent[-1].step}: {now:,.0f} supervised tokens a step, and {self.first_supervised:,.0f} at "
            f"the start (medians of {WINDOW} steps)",
            "likely data sorted by kind, or answers cut away in a later file: look at the rows (`draftline prepare`)",
        )

    def lost_rows(self) -> Alarm | None:
        share = self.rows_lost / max(1, self.rows_seen)
        if share <= self.facts.max_unusable_share:
            return None
        return Alarm(
            "rows-lost",
            f"{self.rows_lost:,} of {self.rows_seen:,} rows ({share:.0%}) were in steps not taken; the stated share is "
            f"{self.facts.max_unusable_share:.0%} (data.max_unusable_share)",
            "mend what makes those rows' loss not finite, or raise the share",
        )

    def new(self, found: Sequence[Alarm | None]) -> list[Alarm]:
        """Those that have not spoken yet."""
        fresh = [alarm for alarm in found if alarm is not None and alarm.name not in self.spoken]
        self.spoken.update(alarm.name for alarm in fresh)
        return fresh


def is_finite(loss: float, grad_norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(grad_norm)
