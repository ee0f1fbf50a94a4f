"""tau and speed-up by draftline's own decoding: the numbers of SPEC 7, measured on what `export` wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftline.decode.chain import Decoded, Limits, Sampler, decode_plain, decode_speculative
from draftline.drafter.model import Drafter
from draftline.records import EvalReport
from draftline.target.load import Target


@dataclass(frozen=True)
class DecodingTask:
    """What is decoded and how. `prompts` are token ids with the generation prompt at their end."""

    benchmark: str
    prompts: Sequence[list[int]]
    max_new_tokens: int
    temperature: float
    thinking: bool | None
    compare_plain: bool  # also decode without the drafter: same text (greedy only) and speed-up
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """The report and the answers behind it."""

    report: EvalReport
    answers: tuple[Decoded, ...]


def measure(target: Target, drafter: Drafter, task: DecodingTask, advance: Callable[[Decoded], None]) -> Measured:
    """Decode every prompt at batch 1; `advance` is called with each answer as it is done."""
    limits = Limits(task.max_new_tokens, target.stop_ids)
    sampler = Sampler(task.temperature, task.seed, target.device)
    answers, seconds = [], 0.0
    for prompt in task.prompts:
        answer, spent = timed(target, partial(decode_speculative, target, drafter, prompt, limits, sampler))
        answers.append(answer)
        seconds += spent
        advance(answer)
    plain_rate, same = plain_comparison(target, task, limits, answers) if task.compare_plain else (None, None)
    slots = drafter.spec.block_size - 1
    steps = sum(len(a.committed) for a in answers)
    committed = sum(sum(a.committed) for a in answers)
    report = EvalReport(
        benchmark=task.benchmark,
        engine="draftline",
        tau=committed / steps if steps else 1.0,
        slot_acceptance=slot_acceptance(answers, slots),
        prompts=len(answers),
        verify_steps=steps,
        tokens=sum(len(a.ids) for a in answers),
        temperature=task.temperature,
        thinking=task.thinking,
        block_size=drafter.spec.block_size,
        max_new_tokens=task.max_new_tokens,
        tokens_per_s=sum(len(a.ids) for a in answers) / seconds,
        plain_tokens_per_s=plain_rate,
        same_text_share=same,
    )
    return Measured(report, tuple(answers))


def plain_comparison(
    target: Target, task: DecodingTask, limits: Limits, answers: Sequence[Decoded]
) -> tuple[float, float | None]:
    """(plain tokens/s, share of prompts with the same text; None when sampling, where texts differ by chance)."""
    sampler = Sampler(task.temperature, task.seed, target.device)
    same, tokens, seconds = 0, 0, 0.0
    for prompt, answer in zip(task.prompts, answers, strict=True):
        plain, spent = timed(target, partial(decode_plain, target, prompt, limits, sampler))
        same += plain.ids == answer.ids
        tokens += len(plain.ids)
        seconds += spent
    return tokens / seconds, (same / len(answers) if task.temperature == 0 else None)


def slot_acceptance(answers: Sequence[Decoded], slots: int) -> tuple[float, ...]:
    """Share of verification steps in which draft slot k was committed, k = 1..B-1."""
    steps = [count for answer in answers for count in answer.committed]
    return tuple(sum(count > k for count in steps) / max(1, len(steps)) for k in range(1, slots + 1))


def timed(target: Target, work: Callable[[], Decoded]) -> tuple[Decoded, float]:
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started
