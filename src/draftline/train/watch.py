"""The watch over a run: feeds the alarms, decodes a little now and then, and keeps the rows of steps not taken."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftline.data.stream import RowStream
from draftline.evaluate.decoding import DecodingTask, Measured, measure
from draftline.monitor.alarms import Alarms, RunFacts, is_finite
from draftline.monitor.events import Alarm, Evaluation, EventLog
from draftline.monitor.notices import Notices
from draftline.records import StepReport, TokenRow
from draftline.target.capture import FeatureCapture
from draftline.train.folder import RunFolder
from draftline.train.job import Job

FIRST_LOOK = 20  # steps after which every tensor must have moved; warm-up's first rates are small
SAMPLED = 256  # numbers of each tensor that are compared
LEAST_RATE_SHARE = 0.01  # of optim.lr: below it float32 weights of 1.0 may rightly stay
TEXT = "utf-8"


class Watch:
    """Told of every step; `ended` is the reason why the run must end, once there is one."""

    def __init__(self, job: Job, folder: RunFolder, log: EventLog, notices: Notices) -> None:
        self.job, self.folder, self.log, self.notices = job, folder, log, notices
        recipe = job.recipe
        self.alarms = Alarms(
            RunFacts(
                total_steps=job.total_steps,
                supervised_tokens=int(job.stream.loss_mask.sum()),
                max_unusable_share=recipe.data.max_unusable_share,
                max_skipped_steps=recipe.train.max_skipped_steps,
            )
        )
        self.prompts = answer_prompts(job.stream, recipe.eval.every_prompts) if self.can_decode() else []
        self.ended: str | None = None
        self.shown: dict[str, float] = {}  # numbers for the progress line
        self.marks = samples_of(job)
        self.marked_step = 0
        self.rate = 0.0

    def can_decode(self) -> bool:
        """Not where the target has no layers to run."""
        return bool(self.job.recipe.eval.every) and self.job.target.has_layers

    def is_due(self, step: int) -> bool:
        """Whether `look` wants to be called now that so many steps are done."""
        every = self.job.recipe.eval.every
        return step == FIRST_LOOK or step == self.job.total_steps or bool(every and step % every == 0)

    def settled(self, report: StepReport, rows: int) -> bool:
        """Judge a step; False where it was not taken, and then it is no part of the run's history."""
        self.rate = report.lr
        if is_finite(report.loss, report.grad_norm):
            self.raise_once(self.alarms.step(report, rows))
            return True
        path = self.write_rows(report.step)
        self.raise_once(self.alarms.skipped(report.step, report.loss, report.grad_norm, rows, path))
        if self.alarms.is_over:
            self.ended = f"{self.alarms.skipped_steps} steps had a loss or gradient that is not finite"
        return False

    def look(self, step: int) -> None:
        """Have all parameters moved, and does decoding agree with training?"""
        if step - self.marked_step >= FIRST_LOOK and self.rate >= LEAST_RATE_SHARE * self.job.recipe.optim.lr:
            now = samples_of(self.job)
            still = [name for name, mark in self.marks.items() if torch.equal(mark, now[name])]
            self.marks, self.marked_step = now, step
            self.raise_all(self.alarms.unmoved(step, still))
        every = self.job.recipe.eval.every
        if self.prompts and every and (step % every == 0 or step == self.job.total_steps):
            self.decode(step)

    def decode(self, step: int) -> None:
        """Answers to a few of the data's prompts, decoded with the drafter as it is now. Leaves no trace in the run."""
        job = self.job
        task = DecodingTask(
            "training prompts", self.prompts, job.recipe.eval.every_new_tokens, 0.0,
            job.recipe.data.template_kwargs.get("enable_thinking"), compare_plain=False,
        )  # fmt: skip
        measured = measure(job.target, job.drafter, task, lambda _answer: None)
        report = replace(measured.report, trained_steps=step)
        self.shown = {"tau": report.tau}
        self.log.write(Evaluation(report))
        if report.verify_steps:
            proxy = self.proxy_tau(measured)
            self.raise_all(self.alarms.decoded(step, report.tau, proxy, report.verify_steps))

    def proxy_tau(self, measured: Measured) -> float:
        """The training forward's proxy tau on decoded answers, over all their anchors: it should be their tau."""
        job, step = self.job, copy.copy(self.job.step)
        rows = [
            answer_row(prompt, answer.ids) for prompt, answer in zip(self.prompts, measured.answers, strict=True)
            if len(answer.ids) > 1
        ]  # fmt: skip
        step.anchors = job.recipe.eval.every_new_tokens
        stream = RowStream(rows, max(len(row.ids) for row in rows), len(rows), seed=0, epochs=1)
        capture = FeatureCapture(job.target, job.spec.target_layer_ids, step.loss.needs_final)
        micro = step.measure(capture(stream.batch(0)))
        return float(micro.committed / micro.verify_steps)

    def write_rows(self, step: int) -> str:
        """Append the documents of a step, all ranks', to RUN/not_finite_rows.jsonl, by rank 0; its path."""
        path = self.folder.root / "not_finite_rows.jsonl"
        if not self.job.ranks.first:
            return str(path)
        lines = [json.dumps(entry) + "\n" for entry in self.rows_of(step)]
        with path.open("a", encoding=TEXT) as file:
            file.writelines(lines)
        return str(path)

    def rows_of(self, step: int) -> list[dict[str, Any]]:
        stream, entries = self.job.stream, []
        for document in documents_of_step(self.job, step):
            start, length = int(stream.starts[document]), int(stream.lengths[document])
            ids = stream.ids[start : start + length].tolist()
            text = str(self.job.target.tokenizer.decode(ids))
            entries.append({"step": step, "where": stream.where[document], "text": text, "ids": ids})
        return entries

    def raise_once(self, alarms: list[Alarm]) -> None:
        """What every drafter finds in the same numbers is rank 0's to say; a run that ends for it ends on all."""
        if self.job.ranks.first:
            self.raise_all(alarms)

    def raise_all(self, alarms: list[Alarm]) -> None:
        """Write and show alarms; where the recipe says so, one of them ends the run."""
        for alarm in alarms:
            self.log.write(alarm)
            self.notices.warn(alarm.name, alarm.evidence, alarm.remedy)
            if self.job.recipe.train.on_alarm == "stop":
                self.ended = self.ended or f"alarm {alarm.name}: {alarm.evidence}"


