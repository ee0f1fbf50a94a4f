"""Preflight: every gate that a run passes before its first step, on its own target, rows, device and compiled step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.text import Text

from draftline.data.excerpt import excerpt
from draftline.data.inspection import TRAINED_CLOSE, TRAINED_OPEN, marked_row
from draftline.data.proofs import row_of
from draftline.errors import InputError, RunError
from draftline.evaluate.gates import Gate, Gates
from draftline.evaluate.subject import Subject, data_gates, drafter_gates, target_gates
from draftline.monitor.events import Preflight
from draftline.monitor.notices import Notices
from draftline.train.folder import RunFolder
from draftline.train.footprint import copies_on, prove_disk, prove_memory
from draftline.train.job import Job
from draftline.train.publishing import publish_drafter
from draftline.train.trial import prove_masters, prove_trial
from draftline.train.warm_up import compile_kernels

SHOWN_ROWS = 2
EXCERPT_ANCHORS = 8  # blocks a row where the training's own batch would take too long


def preflight(job: Job, folder: RunFolder, notices: Notices) -> Preflight:
    """Pass every gate, in the order in which a fault would be understood. Raises InputError at the first that fails.

    Weights, optimizer and random state are afterwards what they were. A few seconds; longer than one training step only
    where steps are shorter than that.
    """
    notices.section("preflight")
    gates = Gates(notices)
    show_rows(job, notices)
    gates.all(gates_of(job, folder))
    seconds = gates.seconds
    notices.say(f"  {len(gates.figures)} gates passed in {seconds:.1f} s")
    return Preflight(gates.figures, seconds)


def gates_of(job: Job, folder: RunFolder) -> Iterator[Gate[Any]]:
    yield Gate("disk", lambda: prove_disk(job, folder))
    yield Gate("memory", lambda: prove_memory(job))
    if job.step.fused is not None:
        yield Gate("kernels", lambda: prove_kernels(job))
    yield from data_gates(job.target, job.stream, job.examples)
    subject = subject_of(job)
    yield from target_gates(subject)
    whole = not job.ranks.plan.sharded  # a step over shards takes every rank, and a gate may fail on one alone
    if whole:
        yield Gate("masters", lambda: prove_masters(job.drafter, job.optimizer))
    yield from drafter_gates(subject)
    if whole:
        yield Gate("trial step", lambda: prove_trial(subject.step, job.optimizer, subject.batch, copies_on(job)))
    yield Gate("export", lambda: prove_export(job, folder))


def prove_kernels(job: Job) -> str:
    """Also what the gates after this one would else wait for, kernel by kernel."""
    compile_kernels(job.step, job.stream.batch(0), job.target.dtype)
    return "the step's kernels compile"


def subject_of(job: Job) -> Subject:
    """On CUDA the fused step with the training's own first batch: what is proven is what runs. Elsewhere the plain step
    on a few short documents, for a full batch of a real model would take minutes."""
    assert job.capture is not None
    if job.target.device.type == "cuda":
        return Subject(job.target, job.step, job.capture, job.stream.batch(0))
    step = copy.copy(job.step)
    step.anchors = min(step.anchors, EXCERPT_ANCHORS)
    return Subject(job.target, step, job.capture, excerpt(job.stream))


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
