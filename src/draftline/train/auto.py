"""Placement `auto`: both stages measured on every rank, every split's rate predicted from that, the best one taken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from statistics import mean

import torch
from rich.console import Console

from draftline.channel.local import LocalChannel
from draftline.config import PlacementSection, Recipe
from draftline.environment import variables
from draftline.errors import InputError
from draftline.monitor.notices import Notices
from draftline.records import FeatureBatch
from draftline.target.capture import FeatureCapture
from draftline.target.frame import load_frame
from draftline.train.folder import RunFolder
from draftline.train.job import Setting, assemble, prepare
from draftline.train.plan import Plan, StageTimes, World, candidates, predicted_rate
from draftline.train.ranks import Ranks, alone

WARM_UP, MEASURED, MEASURED_ON_GPU = 2, 4, 8  # times that a stage's work is done, at least
HEATING_S = 2.0  # of warm-up on a GPU: by then it has slowed down to what its power allows, as it will in training
USABLE = 0.95  # share of a device's memory that two stages together may take


@dataclass(frozen=True)
class Measured:
    """Of one rank: both stages' times, and what the two took of its device's memory together (0 on a CPU)."""

    times: StageTimes
    memory_share: float


def choose_placement(
    recipe: Recipe, ranks: Ranks, folder: RunFolder, notices: Notices, device: torch.device
) -> PlacementSection:
    """The measured best placement; the same again where this run has already chosen. Collective.

    Raises InputError where no placement of these ranks is possible.
    """
    kept = folder.root / "placement.json"
    chosen = ranks.gather(json.loads(kept.read_text()) if ranks.first and kept.is_file() else None)[0]
    if chosen is None:
        found = mean_of(ranks.gather(measure_stages(recipe, ranks, device)))
        best = ranks.together(lambda: best_plan(recipe, ranks.size, device, found, notices))
        chosen = {"kind": best.kind}
        if best.kind == "split":
            chosen |= {"targets": best.targets, "drafters": best.drafters}
        if ranks.first:
            folder.write(kept, json.dumps(chosen))
    return recipe.placement.model_copy(update=chosen)


def mean_of(found: list[Measured]) -> Measured:
    times = [mean(values) for values in zip(*(astuple(one.times) for one in found), strict=True)]
    return Measured(StageTimes(*times), mean(one.memory_share for one in found))


def best_plan(recipe: Recipe, size: int, device: torch.device, found: Measured, notices: Notices) -> Plan:
    """Show every candidate's predicted rate and return the highest."""
    world, micro_batches = World(size, variables.local_world_size(), device.type), recipe.micro_batches_per_step
    plans = candidates(recipe.placement, world, micro_batches)
    fitting = [plan for plan in plans if plan.kind == "split" or found.memory_share <= USABLE]
    if not fitting:
        raise InputError(
            f"placement auto: no placement of {size} ranks fits {micro_batches} micro-batches a step",
            "raise train.rows_per_step, or start fewer ranks",
        )
    rate = {plan: predicted_rate(plan, found.times, micro_batches) for plan in fitting}
    best = max(fitting, key=lambda plan: rate[plan])
    notices.section("placement")
    notices.facts(
        {
            "one rank captures": f"{found.times.capture_tokens_per_s:,.0f} tokens/s",
            "one rank trains": f"{found.times.train_tokens_per_s(micro_batches):,.0f} tokens/s",
        }
    )
    if len(fitting) < len(plans):
        notices.facts({"both together": f"{found.memory_share:.0%} of a device's memory: only a split fits"})
    notices.table(
        ["placement", "tokens/s", ""],
        [[plan.text, f"{rate[plan]:,.0f}", "taken" if plan is best else ""] for plan in fitting],
    )
    return best


def measure_stages(recipe: Recipe, ranks: Ranks, device: torch.device) -> Measured:
    """One stage after the other, so that both need not fit on a device together."""
    quiet = Notices(Console(quiet=True))
    own = replace(alone(PlacementSection(), device), heart=ranks.heart)
    setting = ranks.together(lambda: prepare(recipe, quiet, own, device))
    capture, batch = measure_capture(setting)
    borrowed = ranks.together(lambda: load_frame(recipe.target, device))
    setting = replace(setting, target=borrowed)  # the whole target is gone with its last name
    train, optimizer_s = measure_training(setting, quiet, batch)
    times = StageTimes(capture.seconds, train.seconds, optimizer_s, batch.packed.tokens)
    return Measured(times, capture.memory_share + train.memory_share)


@dataclass(frozen=True)
class Timed:
    seconds: float  # of one call
    memory_share: float  # of the device's memory, at the peak; 0 on a CPU


def measure_capture(setting: Setting) -> tuple[Timed, FeatureBatch]:
    """Micro-batches of the run one after the other, and the features of the first in host memory."""
    stream = setting.stream
    capture = FeatureCapture(setting.target, setting.spec.target_layer_ids, setting.loss.needs_final)
    found = timed(lambda call: capture(stream.batch(call % len(stream))), setting.target.device)
    return found, on(capture(stream.batch(0)), torch.device("cpu"))


def measure_training(setting: Setting, notices: Notices, batch: FeatureBatch) -> tuple[Timed, float]:
    """(forward and backward of one micro-batch again and again, seconds that an optimizer step adds to them)."""
    device = setting.target.device
    batch = on(batch, device)
    job = assemble(setting, notices, LocalChannel(setting.stream.batch, lambda _: batch, setting.clock))

    def whole_step(_: int) -> None:
        job.optimizer.finish(job.step.forward_backward(batch).weight_sum)

    train = timed(lambda _: job.step.forward_backward(batch), device)
    step = timed(whole_step, device)
    return replace(train, memory_share=step.memory_share), max(step.seconds - train.seconds, 0.0)


def timed(work: Callable[[int], object], device: torch.device) -> Timed:
    """Of one of several calls after the warm-up; `work` is given the number of its call."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for call in range(WARM_UP):
        work(call)
    wait_for(device)  # now everything is compiled
    call, until = WARM_UP, time.perf_counter() + HEATING_S
    while on_gpu and time.perf_counter() < until:
        work(call)
        wait_for(device)
        call += 1
    measured = MEASURED_ON_GPU if on_gpu else MEASURED
    started = time.perf_counter()
    for number in range(call, call + measured):
        work(number)
    wait_for(device)
    seconds = (time.perf_counter() - started) / measured
    share = 0.0
    if on_gpu:
        share = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    return Timed(seconds, share)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on(batch: FeatureBatch, device: torch.device) -> FeatureBatch:
    return FeatureBatch(batch.packed, batch.taps.to(device), None if batch.final is None else batch.final.to(device))
