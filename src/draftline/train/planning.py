"""`draftline train --plan`: what every rank would be, need and give. Starts nothing."""

from __future__ import annotations

import torch

from draftline.config import Recipe
from draftline.drafter.products import refuse_fp8_device
from draftline.environment import variables
from draftline.monitor.notices import Notices
from draftline.train.plan import Plan, World, candidates, make_plan, predicted_rate, ranks_wanted
from draftline.train.prediction import (
    SUSTAINED_TFLOPS,
    Counted,
    count,
    memory_bytes,
    memory_text,
    read_target_shape,
    stage_times,
)


def show_plan(recipe: Recipe, notices: Notices) -> None:
    """Print the plan for this host, or for the world that a launcher's environment names.

    Raises InputError where the placement does not fit the world.
    """
    world = planned_world(recipe)
    plan = make_plan(recipe.placement, world)
    if recipe.train.products == "fp8" and world.device == "cpu":
        refuse_fp8_device(torch.device("cpu"))
    shape = read_target_shape(recipe.target.path)
    counted = None if shape is None else count(recipe, shape, world.device)
    notices.section(f"plan: {plan.text}, {world.hosts} host{'s' if world.hosts > 1 else ''}")
    notices.table(
        ["rank", "host", "device", "role", "GiB"],
        [[role.rank, role.host, role.device, role.name, memory_of(plan, role.rank, counted)] for role in plan.roles],
    )
    if counted is None:
        notices.say(f"  memory and rates: unknown until {recipe.target.path} has been downloaded")
        return
    times, micro_batches = stage_times(counted, recipe, world.device), recipe.micro_batches_per_step
    notices.facts(
        {
            "assumed": f"{SUSTAINED_TFLOPS[world.device]:g} TFLOP/s a rank; counted FLOP: "
            f"{counted.target_flop_per_token / 1e9:.3g} G a token captured, "
            f"{counted.drafter_flop_per_token / 1e9:.3g} G trained" + fp8_text(counted),
            "one rank captures": f"{times.capture_tokens_per_s:,.0f} tokens/s",
            "one rank trains": f"{times.train_tokens_per_s(micro_batches):,.0f} tokens/s",
            "all ranks": f"{predicted_rate(plan, times, micro_batches):,.0f} tokens/s",
        }
    )
    if recipe.placement.kind == "auto":
        plans = candidates(recipe.placement, world, micro_batches)
        notices.say("  auto measures both stages first, then takes the best of:")
        notices.table(
            ["placement", "predicted tokens/s"],
            [[other.text, f"{predicted_rate(other, times, micro_batches):,.0f}"] for other in plans],
        )


def planned_world(recipe: Recipe) -> World:
    """As `train` would make it; a recipe for CUDA can be planned on a machine without."""
    placement = recipe.placement
    cuda = placement.device == "cuda" or (placement.device == "auto" and torch.cuda.is_available())
    device = "cuda" if cuda else "cpu"
    if variables.launched():
        return World(variables.world_size(), variables.local_world_size(), device)
    devices = max(1, torch.cuda.device_count()) if cuda else 1
    ranks = ranks_wanted(placement, devices, recipe.micro_batches_per_step)
    return World(ranks, ranks, device)


def fp8_text(counted: Counted) -> str:
    flop = counted.drafter_fp8_flop_per_token
    return f", {flop / 1e9:.3g} G of them in FP8 at twice that rate" if flop else ""


def memory_of(plan: Plan, rank: int, counted: Counted | None) -> str:
    return "?" if counted is None else memory_text(memory_bytes(plan.roles[rank], plan, counted))