def documents_of_step(job: Job, step: int) -> list[int]:
    """Numbers of the documents in a step's micro-batches."""
    batches = [job.stream.batch(index) for index in job.micro_batches(step)]
    firsts = np.concatenate([batch.token[(batch.position == 0) & (batch.document >= 0)] for batch in batches])
    return (np.searchsorted(job.stream.starts, firsts, side="right") - 1).tolist()


def answer_prompts(stream: RowStream, count: int) -> list[list[int]]:
    """The prompts before the first answers of the data's first documents."""
    prompts = []
    for document in range(min(count, len(stream.lengths))):
        start, length = int(stream.starts[document]), int(stream.lengths[document])
        first = int(np.argmax(stream.loss_mask[start : start + length]))
        prompts.append(stream.ids[start : start + first].tolist())
    return [prompt for prompt in prompts if prompt]


def answer_row(prompt: list[int], answer: list[int]) -> TokenRow:
    ids = np.array([*prompt, *answer], dtype=np.int32)
    return TokenRow(ids, np.arange(len(ids)) >= len(prompt), "decoded")


@torch.no_grad()
def samples_of(job: Job) -> dict[str, torch.Tensor]:
    """Up to SAMPLED numbers of each tensor that the drafter computes with, evenly from all of it."""
    flat = {name: p.detach().flatten() for name, p in job.drafter.named_parameters()}
    return {name: values[:: max(1, len(values) // SAMPLED)][:SAMPLED].clone() for name, values in flat.items()}
