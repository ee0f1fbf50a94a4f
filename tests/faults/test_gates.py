"""Faults put into real parts, one at a time: each must be stopped before step 1, by the gate that knows it.

Every fault here raises no error by itself: without the gates such a run trains happily and is served badly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import Verdict, fly, gemma_job, job_in, phi_job, with_changes, with_drafter
from torch import Tensor, nn

from draftline.decode import models
from draftline.drafter import step as step_module
from draftline.drafter.anchors import SlotTargets
from draftline.drafter.attention import DenseAttention
from draftline.drafter.model import Drafter, untrained
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.evaluate.labels import prove_labels
from draftline.export import geometry, layout
from draftline.records import Head
from draftline.target import capture as capture_module
from draftline.target.capture import SHARED_FORWARD_TOKENS, FeatureCapture, FlatFeatures
from draftline.target.proofs import documents_of, own_outputs
from draftline.train.job import Job
from draftline.train.preflight import subject_of

Patch = pytest.MonkeyPatch
GATES = [
    "disk", "memory", "supervision", "loss mask", "template", "mask token", "stream", "taps", "features", "head",
    "cache", "embedding", "masters", "RoPE", "context", "anchor state", "own answers", "other blocks",
    "other documents", "labels", "decoding logits", "trial step", "export",
]  # fmt: skip
SLIDING = {"layers": 2, "block_size": 4, "taps": [0, 2], "sliding_layers": [0, 1], "sliding_window": 6}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_in(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_in(tmp_path_factory.mktemp("sliding"), drafter=SLIDING)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return gemma_job(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return phi_job(tmp_path_factory.mktemp("phi"))


@pytest.mark.parametrize("kind", ["clean", "sliding", "gemma", "phi"])
def test_no_clean_job_is_stopped(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    job: Job = request.getfixturevalue(kind)
    before = {name: value.clone() for name, value in job.drafter.state_dict().items()}
    found = fly(job, tmp_path)
    assert found.said == ""
    wanted = GATES.copy()
    if kind == "sliding":
        wanted.insert(GATES.index("labels"), "window")
    assert list(found.figures) == wanted
    assert all(torch.equal(value, before[name]) for name, value in job.drafter.state_dict().items())
    assert all(parameter.grad is None for parameter in job.drafter.parameters())
    assert (job.optimizer.steps_done, len(job.optimizer.state_tensors())) == (0, 0)


Inject = Callable[[Job, Patch], Job]


def tap_off_by_one(job: Job, patch: Patch) -> Job:
    right = capture_module.tapped

    def tapped(layers: nn.ModuleList, *others: Any) -> Any:
        return right(nn.ModuleList([*layers[1:], layers[-1]]), *others)

    patch.setattr(capture_module, "tapped", tapped)
    return job


def last_layer_after_norm(job: Job, patch: Patch) -> Job:
    """As a capture that reads `hidden_states` would have it: its last entry is the normed state."""
    right, norm = capture_module.tapped, job.target.model.model.norm

    def tapped(layers: nn.ModuleList, *others: Any) -> Any:
        return right(nn.ModuleList([*layers[:-1], norm]), *others)

    patch.setattr(capture_module, "tapped", tapped)
    return with_drafter(job, Drafter(replace(job.spec, target_layer_ids=(0, 3))))


class Spoilt(FeatureCapture):
    """A capture of the job's own kind, to be spoilt."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.target, job.spec.target_layer_ids, job.step.loss.needs_final, SHARED_FORWARD_TOKENS)


def with_capture(job: Job, capture: FeatureCapture) -> Job:
    features = copy.copy(job.features)
    features.capture = capture
    return with_changes(job, features=features)


class Zeroed(Spoilt):
    def capture(self, ids: np.ndarray, spans: Any) -> FlatFeatures:
        flat = super().capture(ids, spans)
        return FlatFeatures(torch.zeros_like(flat.taps), flat.final)


class Neighbour(Spoilt):
    """Features of the next row of each padded forward."""

    def pad(self, ids: np.ndarray, group: Any) -> tuple[np.ndarray, Tensor]:
        place, padded = super().pad(ids, group)
        return place, padded.roll(1, 0)


