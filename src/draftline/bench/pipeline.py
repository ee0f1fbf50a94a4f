"""`bench pipeline`: tokens/s of each placement in real runs, beside what its stages reach alone."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftline.bench.channel import measure_channel
from draftline.bench.placements import MICRO_BATCHES, WARM_STEPS, Placement, placements, run_placement, write_recipe
from draftline.bench.random_target import write_conversations, write_target
from draftline.bench.shapes import Shape
from draftline.channel.flow import FeatureLayout
from draftline.config import LossSection, Products, load_recipe
from draftline.environment import variables
from draftline.environment.compile_cache import use_compile_cache
from draftline.environment.device import training_device
from draftline.environment.switches import configure_torch
from draftline.errors import InputError
from draftline.monitor.notices import Notices
from draftline.train.auto import measure_stages
from draftline.train.plan import StageTimes
from draftline.train.ranks import alone

T = TypeVar("T")
CPU_RANKS = 2
STEPS_OF_DATA = 2  # which the epochs repeat


@dataclass(frozen=True)
class Wanted:
    """What a call asks for. loss: None for a recipe's own default; only: empty for everything; out: None for a folder
    that is gone afterwards."""

    shape: Shape
    loss: str | None
    products: Products
    steps: int
    only: tuple[str, ...]
    out: Path | None


@dataclass(frozen=True)
class Machine:
    device: str  # "cpu" or "cuda"
    devices: int  # ranks at most

    @property
    def placements(self) -> dict[str, Placement]:
        return {placement.name: placement for placement in placements(self.devices)}


def this_machine() -> Machine:
    """Two ranks on a CPU, each with the same share of the cores whether it is alone or not."""
    if torch.cuda.is_available():
        return Machine("cuda", torch.cuda.device_count())
    threads = variables.missing({"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // CPU_RANKS))})
    for name, value in threads.items():
        variables.set_declared(name, value)
    return Machine("cpu", CPU_RANKS)


def measure_pipeline(wanted: Wanted, notices: Notices) -> dict[str, Any]:
    """Name of what was measured -> its numbers, those that earlier calls left in the folder included. Raises InputError
    for what this machine cannot measure, or a folder of another shape, loss or products."""
    machine = this_machine()
    known = ("alone", "channel", *machine.placements)
    for name in wanted.only:
        if name not in known:
            here = f"{machine.devices} {machine.device} device{'s' if machine.devices > 1 else ''}"
            raise InputError(f"--only {name}: not among what {here} can measure", f"known: {', '.join(known)}")
    if wanted.steps <= WARM_STEPS:
        raise InputError(
            f"--steps {wanted.steps}: the first {WARM_STEPS} do not count", f"take {WARM_STEPS + 1} or more"
        )
    notices.section("wall time")
    with folder_of(wanted) as home:
        bench = Bench(wanted, machine, home, notices)
        bench.make_inputs()
        for name in wanted.only or known:
            bench.measure(name)
        return bench.found(known)


@contextmanager
def folder_of(wanted: Wanted) -> Iterator[Path]:
    if wanted.out is not None:
        wanted.out.mkdir(parents=True, exist_ok=True)
        yield wanted.out.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="draftline-bench-") as folder:
        yield Path(folder)


class Bench:
    """A folder with a target, conversations and a recipe, and what has been measured with them."""

    def __init__(self, wanted: Wanted, machine: Machine, home: Path, notices: Notices) -> None:
        self.wanted, self.machine, self.home, self.notices = wanted, machine, home, notices
        self.dtype = torch.bfloat16 if machine.device == "cuda" else torch.float32
        self.layout = layout_of(wanted.shape, wanted.loss, self.dtype)
        own: dict[str, dict[str, Any]] = {"loss": {} if wanted.loss is None else {"kind": wanted.loss}}
        own["train"] = {"products": wanted.products}
        self.recipe = write_recipe(home, wanted.shape, own, self.layout.slot_bytes, wanted.steps)

    def make_inputs(self) -> None:
        """Target and conversations, unless the folder holds this shape's already."""
        measured = asdict(self.wanted.shape) | {"loss": self.wanted.loss, "products": self.wanted.products}
        marker, mine = self.home / "shape.json", json.dumps(measured, sort_keys=True)
        if marker.is_file():
            if marker.read_text(encoding="utf-8") != mine:
                raise InputError(
                    f"--out {self.home}: holds figures of another shape, loss or products",
                    "name another folder",
                )
            return
        shape, target, device = self.wanted.shape, self.home / "target", torch.device(self.machine.device)
        write_conversations(self.home / "conversations.jsonl", shape, STEPS_OF_DATA * MICRO_BATCHES * shape.rows)
        self.timed("target written", lambda: elsewhere(write_target, target, shape.spec, device, self.dtype))
        marker.write_text(mine, encoding="utf-8")

    def measure(self, name: str) -> None:
        values: dict[str, Any]
        if name == "alone":
            values = asdict(self.timed(name, lambda: elsewhere(stages_alone, self.recipe)))
        elif name == "channel":
            values = asdict(self.timed(name, lambda: measure_channel(self.layout, self.machine.device)))
            values["bytes_per_token"] = self.layout.slot_bytes // (self.layout.rows * self.layout.length)
        else:
            outcome = run_placement(self.machine.placements[name], self.recipe, self.wanted.steps)
            values = asdict(outcome)
            spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in outcome.wall_s.items())
            self.notices.facts({name: f"{sum(outcome.wall_s.values()):.1f} s: {spent}"})
        (self.home / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")

    def timed(self, what: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        self.notices.facts({what: f"{time.perf_counter() - started:.1f} s"})
        return result

    def found(self, known: tuple[str, ...]) -> dict[str, Any]:
        paths = {name: self.home / f"{name}.json" for name in known}
        return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def layout_of(shape: Shape, loss: str | None, dtype: torch.dtype) -> FeatureLayout:
    """Of one micro-batch; every loss but plain cross-entropy on the data's tokens needs the final states too."""
    spec = shape.spec
    width, kind = spec.hidden_size, loss or LossSection().kind
    taps = len(spec.target_layer_ids) * width
    return FeatureLayout(shape.rows, shape.sequence, taps, 0 if kind == "ce" else width, dtype)


def elsewhere(work: Callable[..., T], *arguments: object) -> T:
    """In a process of its own, so that this one never holds a device on which a placement is to be measured."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def stages_alone(recipe_file: Path) -> StageTimes:
    recipe = load_recipe(recipe_file)
    device = training_device(recipe.placement.device)
    configure_torch(device)
    use_compile_cache()
    return measure_stages(recipe, alone(recipe.placement, device), device).times
