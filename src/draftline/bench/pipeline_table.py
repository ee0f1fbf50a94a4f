"""What `bench pipeline` shows and writes: each placement beside its stages alone, the speed-up, the channel's share."""

from __future__ import annotations

import json
from typing import Any

from draftline.bench.pipeline import Machine, Wanted, measure_pipeline, this_machine
from draftline.bench.placements import MICRO_BATCHES
from draftline.config import LossSection, PlacementSection
from draftline.environment.fingerprint import fingerprint
from draftline.monitor.notices import Notices, stderr_console, stdout_console
from draftline.train.plan import StageTimes, World, make_plan, predicted_rate

PIPELINE_BAR, SPEED_UP_BAR = 0.95, 1.9
ONE, TWO = "colocated-1", "colocated-2"


def bench_pipeline(wanted: Wanted, as_json: bool) -> None:
    """The verb's way: every placement in runs of its own; this process holds no device."""
    notices = Notices(stderr_console() if as_json else stdout_console())
    found = measure_pipeline(wanted, notices)
    figures = pipeline_figures(wanted, this_machine(), found)
    if as_json:
        print(json.dumps(figures | {"environment": fingerprint()}))
    else:
        show_pipeline(figures, notices)


def pipeline_figures(wanted: Wanted, machine: Machine, found: dict[str, Any]) -> dict[str, Any]:
    """What --json writes; figures that need something unmeasured are None."""
    times = StageTimes(**found["alone"]) if "alone" in found else None
    runs = {name: found[name] for name in machine.placements if name in found}
    rates = {name: run["tokens_per_s"] for name, run in runs.items()}
    stages = {name: None if times is None else rate_of_stages(machine, name, times) for name in runs}
    shape, tokens = wanted.shape, wanted.shape.rows * wanted.shape.sequence
    return {
        "shape": shape.name, "rows": shape.rows, "sequence": shape.sequence, "documents": shape.documents,
        "anchors": shape.anchors, "loss": wanted.loss or LossSection().kind,
        "products": wanted.products, "device": machine.device,
        "devices": machine.devices, "alone": None if times is None else stage_figures(times),
        "placements": {
            name: run | {"stages_tokens_per_s": stages[name], "share_of_stages": share(rates[name], stages[name])}
            for name, run in runs.items()
        },
        "speed_up_of_2": share(rates[TWO], rates.get(ONE)) if TWO in rates else None,
        "channel": channel_figures(found["channel"], tokens, times) if "channel" in found else None,
    }  # fmt: skip


def rate_of_stages(machine: Machine, name: str, times: StageTimes) -> float:
    """What a placement's ranks reach if nothing is lost between them: a split its slower stage alone, a colocated rank
    one stage after the other."""
    placement = machine.placements[name]
    section = PlacementSection(**placement.section)
    plan = make_plan(section, World(placement.ranks, placement.ranks, machine.device))
    return predicted_rate(plan, times, MICRO_BATCHES)


def stage_figures(times: StageTimes) -> dict[str, float]:
    return {
        "capture_tokens_per_s": times.capture_tokens_per_s,
        "train_tokens_per_s": times.train_tokens_per_s(MICRO_BATCHES),
        "capture_ms": times.capture_s * 1e3,
        "train_ms": times.train_s * 1e3,
        "optimizer_ms": times.optimizer_s * 1e3,
    }


def channel_figures(channel: dict[str, float], tokens: int, times: StageTimes | None) -> dict[str, float | None]:
    """Beside the training of the same micro-batch: the time that moving it takes, and the CPU time of both ends."""
    moved = tokens * channel["bytes_per_token"]
    step_s = None if times is None else times.train_s + times.optimizer_s / MICRO_BATCHES
    move_s, cpu_s = moved / channel["bytes_per_s"], moved * channel["cpu_s_per_byte"]
    return channel | {
        "tokens_per_s": channel["bytes_per_s"] / channel["bytes_per_token"],
        "move_ms": move_s * 1e3,
        "share_of_training": share(move_s, step_s),
        "cpu_share_of_training": share(cpu_s, step_s),
    }


def share(value: float, of: float | None) -> float | None:
    return None if of is None else value / of


def show_pipeline(figures: dict[str, Any], notices: Notices) -> None:
    keys = ("shape", "rows", "sequence", "documents", "anchors", "loss", "products", "device", "devices")
    notices.section("bench pipeline")
    facts = {key: figures[key] for key in keys}
    if figures["alone"] is not None:
        facts |= alone_texts(figures["alone"])
    if figures["channel"] is not None:
        facts["channel"] = channel_text(figures["channel"], figures["device"])
    faster = figures["speed_up_of_2"]
    if faster is not None:
        facts["2 colocated"] = against(f"{faster:.2f} times the rate of 1", faster, SPEED_UP_BAR)
    notices.facts(facts)
    if figures["placements"]:
        notices.table(
            ["placement", "tokens/s", "its stages alone", "share", "ranks wait"],
            [placement_row(name, run) for name, run in figures["placements"].items()],
        )


def alone_texts(alone: dict[str, float]) -> dict[str, str]:
    return {
        "capture alone": f"{alone['capture_tokens_per_s']:,.0f} tokens/s: {alone['capture_ms']:.1f} ms a micro-batch",
        "training alone": f"{alone['train_tokens_per_s']:,.0f} tokens/s: {alone['train_ms']:.1f} ms a micro-batch, "
        f"{alone['optimizer_ms']:.1f} for the optimizer after {MICRO_BATCHES}",
    }


def placement_row(name: str, run: dict[str, Any]) -> list[str]:
    rate, stages, reached = run["tokens_per_s"], run["stages_tokens_per_s"], run["share_of_stages"]
    beside = ["not measured", ""]
    if stages is not None:
        beside = [f"{stages:,.0f}", against(f"{reached:.1%}", reached, PIPELINE_BAR)]
    return [name, f"{rate:,.0f}", *beside, " ".join(f"{waited:.1%}" for waited in run["waiting"])]


def against(text: str, value: float, bar: float) -> str:
    return text if value >= bar else f"{text} (bar {bar:g})"


def channel_text(channel: dict[str, Any], device: str) -> str:
    rate = f"{channel['bytes_per_s'] / 1e9:.2f} GB/s"
    told = f"{rate}: {channel['tokens_per_s']:,.0f} tokens/s of {channel['bytes_per_token']:,} bytes"
    if channel["share_of_training"] is None:
        return told
    beside = "beside it on streams of their own" if device == "cuda" else "between two captures"
    moved = f"{channel['move_ms']:.2f} ms a micro-batch, {channel['share_of_training']:.1%} of its training"
    return f"{told}; {moved}, {beside}"
