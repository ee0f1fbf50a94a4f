"""A job: everything a recipe names, loaded, derived and proven, ready for its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from draftline.channel.flow import FeatureLayout
from draftline.channel.local import LocalChannel
from draftline.channel.routes import FeatureSource
from draftline.channel.speculators import Sample
from draftline.config import Recipe
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_conversations
from draftline.data.inspection import thinking_warning
from draftline.data.proofs import Example
from draftline.data.rendering import RenderedData, render_conversations
from draftline.data.stream import RowStream
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter, untrained
from draftline.drafter.products import refuse_fp8_device, refuse_fp8_sizes
from draftline.drafter.step import DrafterStep
from draftline.environment.device import training_device
from draftline.errors import InputError
from draftline.export.provenance import Provenance
from draftline.monitor.notices import Notices
from draftline.monitor.phases import Phase, PhaseClock
from draftline.records import Conversation, DrafterSpec
from draftline.target.derive import derive_spec
from draftline.target.frame import load_frame
from draftline.target.load import Target, load_target
from draftline.target.shard import load_target_shard
from draftline.train.features import Source, Wanted, adopt, feature_source, foreign_samples
from draftline.train.optimizer import Optimizer
from draftline.train.plan import Role
from draftline.train.ranks import Ranks, alone
from draftline.train.reduction import Reduction, reduction_for

FP8_TEXT = "the layers' in FP8 rows, weight gradients bfloat16"
EXAMPLES = 64  # conversations whose rows are proven to be theirs
TRAIN_IDENTITY = {"seed", "products", "anchors", "rows_per_step", "rows_per_micro_batch", "epochs", "max_steps"}


@dataclass(frozen=True)
class Setting:
    """What capturing and training ranks share: the target (or what a drafter borrows of it), the data, the numbers."""

    recipe: Recipe
    ranks: Ranks
    target: Target
    spec: DrafterSpec
    stream: RowStream
    examples: tuple[Example, ...]  # conversations beside their rows, evenly from the whole data set
    samples: list[Sample] | None  # of another tool, where target.features names such a folder
    total_steps: int
    micro_batches_per_step: int
    clock: PhaseClock  # of this rank's steps

    @property
    def loss(self) -> LossKind:
        recipe = self.recipe
        return LossKind(recipe.loss.kind, recipe.loss.weights, recipe.gamma, recipe.loss.alpha)

    @property
    def total_micro_batches(self) -> int:
        return min(self.total_steps * self.micro_batches_per_step, len(self.stream))

    @property
    def layout(self) -> FeatureLayout:
        width = self.target.parts.hidden_size
        return FeatureLayout(
            self.recipe.train.rows_per_micro_batch, self.stream.row_length, len(self.spec.target_layer_ids) * width,
            width if self.loss.needs_final else 0, self.target.dtype,
        )  # fmt: skip

    def micro_batches(self, step: int) -> range:
        """Numbers of a step's micro-batches. The last step of the data takes what is left, so no row is dropped."""
        first = step * self.micro_batches_per_step
        return range(first, min(first + self.micro_batches_per_step, self.total_micro_batches))


@dataclass(frozen=True)
class Job:
    """A training rank's work."""

    setting: Setting
    features: FeatureSource
    capture: Source | None  # what makes its features here; None where another rank does
    drafter: Drafter
    step: DrafterStep
    optimizer: Optimizer
    reduction: Reduction
    identity: dict[str, Any]  # what a resumed run must share with this one
    provenance: Provenance

    @property
    def recipe(self) -> Recipe:
        return self.setting.recipe

    @property
    def ranks(self) -> Ranks:
        return self.setting.ranks

    @property
    def target(self) -> Target:
        return self.setting.target

    @property
    def spec(self) -> DrafterSpec:
        return self.setting.spec

    @property
    def stream(self) -> RowStream:
        return self.setting.stream

    @property
    def total_steps(self) -> int:
        return self.setting.total_steps

    @property
    def micro_batches_per_step(self) -> int:
        return self.setting.micro_batches_per_step

    @property
    def examples(self) -> tuple[Example, ...]:
        return self.setting.examples

    def micro_batches(self, step: int) -> range:
        return self.setting.micro_batches(step)

    def own_micro_batches(self, step: int) -> list[int]:
        """Those of a step that this drafter trains: i with i mod D its number."""
        drafters, mine = self.ranks.plan.drafters, self.ranks.role.drafter
        return [index for index in self.setting.micro_batches(step) if index % drafters == mine]


def prepare(recipe: Recipe, notices: Notices, ranks: Ranks, device: torch.device) -> Setting:
    """Load, derive and prove what this rank's role needs. Collective; raises InputError on every rank where any rank
    finds fault with the recipe or its files."""
    mesh = ranks.replica_mesh(device)
    target = ranks.together(lambda: load_for(recipe, ranks.role, device, mesh))
    return ranks.together(lambda: setting_of(recipe, notices, ranks, target))