class LeftPadded(Spoilt):
    """Documents padded on the left without a mask: each sees its padding."""

    def pad(self, ids: np.ndarray, group: Any) -> tuple[np.ndarray, Tensor]:
        place, padded = super().pad(ids, group)
        place = place.reshape(padded.shape)
        for row, (_, count) in enumerate(group):
            place[row], padded[row] = np.roll(place[row], -count), padded[row].roll(-count)
        return place.reshape(-1), padded


def raw_final(job: Job, patch: Patch) -> Job:
    """The last layer's output taken for the final-normed state."""
    right = FeatureCapture.capture

    def capture(self: FeatureCapture, ids: np.ndarray, spans: Any) -> FlatFeatures:
        last = FeatureCapture(self.target, (len(self.target.parts.layers) - 1,), want_final=False)
        return FlatFeatures(right(self, ids, spans).taps, right(last, ids, spans).taps)

    patch.setattr(FeatureCapture, "capture", capture)
    return job


def labels_shifted(job: Job, patch: Patch) -> Job:
    right = step_module.slot_targets

    def shifted(ids: Tensor, *rest: Any) -> SlotTargets:
        return right(ids.roll(-1, 1), *rest)

    patch.setattr(step_module, "slot_targets", shifted)
    return job


def teacher_shifted(job: Job, patch: Patch) -> Job:
    right = step_module.gather_teacher
    patch.setattr(
        step_module,
        "gather_teacher",
        lambda final, slots: right(final, replace(slots, position=(slots.position + 1).clamp(max=final.shape[1] - 1))),
    )
    return job


def attention(patch: Patch, kind: type[DenseAttention]) -> None:
    patch.setattr(step_module, "DenseAttention", kind)


def sees(also: Callable[[Tensor, Any], Tensor]) -> Inject:
    """A block that also sees what `also` says of the positions [S], as a mask [R, N, S]."""

    class Leaky(DenseAttention):
        def __init__(self, spec: Any, blocks: Any, context_length: int) -> None:
            self.leak = (also(torch.arange(context_length), blocks) & blocks.keep[..., None])[:, :, None]
            super().__init__(spec, blocks, context_length)

        def visible_context(self, window: int | None) -> Tensor:
            return super().visible_context(window) | self.leak

    def inject(job: Job, patch: Patch) -> Job:
        attention(patch, Leaky)
        return job

    return inject


class AcrossBlocks(DenseAttention):
    """Block n reads the values of block n-1 too."""

    def attend(self, layer: int, q: Tensor, *keys: Tensor) -> Tensor:
        k_context, v_context, k_block, v_block = keys
        neighbour = v_block.roll(self.spec.block_size, 1)
        return super().attend(layer, q, k_context, v_context, k_block, v_block + 0.1 * neighbour)


def across_blocks(job: Job, patch: Patch) -> Job:
    attention(patch, AcrossBlocks)
    return job


class AnswersFed(DrafterStep):
    """Real tokens where the mask token belongs, unless every token has a block."""

    def slot_embeds(self, ids: Tensor, blocks: Any, dtype: torch.dtype) -> Tensor:
        right = super().slot_embeds(ids, blocks, dtype)
        if not blocks.start.any() and ids.shape[1] == blocks.anchor.shape[1]:  # the embedding gate's own question
            return right
        at = (blocks.anchor[..., None] + torch.arange(self.drafter.spec.block_size)).clamp(max=ids.shape[1] - 1)
        return self.embed(ids.gather(1, at.flatten(1))).unflatten(1, at.shape[1:])


def answers_fed(job: Job, patch: Patch) -> Job:
    old = job.step
    step = AnswersFed(old.drafter, old.embed, old.head, old.loss, old.anchors, old.seed)
    return with_changes(job, step=step)


class ShortContext(DenseAttention):
    def __init__(self, spec: Any, blocks: Any, context_length: int) -> None:
        self.nearer = (torch.arange(context_length) < blocks.anchor[..., None] - 1)[:, :, None]
        super().__init__(spec, blocks, context_length)

    def visible_context(self, window: int | None) -> Tensor:
        return super().visible_context(window) & self.nearer


