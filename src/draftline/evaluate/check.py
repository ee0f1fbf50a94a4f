"""`draftline check`: one gate after another, each with the figure that proves it; the first that fails ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from draftline.config import DrafterSection, TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.template import Unusable
from draftline.decode.chain import Limits, Sampler, decode_plain
from draftline.decode.proofs import prove_cache
from draftline.drafter.model import Drafter
from draftline.errors import InputError
from draftline.evaluate.decoding import DecodingTask, measure
from draftline.evaluate.evaluation import check_fit, load_drafter
from draftline.evaluate.proofs import (
    describe_mask,
    prove_forward,
    prove_mask,
    prove_origin,
    prove_rope,
    prove_tensors,
)
from draftline.export.folder import detect_format, read_drafter
from draftline.monitor.notices import Notices, stdout_console
from draftline.records import DrafterSpec
from draftline.target.derive import choose_mask_id, derive_spec
from draftline.target.load import Target, choose_device, load_target
from draftline.target.parts import prove_parts
from draftline.target.proofs import prove_padding, prove_taps

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "A train leaves at nine and arrives at eleven thirty. How long does the journey take? Explain step by step.",
    "Name three colours.",
)
ANSWER_TOKENS = 32
NAME_WIDTH = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Gate(Generic[T]):
    """`prove` returns what the gate establishes, or raises InputError: what was expected, found and likely wrong."""

    name: str
    prove: Callable[[], T]
    figure: Callable[[T], str] = str


def through(gate: Gate[T], notices: Notices) -> T:
    """Pass a gate and say so; a gate that fails is named in its InputError."""
    try:
        value = gate.prove()
    except InputError as error:
        notices.say(f"  FAIL  {gate.name}")
        raise InputError(f"gate {gate.name!r}: {error.what}", error.remedy) from error
    notices.say(f"  ok    {gate.name.ljust(NAME_WIDTH)}  {gate.figure(value)}")
    return value


def check(target: str, draft: Path | None) -> None:
    """Pass every gate of a target, in float32, and of a drafter for it. Raises InputError at the first that fails."""
    notices = Notices(stdout_console())
    notices.section(f"target {target}")
    section = TargetSection(path=target, dtype="float32")
    loaded = through(Gate("loads", lambda: load_target(section, choose_device("auto")), target_figure), notices)
    prompts = through(Gate("prompts", lambda: prompt_ids(loaded), prompts_figure), notices)
    for gate in target_gates(loaded, prompts):
        through(gate, notices)
    if draft is not None:
        notices.section(f"drafter {draft}")
        check_drafter(draft, loaded, prompts, notices)


def check_drafter(draft: Path, target: Target, prompts: list[list[int]], notices: Notices) -> None:
    spec, tensors = through(Gate("reloads", lambda: read_drafter(draft), lambda _: detect_format(draft)), notices)
    for gate in folder_gates(draft, spec, target):
        through(gate, notices)
    through(Gate("tensors", lambda: prove_tensors(tensors), "{} finite, none zero".format), notices)
    drafter = load_drafter(spec, tensors).to(target.device)
    text = answered(target, prompts[0])
    through(Gate("forward", lambda: prove_forward(target, drafter, text), relative_figure), notices)
    through(Gate("decoding", lambda: prove_decoding(target, drafter, prompts)), notices)


def target_gates(target: Target, prompts: list[list[int]]) -> Iterator[Gate[Any]]:
    longest = max(prompts, key=len)
    row = torch.tensor([longest], device=target.device)
    yield Gate("head", lambda: prove_parts(target.model, target.parts, row), relative_figure)
    yield Gate("cache", lambda: prove_cache(target, longest), relative_figure)
    yield Gate("taps", lambda: prove_taps(target, longest), relative_figure)
    yield Gate("padding", lambda: prove_padding(target, prompts), relative_figure)
    yield Gate("mask token", lambda: describe_mask(choose_mask_id(None, target), target))
    yield Gate("drafter shape", lambda: derive_spec(DrafterSection(), target), shape_figure)


def folder_gates(draft: Path, spec: DrafterSpec, target: Target) -> Iterator[Gate[str]]:
    """What a drafter's folder says, before any of its numbers is used."""
    yield Gate("geometry", lambda: check_fit(draft, spec, target))
    yield Gate("RoPE", lambda: prove_rope(spec, target))
    yield Gate("mask token", lambda: prove_mask(spec, target))
    yield Gate("origin", lambda: prove_origin(draft, spec, target))


def prompt_ids(target: Target) -> list[list[int]]:
    renderer = ChatRenderer(target.tokenizer, target.stop_ids, {}, int(target.parts.config.max_position_embeddings))
    try:
        return [renderer.prompt_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
    except Unusable as unusable:
        raise InputError(
            f"expected a prompt for one user turn, found {unusable.reason}", "likely a broken chat template"
        ) from unusable


def answered(target: Target, prompt: list[int]) -> list[int]:
    """The prompt with the target's own greedy answer."""
    limits = Limits(ANSWER_TOKENS, target.stop_ids)
    return prompt + decode_plain(target, prompt, limits, Sampler(0.0, 0, target.device)).ids


def prove_decoding(target: Target, drafter: Drafter, prompts: list[list[int]]) -> str:
    """tau on the built-in questions, where the text must be that of plain decoding, token for token."""
    task = DecodingTask("check", prompts, ANSWER_TOKENS, temperature=0.0, thinking=None, compare_plain=True)
    report = measure(target, drafter, task, lambda _answer: None).report
    if report.same_text_share != 1.0:
        raise InputError(
            f"expected plain decoding's text on {report.prompts} questions, found it on {report.same_text_share:.0%}",
            "likely the target's cache cannot take tokens back (recurrent states): decoding would change its text",
        )
    return f"tau {report.tau:.3f}, same text as plain decoding on {report.prompts} of {report.prompts} questions"


def target_figure(target: Target) -> str:
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    dtype = str(target.dtype).removeprefix("torch.")
    return f"{type(target.model).__name__}, {parameters:,} parameters, {dtype}, {target.device}"


def prompts_figure(prompts: list[list[int]]) -> str:
    return f"{len(prompts)} questions of {', '.join(str(len(ids)) for ids in prompts)} tokens"


def shape_figure(spec: DrafterSpec) -> str:
    return f"taps {list(spec.target_layer_ids)} of {spec.num_target_layers} layers, hidden {spec.hidden_size}"


def relative_figure(error: float) -> str:
    return f"relative difference {error:.1e}"
