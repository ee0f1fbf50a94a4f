"""Preflight: every gate that a run passes before its first step, on its own target, rows, device and compiled step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.text import Text

from draftline.data.excerpt import excerpt, excerpt_of
from draftline.data.inspection import TRAINED_CLOSE, TRAINED_OPEN, marked_row
from draftline.data.proofs import row_of
from draftline.errors import InputError, RunError
from draftline.evaluate.gates import NAME_WIDTH, Gate, Gates
from draftline.evaluate.subject import Subject, data_gates, drafter_gates, target_gates
from draftline.monitor.events import Preflight
from draftline.monitor.notices import Notices
from draftline.target.capture import FeatureCapture
from draftline.train.folder import RunFolder
from draftline.train.footprint import copies_on, prove_disk, prove_memory
from draftline.train.job import Job, Setting
from draftline.train.preparation import target_subject
from draftline.train.publishing import publish_drafter
from draftline.train.trial import prove_masters, prove_trial
from draftline.train.warm_up import compile_kernels

SHOWN_ROWS = 2
EXCERPT_ANCHORS = 8  # blocks a row where the training's own batch would take too long


def preflight(job: Job, folder: RunFolder, notices: Notices) -> Preflight:
    """Pass every gate, in the order in which a fault would be understood. Collective; raises InputError on every rank
    at the first gate that fails on any.

    Weights, optimizer and random state are afterwards what they were. A few seconds; longer than one training step only
    where steps are shorter than that.
    """
    notices.section("preflight")
    gates = Gates(notices)
    show_rows(job, notices)
    job.ranks.together(lambda: gates.all(gates_before_features(job, folder)))
    for role, passed in zip(job.ranks.plan.roles, job.ranks.gather(None), strict=True):
        if passed is not None:
            notices.say(f"  ok    {'target'.ljust(NAME_WIDTH)}  on rank {role.rank}: {', '.join(passed.gates)}")
    subject = subject_of(job)
    job.ranks.together(lambda: gates.all(gates_of_features(job, folder, subject)))
    seconds = gates.seconds
    notices.say(f"  {len(gates.figures)} gates passed in {seconds:.1f} s")
    return Preflight(gates.figures, seconds)


def prove_target(setting: Setting, notices: Notices) -> Preflight:
    """The target's gates, on a rank that captures for others. Collective with their `preflight`, which says them."""
    capture = FeatureCapture(setting.target, setting.spec.target_layer_ids, setting.loss.needs_final)
    notices.facts(setting.target.speed)
    gates, recipe = Gates(notices), setting.recipe
    setting.ranks.together(
        lambda: gates.all(target_gates(target_subject(recipe, capture, setting.loss, setting.stream)))
    )
    passed = Preflight(gates.figures, gates.seconds)
    setting.ranks.gather(passed)
    return passed


def gates_before_features(job: Job, folder: RunFolder) -> Iterator[Gate[Any]]:
    """In a split the target's own gates are passed meanwhile, on the ranks that hold its layers (`prove_target`)."""
    yield Gate("disk", lambda: prove_disk(job, folder))
    yield Gate("memory", lambda: prove_memory(job))
    if job.step.fused is not None:
        yield Gate("kernels", lambda: prove_kernels(job))
    yield from data_gates(job.target, job.stream, job.examples)


def gates_of_features(job: Job, folder: RunFolder, subject: Subject) -> Iterator[Gate[Any]]:
    yield from target_gates(subject)
    whole = not job.ranks.plan.sharded  # a step over shards takes every rank, and a gate may fail on one alone
    if whole:
        yield Gate("masters", lambda: prove_masters(job.drafter, job.optimizer))
    yield from drafter_gates(subject)
    if whole:
        yield Gate("trial step", lambda: prove_trial(subject.step, job.optimizer, subject.batch, copies_on(job)))
    if job.ranks.first:  # the one rank that exports; eight would write eight drafters at once
        yield Gate("export", lambda: prove_export(job, folder))


def prove_kernels(job: Job) -> str:
    """Also what the gates after this one would else wait for, kernel by kernel."""
    compile_kernels(job.step, job.stream.batch(0), job.target.dtype)
    return "the step's kernels compile"


def subject_of(job: Job) -> Subject:
    """On CUDA the fused step with the training's own first batch: what is proven is what runs. Elsewhere the plain step
    on a few short documents, for a full batch of a real model would take minutes.

    A drafter of a split proves itself on the features of its first micro-batch as they come through the channel; it
    waits for them here.
    """
    step, on_cuda = job.step, job.target.device.type == "cuda"
    if not on_cuda:
        step = copy.copy(step)
        step.anchors = min(step.anchors, EXCERPT_ANCHORS)
    if job.capture is not None:
        return Subject(job.target, step, job.capture, job.stream.batch(0) if on_cuda else excerpt(job.stream))
    received = job.features.get(job.own_micro_batches(0)[0])
    batch = received if on_cuda else excerpt_of(received)
    return Subject(job.target, step, lambda _: batch, batch.packed)


def show_rows(job: Job, notices: Notices) -> None:
    """Two rows as they are trained on, for a person's eyes: nobody else can tell that these are the right data."""
    styled = notices.console.is_terminal
    mark = "green" if styled else f"between {TRAINED_OPEN} and {TRAINED_CLOSE}"
    chosen = sorted({example.document for example in job.examples})
    chosen = [*chosen[:1], *chosen[1:][-1:]] if chosen else list(range(min(SHOWN_ROWS, len(job.stream.lengths))))
    for document in chosen:
        row = row_of(job.stream, document)
        notices.console.print(Text(f"  {row.where}; what is {mark} is trained", style="dim"), soft_wrap=True)
        notices.console.print(marked_row(job.target.tokenizer, row, styled), soft_wrap=True)


def prove_export(job: Job, folder: RunFolder) -> str:
    """The untrained drafter, published as the trained one will be and removed again."""
    masters = job.drafter.state_dict()
    with TemporaryDirectory(prefix=".preflight-", dir=folder.root) as scratch:
        out = Path(scratch) / "export"
        try:
            publish_drafter(job.spec, masters, job.provenance, out, job.recipe.export.format, job.target)
        except RunError as error:
            if error.__cause__ is not None:  # the disk refuses, which no recipe mends
                raise
            raise InputError(
                f"expected an export that reloads to the same logits, found: {error.what}",
                "likely a disk that keeps other bytes than it is given; where none does, report it with the recipe",
            ) from error
        size_bytes = sum(file.stat().st_size for file in out.iterdir())
    return f"{job.recipe.export.format} folder of {size_bytes / 2**20:.1f} MiB reloads to the same logits"