def setting_of(recipe: Recipe, notices: Notices, ranks: Ranks, target: Target) -> Setting:
    spec, samples = derive_spec(recipe.drafter, target), foreign_samples(recipe)
    if recipe.train.products == "fp8" and ranks.role.drafter is not None:
        refuse_fp8_device(target.device)
        refuse_fp8_sizes(spec)
    stream, examples = row_stream(recipe, target, notices, samples)
    per_step = recipe.micro_batches_per_step
    if ranks.plan.drafters > per_step and recipe.placement.kind != "auto":
        raise InputError(
            f"{ranks.plan.drafters} drafter ranks, and a step has {per_step} micro-batches: some would never train",
            "raise train.rows_per_step, or start fewer ranks",
        )
    return Setting(
        recipe, ranks, target, spec, stream, examples, samples, count_steps(recipe, stream, per_step), per_step,
        PhaseClock(target.device),
    )  # fmt: skip


def load_for(recipe: Recipe, role: Role, device: torch.device, mesh: DeviceMesh | None) -> Target:
    """As far as a role needs it: without its layers where another rank captures, or where files hold its features."""
    if role.target is None or recipe.target.features is not None:
        return load_frame(recipe.target, device)
    if mesh is not None:
        return load_target_shard(recipe.target, device, mesh)
    return load_target(recipe.target, device)


def assemble(setting: Setting, notices: Notices, features: FeatureSource) -> Job:
    """A training rank's job. Collective over the training ranks."""
    recipe, target, device = setting.recipe, setting.target, setting.target.device
    drafter = untrained(setting.spec, recipe.train.seed).to(device)
    dtype = target.parts.head.weight.dtype if device.type == "cuda" else torch.float32
    reduction = reduction_for(drafter, setting.ranks, dtype)
    step = DrafterStep(
        drafter, target.embed, target.parts.head, setting.loss, recipe.train.anchors, recipe.train.seed,
        recipe.train.products,
    )  # fmt: skip
    step.clock = setting.clock
    optimizer = Optimizer(reduction.masters, recipe.optim, setting.total_steps, reduction.total_norm)
    capture = features.capture if isinstance(features, LocalChannel) else None
    job = Job(
        setting, features, capture, drafter, step, optimizer, reduction,
        run_identity(recipe, target, setting.spec, setting.stream), provenance_of(recipe, target, setting.stream),
    )  # fmt: skip
    notices.section("drafter")
    notices.facts(derived_facts(job))
    return job


def feature_capture(setting: Setting, notices: Notices) -> Source:
    """The target's forward, or a look-up where the whole data's features fit on the device, or files."""
    wanted = Wanted(setting.spec.target_layer_ids, setting.loss.needs_final)
    stride = setting.ranks.plan.drafters
    return feature_source(setting.recipe, setting.target, wanted, setting.stream, setting.samples, notices, stride)


def colocated_source(setting: Setting, notices: Notices) -> LocalChannel:
    """A rank that makes its own features."""
    capturing: Phase = "capture" if setting.recipe.target.features is None else "data"
    return LocalChannel(setting.stream.batch, feature_capture(setting, notices), setting.clock, capturing)


def assemble_alone(recipe: Recipe, notices: Notices) -> Job:
    """The job of a process that is the whole world."""
    device = training_device(recipe.placement.device)
    setting = prepare(recipe, notices, alone(recipe.placement, device), device)
    return assemble(setting, notices, colocated_source(setting, notices))


