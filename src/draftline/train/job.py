"""A job: everything a recipe names, loaded, derived and proven, ready for its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from draftline.channel.local import LocalChannel
from draftline.channel.speculators import Sample
from draftline.config import Recipe
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_conversations
from draftline.data.inspection import thinking_warning
from draftline.data.proofs import Example
from draftline.data.rendering import RenderedData, render_conversations
from draftline.data.stream import RowStream
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.export.provenance import Provenance
from draftline.monitor.notices import Notices
from draftline.monitor.phases import Phase
from draftline.records import Conversation, DrafterSpec
from draftline.target.derive import derive_spec
from draftline.target.load import Target, choose_device
from draftline.train.features import Wanted, adopt, feature_source, foreign_samples, open_target
from draftline.train.optimizer import Optimizer

EXAMPLES = 64  # conversations whose rows are proven to be theirs
TRAIN_IDENTITY = {"seed", "anchors", "rows_per_step", "rows_per_micro_batch", "epochs", "max_steps"}


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    target: Target
    spec: DrafterSpec
    stream: RowStream
    examples: tuple[Example, ...]  # conversations beside their rows, evenly from the whole data set
    features: LocalChannel
    drafter: Drafter
    step: DrafterStep
    optimizer: Optimizer
    total_steps: int
    micro_batches_per_step: int
    identity: dict[str, Any]  # what a resumed run must share with this one
    provenance: Provenance

    def micro_batches(self, step: int) -> range:
        """Numbers of a step's micro-batches. The last step of the data takes what is left, so no row is dropped."""
        first = step * self.micro_batches_per_step
        return range(first, min(first + self.micro_batches_per_step, len(self.stream)))


def assemble(recipe: Recipe, notices: Notices) -> Job:
    """Load, derive, prove and build. Raises InputError on anything the recipe or its files got wrong."""
    device = choose_device(recipe.placement.device)
    target = open_target(recipe, device)
    spec = derive_spec(recipe.drafter, target)
    samples = foreign_samples(recipe)
    stream, examples = row_stream(recipe, target, notices, samples)
    drafter = Drafter(spec)
    drafter.init_weights(recipe.train.seed)
    drafter.to(device)
    per_step = recipe.train.rows_per_step // recipe.train.rows_per_micro_batch
    total_steps = count_steps(recipe, stream, per_step)
    loss = LossKind(recipe.loss.kind, recipe.loss.weights, recipe.gamma, recipe.loss.alpha)
    step = DrafterStep(drafter, target.embed, target.parts.head, loss, recipe.train.anchors, recipe.train.seed)
    wanted = Wanted(spec.target_layer_ids, loss.needs_final)
    source = feature_source(recipe, target, wanted, stream, samples, notices)
    capturing: Phase = "capture" if recipe.target.features is None else "data"
    features = LocalChannel(stream.batch, source, min(total_steps * per_step, len(stream)), step.clock, capturing)
    optimizer = Optimizer(drafter, recipe.optim, total_steps)
    job = Job(
        recipe, target, spec, stream, examples, features, drafter, step, optimizer, total_steps, per_step,
        run_identity(recipe, target, spec, stream), provenance_of(recipe, target, stream),
    )  # fmt: skip
    notices.section("drafter")
    notices.facts(derived_facts(job))
    return job


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
        "layers": f"{spec.num_hidden_layers} of hidden {spec.hidden_size}, FFN {spec.intermediate_size}, "
        f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}: {parameters:,} parameters",
        "taps": f"{list(spec.target_layer_ids)} of {spec.num_target_layers} layers",
        "block": f"{spec.block_size} tokens, mask token {spec.mask_token_id} "
        f"{job.target.tokenizer.convert_ids_to_tokens(spec.mask_token_id) or '(padding row)'}",
        "loss": f"{recipe.loss.kind}, {weights_text(recipe)}",
        "steps": f"{job.total_steps:,} of {recipe.train.rows_per_step} rows, {job.step.anchors} anchors a row",
    }


def provenance_of(recipe: Recipe, target: Target, stream: RowStream) -> Provenance:
    return Provenance(
        target_name=target.name,
        target_revision=recipe.target.revision or target.identity,
        label_source=recipe.loss.kind,
        template_hash=target.template_hash,
        thinking=recipe.data.template_kwargs.get("enable_thinking"),
        data_hash=stream.content_hash,
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
