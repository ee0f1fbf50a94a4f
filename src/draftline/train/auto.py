"""Placement `auto`: both stages measured on every rank, every split's rate predicted from that, the best one taken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from draftline.train.plan import Plan, World, candidates, predicted_rate
from draftline.train.ranks import Ranks, alone

WARM_UP, MEASURED = 2, 4  # micro-batches
USABLE = 0.95  # share of a device's memory that two stages together may take


@dataclass(frozen=True)
class StageRates:
    """Of one rank: what it captures and what it trains alone, and what each took of its device's memory."""

    capture_tokens_per_s: float
    train_tokens_per_s: float
    memory_share: float  # of both stages together; 0 on a CPU


def choose_placement(
    recipe: Recipe, ranks: Ranks, folder: RunFolder, notices: Notices, device: torch.device
) -> PlacementSection:
    """The measured best placement; the same again where this run has already chosen. Collective.

    Raises InputError where no placement of these ranks is possible.
    """
    kept = folder.root / "placement.json"
    chosen = ranks.gather(json.loads(kept.read_text()) if ranks.first and kept.is_file() else None)[0]
    if chosen is None:
        found = ranks.gather(measure_stages(recipe, ranks, device))
        mean = StageRates(*(sum(values) / len(found) for values in zip(*map(astuple, found), strict=True)))
        best = ranks.together(lambda: best_plan(recipe, ranks.size, device, mean, notices))
        chosen = {"kind": best.kind}
        if best.kind == "split":
            chosen |= {"targets": best.targets, "drafters": best.drafters}
        if ranks.first:
            folder.write(kept, json.dumps(chosen))
    return recipe.placement.model_copy(update=chosen)


def astuple(rates: StageRates) -> tuple[float, float, float]:
    return rates.capture_tokens_per_s, rates.train_tokens_per_s, rates.memory_share


def best_plan(recipe: Recipe, size: int, device: torch.device, rates: StageRates, notices: Notices) -> Plan:
    """Show every candidate's predicted rate and return the highest."""
    world = World(size, variables.local_world_size(), device.type)
    plans = candidates(recipe.placement, world, recipe.micro_batches_per_step)
    fitting = [plan for plan in plans if plan.kind == "split" or rates.memory_share <= USABLE]
    if not fitting:
        raise InputError(
            f"placement auto: no placement of {size} ranks fits {recipe.micro_batches_per_step} micro-batches a step",
            "raise train.rows_per_step, or start fewer ranks",
        )
    rate = {plan: predicted_rate(plan, rates.capture_tokens_per_s, rates.train_tokens_per_s) for plan in fitting}
    best = max(fitting, key=lambda plan: rate[plan])
    notices.section("placement")
    notices.facts(
        {
            "one rank captures": f"{rates.capture_tokens_per_s:,.0f} tokens/s",
            "one rank trains": f"{rates.train_tokens_per_s:,.0f} tokens/s",
        }
    )
    notices.table(
        ["placement", "tokens/s", ""],
        [[plan.text, f"{rate[plan]:,.0f}", "taken" if plan is best else ""] for plan in fitting],
    )
    return best


def measure_stages(recipe: Recipe, ranks: Ranks, device: torch.device) -> StageRates:
    """One stage after the other, so that both need not fit on a device together."""
    quiet = Notices(Console(quiet=True))
    own = replace(alone(PlacementSection(), device), heart=ranks.heart)
    setting = ranks.together(lambda: prepare(recipe, quiet, own, device))
    captured = measure_capture(setting)
    borrowed = ranks.together(lambda: load_frame(recipe.target, device))
    setting = replace(setting, target=borrowed)  # the whole target is gone with its last name
    rate, share = measure_training(setting, quiet, captured.batches)
    return StageRates(captured.tokens_per_s, rate, captured.memory_share + share)


@dataclass(frozen=True)
class Captured:
    tokens_per_s: float
    memory_share: float
    batches: list[FeatureBatch]  # in host memory


def measure_capture(setting: Setting) -> Captured:
    device, stream = setting.target.device, setting.stream
    capture = FeatureCapture(setting.target, setting.spec.target_layer_ids, setting.loss.needs_final)
    batches: list[FeatureBatch] = []

    def capture_one(index: int) -> int:
        batch = capture(stream.batch(index % len(stream)))
        batches.append(on(batch, torch.device("cpu")))
        return batch.packed.tokens

    rate, share = timed(capture_one, device)
    return Captured(rate, share, batches)


def measure_training(setting: Setting, notices: Notices, batches: list[FeatureBatch]) -> tuple[float, float]:
    """(tokens/s, share of the device's memory) of forward, backward and optimizer."""
    device = setting.target.device
    job = assemble(
        setting, notices, LocalChannel(setting.stream.batch, lambda packed: batches[packed.index], setting.clock)
    )

    def train_one(index: int) -> int:
        batch = on(batches[index], device)
        sums = job.step.forward_backward(batch)
        job.optimizer.finish(sums.weight_sum)
        return batch.packed.tokens

    return timed(train_one, device)


def timed(work: Callable[[int], int], device: torch.device) -> tuple[float, float]:
    """(tokens/s after the warm-up, peak share of the device's memory). `work` returns the tokens it has handled."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for index in range(WARM_UP):
        work(index)
    wait_for(device)
    started = time.perf_counter()
    tokens = sum(work(index) for index in range(WARM_UP, WARM_UP + MEASURED))
    wait_for(device)
    seconds = time.perf_counter() - started
    share = 0.0
    if device.type == "cuda":
        share = torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    return tokens / seconds, share


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on(batch: FeatureBatch, device: torch.device) -> FeatureBatch:
    return FeatureBatch(batch.packed, batch.taps.to(device), None if batch.final is None else batch.final.to(device))