def count_steps(recipe: Recipe, stream: RowStream, micro_batches_per_step: int) -> int:
    """Optimizer steps of the run, a lighter last one included. Raises InputError where the data fills not even one."""
    steps = -(-len(stream) // micro_batches_per_step)
    if len(stream) < micro_batches_per_step:
        raise InputError(
            f"data.train fills {len(stream.row_starts) - 1} packed rows in {recipe.train.epochs} epochs, and one step "
            f"takes train.rows_per_step {recipe.train.rows_per_step}",
            "give more data or epochs, or lower train.rows_per_step or data.sequence_length",
        )
    return min(steps, recipe.train.max_steps or steps)


def row_stream(
    recipe: Recipe, target: Target, notices: Notices, samples: list[Sample] | None
) -> tuple[RowStream, tuple[Example, ...]]:
    """Conversations -> token rows -> packed stream, with every unused row counted by reason. `samples` of another tool
    bring their own rows; the conversations then say which tokens are answers."""
    conversations, unreadable = read_conversations(recipe.data.train)
    renderer = ChatRenderer(target.tokenizer, target.stop_ids, recipe.data.template_kwargs, recipe.data.sequence_length)
    rendered = render_conversations(conversations, renderer, recipe.data.max_unusable_share, unreadable)
    if samples is not None:
        rendered = adopt(samples, rendered, recipe.data.max_unusable_share)
    stream = RowStream(
        rendered.rows,
        row_length=recipe.data.sequence_length,
        rows_per_batch=recipe.train.rows_per_micro_batch,
        seed=recipe.train.seed,
        epochs=recipe.train.epochs,
    )
    refuse_unknown_ids(stream, target)
    notices.section("data")
    notices.facts(data_facts(rendered, stream))
    warning = thinking_warning(conversations, renderer)
    if warning is not None:
        notices.say(warning)
    return stream, examples_of(conversations, stream)


def examples_of(conversations: Sequence[Conversation], stream: RowStream) -> tuple[Example, ...]:
    by_place = {conversation.where: conversation for conversation in conversations}
    documents = np.unique(np.linspace(0, len(stream.where) - 1, EXAMPLES).round().astype(int)).tolist()
    known = [document for document in documents if stream.where[document] in by_place]
    return tuple(Example(by_place[stream.where[document]], document) for document in known)


def refuse_unknown_ids(stream: RowStream, target: Target) -> None:
    highest = int(stream.ids.max())
    if highest >= target.parts.vocab_size:
        raise InputError(
            f"data.train holds token {highest}, and the target's embedding has {target.parts.vocab_size} rows",
            "the tokenizer is not this target's: put the target's own tokenizer beside its weights",
        )


def data_facts(rendered: RenderedData, stream: RowStream) -> dict[str, Any]:
    tokens = sum(len(row.ids) for row in rendered.rows)
    unused = ", ".join(f"{number:,} {reason}" for reason, number in rendered.unusable.most_common())
    answers = f"{rendered.supervised_tokens:,} of them the target's answers"
    return {
        "rows": f"{len(rendered.rows):,} ({tokens:,} tokens, {answers})",
        "not used": unused or "none",
        **{name: f"{n:,}" for name, n in rendered.notes.items()},
        "packed": f"rows of {stream.row_length} tokens, {stream.fill_share:.1%} filled",
    }


def derived_facts(job: Job) -> dict[str, Any]:
    spec, recipe = job.spec, job.recipe
    parameters = sum(p.numel() for p in job.drafter.parameters())
    return {
        "target": f"{job.target.name} ({job.target.dtype}, {job.target.device})".replace("torch.", ""),
        **job.target.speed,
        "layers": f"{spec.num_hidden_layers} of hidden {spec.hidden_size}, FFN {spec.intermediate_size}, "
        f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}: {parameters:,} parameters",
        "taps": f"{list(spec.target_layer_ids)} of {spec.num_target_layers} layers",
        "block": f"{spec.block_size} tokens, mask token {spec.mask_token_id} "
        f"{job.target.tokenizer.convert_ids_to_tokens(spec.mask_token_id) or '(padding row)'}",
        "loss": f"{recipe.loss.kind}, {weights_text(recipe)}",
        "steps": f"{job.total_steps:,} of {recipe.train.rows_per_step} rows, {job.step.anchors} anchors a row",
        **({"products": FP8_TEXT} if recipe.train.products == "fp8" else {}),
        **({"ranks": job.ranks.plan.text} if job.ranks.size > 1 else {}),
    }


def provenance_of(recipe: Recipe, target: Target, stream: RowStream) -> Provenance:
    return Provenance(
        target_name=target.name,
        target_revision=recipe.target.revision or target.identity,
        label_source=recipe.loss.kind,
        template_hash=target.template_hash,
        thinking=recipe.data.template_kwargs.get("enable_thinking"),
        data_hash=stream.content_hash,
        products=recipe.train.products,
    )


def weights_text(recipe: Recipe) -> str:
    if recipe.loss.weights == "dpace":
        return f"D-PACE weights, alpha {recipe.loss.alpha:g}"
    return f"exponential weights, gamma {recipe.gamma:g}"


def run_identity(recipe: Recipe, target: Target, spec: DrafterSpec, stream: RowStream) -> dict[str, Any]:
    """Whatever changes the numbers of a run. A checkpoint refuses to go on where any of it differs."""
    sections = {
        "drafter": asdict(spec) | {name: list(asdict(spec)[name]) for name in ("target_layer_ids", "layer_types")},
        "loss": recipe.loss.model_dump(mode="json"),
        "optim": recipe.optim.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json", include=TRAIN_IDENTITY),
    }
    return {
        "target weights": target.identity,
        "target dtype": str(target.dtype).removeprefix("torch."),
        "chat template": target.template_hash,
        "data": stream.content_hash,
        "data.sequence_length": recipe.data.sequence_length,
        **{f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()},
    }
