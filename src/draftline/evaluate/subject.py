"""The one list of gates for a target, a drafter and the features between them: `draftline check` and training's
preflight pass the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from draftline.data.proofs import Example, prove_loss_mask, prove_supervision, prove_template
from draftline.data.stream import RowStream
from draftline.decode.proofs import prove_cache
from draftline.drafter.step import DrafterStep
from draftline.evaluate.gates import Gate, relative_figure
from draftline.evaluate.labels import prove_labels
from draftline.evaluate.products import prove_products
from draftline.evaluate.proofs import prove_decoding_logits, prove_mask, prove_slots
from draftline.evaluate.rotary import prove_rope
from draftline.evaluate.sight import Sight
from draftline.evaluate.window import prove_window
from draftline.records import DrafterSpec, FeatureBatch, PackedBatch
from draftline.target.capture import FeatureCapture
from draftline.target.load import Target
from draftline.target.proofs import (
    Document,
    OwnOutputs,
    documents_of,
    own_outputs,
    prove_features,
    prove_head,
    prove_stream,
    prove_taps,
)

DOCUMENTS = 3  # judged one by one


@dataclass(frozen=True)
class Subject:
    """What is proven: the target, the step that trains or serves, and a batch of real documents with their features."""

    target: Target
    step: DrafterStep
    features: Callable[[PackedBatch], FeatureBatch]  # what training gets its features from
    packed: PackedBatch

    @property
    def spec(self) -> DrafterSpec:
        return self.step.drafter.spec

    @cached_property
    def batch(self) -> FeatureBatch:
        return self.features(self.packed)

    @cached_property
    def documents(self) -> list[Document]:
        return documents_of(self.batch, self.target.parts.hidden_size, DOCUMENTS)

    @cached_property
    def own(self) -> list[OwnOutputs]:
        return [own_outputs(self.target, document.ids) for document in self.documents]

    @cached_property
    def alone(self) -> list[Document]:
        """The same documents, each captured now in a batch of its own."""
        hidden, source = self.target.parts.hidden_size, self.batch.packed
        capture = FeatureCapture(self.target, self.spec.target_layer_ids, self.step.loss.needs_final)
        return [documents_of(capture(single(source, d.ids)), hidden, 1)[0] for d in self.documents]


def single(packed: PackedBatch, ids: Sequence[int]) -> PackedBatch:
    """The document of a batch that begins with these tokens, alone in a batch."""
    flat, document = packed.ids.reshape(-1), packed.document.reshape(-1)
    starts = np.flatnonzero((packed.position.reshape(-1) == 0) & (document >= 0))
    start = next(int(s) for s in starts if flat[s : s + len(ids)].tolist() == list(ids))
    fields = (packed.ids, packed.loss_mask, packed.document, packed.position, packed.token)
    return PackedBatch(packed.index, *(values.reshape(-1)[start : start + len(ids)][None] for values in fields))


def data_gates(target: Target, stream: RowStream, examples: Sequence[Example]) -> Iterator[Gate[str]]:
    """Whether the rows are what the target is prompted with and says."""
    yield Gate("supervision", lambda: prove_supervision(stream))
    if examples:
        yield Gate("loss mask", lambda: prove_loss_mask(target.tokenizer, stream, examples))
        yield Gate("template", lambda: prove_template(target.tokenizer, stream, examples, target.stop_ids))


def target_gates(subject: Subject) -> Iterator[Gate[Any]]:
    """Whether the features are the target's own."""
    target, taps = subject.target, subject.spec.target_layer_ids
    yield Gate("mask token", lambda: prove_mask(subject.spec, target))
    if not target.has_layers:  # features from files, proven when they were made; nothing can be run beside them
        return
    yield Gate("stream", lambda: prove_stream(target, subject.own[0]), "{} layers, each from the one before".format)
    yield Gate("taps", lambda: prove_taps(target, taps, subject.alone[0], subject.own[0]), relative_figure)
    yield Gate(
        "features",
        lambda: prove_features(target, taps, subject.documents, subject.alone, subject.own),
        relative_figure,
    )
    yield Gate("head", lambda: prove_head(target, subject.own[0], subject.documents[0].final), relative_figure)
    yield Gate("cache", lambda: prove_cache(target, subject.documents[-1].ids), relative_figure)
    yield Gate("embedding", lambda: prove_slots(target, subject.step), relative_figure)


def drafter_gates(subject: Subject) -> Iterator[Gate[Any]]:
    """Whether the drafter sees what it will see when it is served, is told the right labels, and decodes as it
    trains. All of it is proven on plain products, which show a leak that FP8 would round away; FP8 ones are held
    against those."""
    step, batch = subject.step.with_plain_products(), subject.batch
    if subject.step.products == "fp8":
        yield Gate("FP8 products", lambda: prove_products(subject.step, step, batch))
    sight = Sight(step, batch)
    yield Gate("RoPE", lambda: prove_rope(step.drafter, subject.target))
    yield Gate("context", sight.prove_context)
    yield Gate("anchor state", sight.prove_anchor_state)
    yield Gate("own answers", sight.prove_own_answers)
    yield Gate("other blocks", sight.prove_other_blocks)
    yield Gate("other documents", sight.prove_other_documents)
    if subject.spec.sliding_window is not None:
        yield Gate("window", lambda: prove_window(step, subject.target, batch))
    own = (lambda: subject.own) if subject.target.has_layers else (lambda: [])
    documents = (lambda: subject.documents) if subject.target.has_layers else (lambda: [])
    yield Gate("labels", lambda: prove_labels(subject.target, step, batch, documents(), own()))
    yield Gate("decoding logits", lambda: prove_decoding_logits(subject.target, step, batch), relative_figure)