def short_context(job: Job, patch: Patch) -> Job:
    attention(patch, ShortContext)
    return job


def with_head(job: Job) -> Job:
    head = Head(torch.randn(job.spec.vocab_size, job.spec.hidden_size))
    parts = replace(job.target.parts, head=head)
    step = copy.copy(job.step)
    step.head = head
    return with_changes(job, step=step, target=replace(job.target, parts=parts))


def untied_head(job: Job, patch: Patch) -> Job:
    patch.setattr(job.target.parts.config, "tie_word_embeddings", False)
    return with_head(job)


def respecified(**changes: Any) -> Inject:
    def inject(job: Job, patch: Patch) -> Job:
        return with_drafter(job, untrained(replace(job.spec, **changes), seed=0))

    return inject


def other_frequencies(**rope: Any) -> Inject:
    """A spec that says the right thing, and a drafter that turns by another."""

    def inject(job: Job, patch: Patch) -> Job:
        drafter = untrained(job.spec, seed=0)
        parameters = {k: v for k, v in job.spec.rope_parameters.items() if k != "partial_rotary_factor"} | rope
        drafter.inv_freq = Drafter(replace(job.spec, rope_parameters=parameters)).inv_freq
        return with_drafter(job, drafter)

    return inject


def full_rotary(job: Job, patch: Patch) -> Job:
    rope = {name: value for name, value in job.spec.rope_parameters.items() if name != "partial_rotary_factor"}
    return respecified(rope_parameters=rope)(job, patch)


def bf16(job: Job, patch: Patch) -> Job:
    return with_drafter(job, untrained(job.spec, seed=0).bfloat16())


def forgotten_parameter(job: Job, patch: Patch) -> Job:
    drafter = untrained(job.spec, seed=0)
    drafter.layers[0].self_attn.q_norm.weight.requires_grad_(False)
    return with_drafter(job, drafter)


@contextmanager
def changed(weight: Tensor, value: float) -> Iterator[None]:
    before = weight.clone()
    with torch.no_grad():
        weight.view(-1)[5] = value
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def unscaled_embedding(job: Job, patch: Patch) -> Job:
    plain = nn.Embedding.from_pretrained(job.target.parts.embedding.weight, freeze=True)
    step = copy.copy(job.step)
    step.embed = plain
    return with_changes(job, step=step, target=replace(job.target, parts=replace(job.target.parts, embedding=plain)))


def all_prompt(documents: int | None) -> Inject:
    def inject(job: Job, patch: Patch) -> Job:
        stream = copy.copy(job.stream)
        stream.loss_mask = stream.loss_mask.copy()
        stream.loss_mask[: None if documents is None else stream.starts[documents]] = False
        return with_changes(job, stream=stream)

    return inject


def moved_mask(by: int) -> Inject:
    def inject(job: Job, patch: Patch) -> Job:
        stream = copy.copy(job.stream)
        stream.loss_mask = np.roll(stream.loss_mask, by)
        return with_changes(job, stream=stream)

    return inject


class WideWindow(DenseAttention):
    def visible_context(self, window: int | None) -> Tensor:
        return self.context_mask & (self.p >= self.slot_position[..., None] - window)


class WindowFromAnchor(DenseAttention):
    """The same window for every slot, as if all stood at the anchor."""

    def visible_context(self, window: int | None) -> Tensor:
        return self.context_mask & (self.p > self.slot_position[..., :1, None] - window)


class BothWays(DenseAttention):
    """Slots of a sliding layer see later ones."""

    def __init__(self, spec: Any, blocks: Any, context_length: int) -> None:
        super().__init__(spec, blocks, context_length)
        self.causal_bias = torch.zeros_like(self.causal_bias)


def attends(kind: type[DenseAttention]) -> Inject:
    def inject(job: Job, patch: Patch) -> Job:
        attention(patch, kind)
        return job

    return inject


def forgetful_decoding(job: Job, patch: Patch) -> Job:
    patch.setattr(models, "grown", lambda cached, new: new)
    return job


