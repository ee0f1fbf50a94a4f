"""The recipe: one frozen, typed description of a run. Every default and every cross-check lives here.

Only `target.path` and `data.train` must be given. What is None here is derived from the target and printed
(`target/derive.py`); nothing downstream has a default of its own.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftline.errors import InputError
from draftline.faults import describe_problem

GAMMA_BY_BLOCK_SIZE = {8: 4.0, 10: 5.0, 16: 7.0}  # arXiv 2602.06036


Beta = Annotated[float, Field(ge=0, lt=1)]
Products = Literal["plain", "fp8"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSection(Section):
    path: str = Field(min_length=1, description="folder or hub id of the target model")
    revision: str | None = Field(None, description="hub revision; None: the default branch")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on CUDA, float32 on CPU")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    device_map: Literal["auto"] | None = Field(
        None,
        description="auto: the target's layers over all GPUs in view, where it does not fit one (needs accelerate)",
    )
    keep_features_gib: float = Field(
        0.0,
        ge=0,
        description="keep all the data's features on the device if they fit in this: one capture serves every epoch",
    )
    features: str | None = Field(
        None,
        min_length=1,
        description="folder of `draftline prepare`, or samples in the speculators layout, to read features from; the "
        "target's layers are then not loaded",
    )


class DataSection(Section):
    train: tuple[str, ...] = Field(min_length=1, description="JSONL files of conversations")
    sequence_length: int = Field(3072, ge=16, description="tokens in a packed row; longer documents are cut")
    max_unusable_share: float = Field(0.2, ge=0, le=1, description="the run stops when more rows are unusable")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")

    @field_validator("train", mode="before")
    @classmethod
    def one_or_many(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value


class DrafterSection(Section):
    layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    taps: tuple[int, ...] | None = Field(
        None, min_length=1, description="0-based target layers; None: spread over the depth"
    )
    tap_count: int = Field(5, ge=1, description="how many taps to spread when `taps` is not given")
    mask_token_id: int | None = Field(None, ge=0)
    hidden_size: int | None = Field(None, ge=1, description="must equal the target's: embedding and head are borrowed")
    intermediate_size: int | None = Field(None, ge=1)
    attention_heads: int | None = Field(None, ge=1)
    key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    sliding_window: int | None = Field(None, ge=1, description="window in tokens of the sliding layers")
    sliding_layers: tuple[int, ...] = Field((), description="0-based drafter layers that use the window")
    is_causal: bool | None = Field(None, description="None: causal inside the block in sliding layers only")

    @field_validator("taps", "sliding_layers", mode="before")
    @classmethod
    def as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def consistent(self) -> DrafterSection:
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps {list(self.taps)} must be ascending and distinct")
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError("sliding_layers needs sliding_window")
        if self.sliding_window is not None and not self.sliding_layers:
            raise ValueError("sliding_window needs sliding_layers, the 0-based drafter layers that use it")
        if any(not 0 <= layer < self.layers for layer in self.sliding_layers):
            raise ValueError(f"sliding_layers {list(self.sliding_layers)} must lie in 0..{self.layers - 1}")
        return self


class LossSection(Section):
    kind: Literal["ce", "ce_target", "kl", "tv"] = Field(
        "kl", description="ce: data token; ce_target: target's argmax; kl, tv: distance to the target's distribution"
    )
    weights: Literal["exponential", "dpace"] = "dpace"
    gamma: float | None = Field(None, gt=0, description="decay of the exponential weights; None: from the block size")
    alpha: float = Field(0.5, ge=0, le=1, description="smoothing of the D-PACE weights")


class OptimSection(Section):
    lr: float = Field(6e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    warmup_share: float = Field(0.04, ge=0, lt=1, description="share of all steps spent warming up")
    clip_norm: float = Field(1.0, gt=0)

    @field_validator("betas", mode="before")
    @classmethod
    def as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class TrainSection(Section):
    out: str = Field("runs/draftline", min_length=1, description="the run folder")
    epochs: int = Field(6, ge=1)
    max_steps: int | None = Field(None, ge=1, description="ends the schedule earlier than the epochs would")
    rows_per_step: int = Field(8, ge=1, description="packed rows in one optimizer step")
    rows_per_micro_batch: int = Field(1, ge=1, description="packed rows in one forward")
    anchors: int = Field(512, ge=1, description="blocks sampled per packed row and step")
    products: Products = Field(
        "plain",
        description="of the drafter's layers. plain: in the target's dtype; fp8: forward and input gradients in FP8 "
        "with a scale for each row, weight gradients as before (CUDA, compute capability 8.9 or later)",
    )
    seed: int = Field(0, ge=0)
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(10, ge=1, description="steps between plain progress lines")
    trace: bool = Field(False, description="each rank writes its spans of work to RUN/trace-rankN.jsonl")
    on_alarm: Literal["warn", "stop"] = Field("warn", description="stop: save a checkpoint and end the run")
    max_skipped_steps: int = Field(
        3, ge=0, description="steps not taken, for a loss or gradient that is not finite; one more ends the run"
    )

    @model_validator(mode="after")
    def whole_micro_batches(self) -> TrainSection:
        if self.rows_per_step % self.rows_per_micro_batch:
            raise ValueError(
                f"rows_per_step {self.rows_per_step} must be a multiple of "
                f"rows_per_micro_batch {self.rows_per_micro_batch}"
            )
        return self


class PlacementSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    kind: Literal["colocated", "split", "auto"] = Field(
        "colocated",
        description="colocated: every rank captures and trains; split: some capture for the others; auto: measured",
    )
    targets: int | None = Field(None, ge=1, description="target replicas of a split; None: the ranks that are left")
    drafters: int | None = Field(None, ge=1, description="drafter ranks; None: the ranks that are left")
    tensor_parallel: int = Field(1, ge=1, description="ranks that share one target replica of a split")
    sharded: bool = Field(False, description="drafter layers and their AdamW state spread over the drafter ranks")
    channel: Literal["auto", "shared_memory", "distributed"] = Field(
        "auto", description="how features travel; auto: shared memory inside a host, torch.distributed between hosts"
    )
    channel_gib: float = Field(2.0, gt=0, description="features in flight towards one drafter rank, at most")
    max_restarts: int | None = Field(
        None,
        ge=0,
        description="new attempts after a rank died; None: 3 where draftline starts the ranks, see launch.py",
    )
    stall_s: float = Field(20.0, gt=0, description="a rank that shows no progress for so long is ended")
    start_up_s: float = Field(3600.0, gt=0, description="the same for loading and for the first, compiling, steps")

    @model_validator(mode="after")
    def consistent(self) -> PlacementSection:
        if self.kind == "split" and self.targets is None and self.drafters is None:
            raise ValueError("split needs targets or drafters: how many ranks capture, how many train")
        if self.kind != "split" and self.targets is not None:
            raise ValueError(f"targets belongs to kind split; {self.kind} ranks find their own")
        if self.kind == "auto" and self.drafters is not None:
            raise ValueError("drafters is what kind auto finds out: leave it out, or choose split")
        if self.tensor_parallel > 1 and self.kind != "split":
            raise ValueError("tensor_parallel spreads the target replicas of kind split")
        return self


class EvalSection(Section):
    prompts: str | None = Field(None, description="JSONL of held-out prompts; tau is measured on them after training")
    max_prompts: int | None = Field(None, ge=1)
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    every: int = Field(
        500,
        ge=0,
        description="steps between small decoding runs on prompts of the data; 0: none. At the defaults below at most "
        "128 verification steps of batch 1, a few seconds: about 5% of 500 steps of 0.1 s",
    )
    every_prompts: int = Field(4, ge=1, description="prompts of such a run")
    every_new_tokens: int = Field(32, ge=2, description="longest answer of such a run")


class ExportSection(Section):
    format: Literal["reference", "speculators"] = "reference"


class MonitorSection(Section):
    sinks: tuple[Literal["tensorboard", "trackio", "wandb", "prometheus"], ...] = Field(
        (), description="where the run's numbers go besides its own events"
    )
    project: str = Field("draftline", min_length=1, description="the run's project in trackio and wandb")
    prometheus_port: int = Field(9187, ge=0, le=65535, description="on 127.0.0.1; 0: any free one, which is printed")

    @field_validator("sinks", mode="before")
    @classmethod
    def as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Override(Section):
    """One process-wide setting unlike its default, in the open: a torch setting by its path, or a variable."""

    switch: str = Field(description="torch._dynamo.config.NAME and its like, or an environment variable: NCCL_ALGO")
    value: bool | int | float | str
    reason: str = Field(min_length=1, description="why the default does not do here")
    until: date = Field(description="last day on which a run may start with it, YYYY-MM-DD")

    @field_validator("switch")
    @classmethod
    def setting_or_variable(cls, name: str) -> str:
        if not re.fullmatch(r"torch(\.\w+){2,}|[A-Z][A-Z0-9_]*", name):
            raise ValueError("must be a torch setting (torch._dynamo.config.NAME) or a variable (CAPITALS)")
        return name

    @field_validator("value", mode="before")
    @classmethod
    def one_value(cls, value: Any) -> Any:
        if not isinstance(value, bool | int | float | str):
            raise ValueError("must be true or false, a number or a word")
        return value

    @field_validator("until", mode="before")
    @classmethod
    def as_date(cls, value: Any) -> Any:
        try:
            return date.fromisoformat(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError("must be a date YYYY-MM-DD") from error

    @model_validator(mode="after")
    def variables_hold_text(self) -> Override:
        if self.is_variable and isinstance(self.value, bool):
            raise ValueError(f"{self.switch} is an environment variable, which holds text: write 0, 1 or a quoted word")
        return self

    @property
    def is_variable(self) -> bool:
        return not self.switch.startswith("torch.")

    @property
    def text(self) -> str:
        """As status lines show it: recompile_limit=64 (until 2026-12-31)."""
        return f"{self.switch.rpartition('.')[2]}={self.value} (until {self.until})"


class Recipe(Section):
    target: TargetSection
    data: DataSection
    drafter: DrafterSection = DrafterSection()
    loss: LossSection = LossSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    placement: PlacementSection = PlacementSection()
    eval: EvalSection = EvalSection()
    export: ExportSection = ExportSection()
    monitor: MonitorSection = MonitorSection()
    overrides: tuple[Override, ...] = ()

    @field_validator("overrides", mode="before")
    @classmethod
    def as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def one_override_a_switch(self) -> Recipe:
        names = [override.switch for override in self.overrides]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"overrides: {', '.join(twice)} is given twice")
        return self

    @property
    def micro_batches_per_step(self) -> int:
        return self.train.rows_per_step // self.train.rows_per_micro_batch

    @property
    def gamma(self) -> float | None:
        """Decay length of the exponential slot weights, in slots (SPEC 5); None only where other weights are used."""
        if self.loss.gamma is not None:
            return self.loss.gamma
        return GAMMA_BY_BLOCK_SIZE.get(self.drafter.block_size)

    @model_validator(mode="after")
    def every_drafter_has_work(self) -> Recipe:
        micro_batches = self.micro_batches_per_step
        if self.placement.drafters is not None and self.placement.drafters > micro_batches:
            raise ValueError(
                f"placement.drafters {self.placement.drafters} is more than the {micro_batches} micro-batches a step "
                f"(train.rows_per_step / train.rows_per_micro_batch): some ranks would never train"
            )
        return self

    @model_validator(mode="after")
    def fp8_has_its_device(self) -> Recipe:
        if self.train.products == "fp8" and self.placement.device == "cpu":
            raise ValueError("train.products fp8 needs a GPU, and placement.device is cpu: use train.products plain")
        if self.train.products == "fp8" and self.target.dtype == "float32":
            raise ValueError(
                "train.products fp8 gives bfloat16 results, and target.dtype is float32: use train.products plain, or "
                "target.dtype auto"
            )
        return self

    @model_validator(mode="after")
    def files_need_no_capture(self) -> Recipe:
        if self.target.features is not None and self.placement.kind != "colocated":
            raise ValueError(
                f"target.features holds what placement.kind {self.placement.kind} would capture: use kind colocated, "
                "in which every rank reads its own"
            )
        return self

    @model_validator(mode="after")
    def gamma_is_known(self) -> Recipe:
        if self.loss.weights == "exponential" and self.gamma is None:
            known = ", ".join(f"{g:g} for {b}" for b, g in GAMMA_BY_BLOCK_SIZE.items())
            raise ValueError(
                f"drafter.block_size {self.drafter.block_size} has no published gamma ({known}): set loss.gamma"
            )
        return self


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and apply `section.key=value` overrides (values are YAML).

    Relative paths in the recipe are taken from the working directory, as a shell would.
    Raises InputError naming the dotted path, the value and what is allowed.
    """
    tree = read_yaml(Path(path))
    for item in overrides or []:
        apply_override(tree, item)
    return parse_recipe(tree, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"recipe {path}: {error.strerror}", "give the path of a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {path}: not UTF-8 text ({error.reason})", "save it as UTF-8 YAML") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"recipe {path}: a recipe is a mapping of sections", "start with `target:` and `data:`")
    return tree


def apply_override(tree: dict[str, Any], item: str) -> None:
    dotted, equals, text = item.partition("=")
    parts = dotted.split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise InputError(f"override {item!r} is not of the form section.key=value", "for example train.epochs=3")
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise InputError(f"override {item!r}: section {parts[0]!r} of the recipe is not a mapping")
    try:
        section[parts[1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"override {item!r}: the value is not valid YAML") from error


def parse_recipe(tree: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        lines = [describe_problem(problem, Recipe) for problem in error.errors()]
        raise InputError(f"recipe {where}:\n  " + "\n  ".join(lines)) from error