def captured_by(kind: type[Spoilt]) -> Inject:
    return lambda job, patch: with_capture(job, kind(job))


def other_taps(job: Job, patch: Patch) -> Job:
    return with_capture(job, FeatureCapture(job.target, (1, 3), job.step.loss.needs_final))


def recipe(section: str, **values: Any) -> Inject:
    def inject(job: Job, patch: Patch) -> Job:
        part = vars(job.recipe)[section].model_copy(update=values)
        step = copy.copy(job.step)
        step.anchors = values.get("anchors", step.anchors)
        return with_changes(job, recipe=job.recipe.model_copy(update={section: part}), step=step)

    return inject


def unused_part(job: Job, patch: Patch) -> Job:
    """A parameter that no forward reads: its gradient never comes, and a step leaves it."""
    drafter = untrained(job.spec, seed=0)
    drafter.layers[0].mlp.scale = nn.Parameter(torch.ones(3))  # type: ignore[union-attr, assignment]
    return with_drafter(job, drafter)


def no_learning_rate(job: Job, patch: Patch) -> Job:
    patch.setattr(job.optimizer, "section", job.optimizer.section.model_copy(update={"lr": 0.0}))
    return job


def damaged_file(job: Job, patch: Patch) -> Job:
    """One bit of one weight, the last of its mantissa, turned on the way to the disk."""
    right = layout.save_file

    def save(tensors: dict[str, Tensor], *rest: Any, **named: Any) -> None:
        one = tensors["layers.0.mlp.up_proj.weight"].clone()
        one.view(torch.int32).view(-1)[7] ^= 1
        right(tensors | {"layers.0.mlp.up_proj.weight": one}, *rest, **named)

    patch.setattr(layout, "save_file", save)
    return job


def other_causality(job: Job, patch: Patch) -> Job:
    """An export that says of its blocks what is not so, and reads it back."""
    right = geometry.stated_causality
    patch.setattr(geometry, "stated_causality", lambda spec: not right(spec))
    return job


FAULTS: list[tuple[str, str, Inject, str, str]] = [  # fault, job, injection, gate, what it says
    ("tap off by one", "clean", tap_off_by_one, "taps", "off by one"),
    ("features of another tap list", "clean", other_taps, "features", "another tap list"),
    ("last layer tapped after the norm", "clean", last_layer_after_norm, "taps", "after the final norm"),
    ("labels shifted", "clean", labels_shifted, "labels", "shifted by one"),
    ("teacher shifted", "clean", teacher_shifted, "labels", "shifted by one: these are the logits at a+k"),
    ("own answer visible", "clean", answers_fed, "own answers", "answers fed to the block"),
    ("own answer in the context", "clean", sees(lambda p, b: p > b.anchor[..., None]), "own answers", "past a"),
    ("anchor's state visible", "clean", sees(lambda p, b: p == b.anchor[..., None]), "anchor state", "p <= a"),
    ("cross-block leak", "clean", across_blocks, "other blocks", "across blocks"),
    ("other documents", "clean", sees(lambda p, b: p < b.start[..., None]), "other documents", "own document"),
    ("context one short", "clean", short_context, "context", "one token short"),
    ("random head, tied", "clean", lambda job, patch: with_head(job), "head", "tied head that was not loaded"),
    ("random head, untied", "clean", untied_head, "head", "a head that was not loaded"),
    (
        "RoPE base wrong", "clean", respecified(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "RoPE", "'rope_theta': 10000.0",
    ),
    ("RoPE base wrong in the tables", "clean", other_frequencies(rope_theta=10000.0), "RoPE", "cos and sin"),
    ("partial rotary ignored", "phi", full_rotary, "RoPE", "partial"),
    ("partial rotary ignored in the tables", "phi", other_frequencies(), "RoPE", "expected 4 of 8 dimensions turned"),
    ("zeroed hidden states", "clean", captured_by(Zeroed), "features", "zeros only"),
    ("hidden states of a neighbour row", "clean", captured_by(Neighbour), "features", "neighbouring row"),
    ("padding on the left, unmasked", "clean", captured_by(LeftPadded), "features", "padding"),
    ("mask id = pad", "clean", respecified(mask_token_id=1), "mask token", "'<pad>'"),
    ("mask id out of range", "clean", respecified(mask_token_id=32), "mask token", "no embedding row"),
    ("final norm missing", "clean", raw_final, "head", "final norm is missing"),
    ("embedding scale missing", "gemma", unscaled_embedding, "embedding", "5.66 times as long"),
    ("bf16 parameters", "clean", bf16, "masters", "expected a float32 master, found bfloat16"),
    ("a parameter nobody steps", "clean", forgotten_parameter, "masters", "q_norm"),
    ("all-prompt rows", "clean", all_prompt(None), "supervision", "all prompt"),
    ("one all-prompt row", "clean", all_prompt(1), "supervision", "in 1, the first of them"),
    ("loss mask on the prompt", "clean", moved_mask(-2), "loss mask", "shifted or covers the prompt"),
    ("window too wide", "sliding", attends(WideWindow), "window", "off by one"),
    ("window of the anchor", "sliding", attends(WindowFromAnchor), "window", "off by one"),
    ("sliding layers not causal", "sliding", attends(BothWays), "window", "causality rule that differs"),
    ("decoding forgets features", "clean", forgetful_decoding, "decoding logits", "differ between the two"),
    ("a part that nothing uses", "clean", unused_part, "trial step", "found 1 that stay, layers.0.mlp.scale"),
    ("a step that moves nothing", "clean", no_learning_rate, "trial step", "found 14 that stay, fc.weight"),
    ("a weight's bit turned on disk", "clean", damaged_file, "export", "up_proj.weight reads back with other bits"),
    ("causality exported wrongly", "clean", other_causality, "export", "logits differ from the live one's"),
    ("memory too small", "clean", recipe("train", anchors=10**9), "memory", "lower train.rows_per_micro_batch"),
    ("disk too small", "clean", recipe("train", keep_checkpoints=10**9), "disk", "train.keep_checkpoints"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inject", "gate", "says"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_stopped_by_its_gate(
    kind: str, inject: Inject, gate: str, says: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    job: Job = request.getfixturevalue(kind)
    with pytest.MonkeyPatch.context() as patch:
        found = fly(inject(job, patch), tmp_path)
    assert (found.gate, says if says in found.said else found.said) == (gate, says)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_target_that_is_not_finite(clean: Job, value: float, tmp_path: Path) -> None:
    with changed(clean.target.parts.layers[1].mlp.up_proj.weight, value):
        found = fly(clean, tmp_path)
    assert found.gate == "stream" and "layer 1: expected finite values" in found.said


LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|> ' + m['role'] + ' <|end_header_id|> ' + m['content'] }}"
    "{{ ' <|eot_id|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|> assistant <|end_header_id|> ' }}{% endif %}"
)
NO_STOP = (
    "{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "says"), [(LLAMA3, "<|start_header_id|>"), (NO_STOP, "stop tokens [3]")])
def test_the_template_of_another_model(clean: Job, template: str, says: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    job_in(home)
    (home / "target" / "chat_template.jinja").write_text(template)
    found = fly(job_in(home), tmp_path)
    assert found.gate == "template" and says in found.said and "template of another model" in found.said


def test_documents_longer_than_what_is_judged_of_them_prove_labels_too(clean: Job) -> None:
    """Labels and the teacher's logits of the part that the target's own forward has seen. Long ones were left out once,
    and with them the teacher of every run on long conversations."""
    subject = subject_of(clean)
    cut = documents_of(subject.batch, clean.spec.hidden_size, 3, longest=12)
    assert [len(document.ids) for document in cut] == [12, 12, 12]
    own = [own_outputs(clean.target, document.ids) for document in cut]
    assert "the target says the slot's own in" in prove_labels(clean.target, clean.step, subject.batch, cut, own)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="these are the logits at a"):
        prove_labels(clean.target, teacher_shifted(clean, patch).step, subject.batch, cut, own)


def test_no_fault_stays_behind(clean: Job, tmp_path: Path) -> None:
    found: Verdict = fly(clean, tmp_path)
    assert (found.gate, list(found.figures)) == (None, GATES)
