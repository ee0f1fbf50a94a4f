"""`draftline eval`: one request, three engines, one report. What is measured is always what `export` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from draftline.config import TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_prompts
from draftline.data.template import Unusable
from draftline.decode.chain import Decoded
from draftline.drafter.model import Drafter, holding
from draftline.environment import variables
from draftline.environment.device import choose_device
from draftline.errors import InputError
from draftline.evaluate.decoding import DecodingTask, Measured, measure
from draftline.evaluate.server import Requests, evaluate_server
from draftline.evaluate.vllm_engine import Decoding, Served, evaluate_with_vllm
from draftline.export.folder import read_drafter, read_spec
from draftline.export.speculators import BORROWED
from draftline.monitor.notices import Notices, stderr_console, stdout_console
from draftline.monitor.progress import Progress
from draftline.records import Conversation, DrafterSpec, EvalReport
from draftline.target.load import Target, load_target


@dataclass(frozen=True)
class EvalRequest:
    target: str
    draft: Path
    prompts: Path
    engine: Literal["draftline", "vllm"] = "draftline"
    vllm_python: Path | None = None
    server: str | None = None
    temperature: float = 0.0
    max_new_tokens: int = 256
    max_prompts: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compare_plain: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def benchmark(self) -> str:
        return self.prompts.stem

    @property
    def thinking(self) -> bool | None:
        return self.template_kwargs.get("enable_thinking")


def evaluate(request: EvalRequest, target: Target | None = None) -> EvalReport:
    """Measure one set of prompts. `target` spares loading it again where the caller has it."""
    if request.server is not None:
        return evaluate_server(
            request.server,
            [conversation.messages for conversation in read_prompts(str(request.prompts), request.max_prompts)],
            Requests(request.benchmark, request.max_new_tokens, request.temperature, request.thinking),
        )
    if request.engine == "vllm":
        return evaluate_in_vllm(request)
    return evaluate_here(request, target).report


def evaluate_here(request: EvalRequest, target: Target | None = None) -> Measured:
    """Decode in this process, with the folder that `export` wrote."""
    target = target or load_request_target(request)
    spec, tensors = read_drafter(request.draft)
    check_fit(request.draft, spec, target)
    drafter = load_drafter(spec, tensors).to(target.device)
    task = decoding_task(request, target)
    console = stderr_console()
    with Progress("eval", len(task.prompts), console=console, every=max(1, len(task.prompts) // 4)) as progress:
        committed: list[int] = []

        def advance(answer: Decoded) -> None:
            committed.extend(answer.committed)
            progress.advance(tokens=len(answer.ids), tau=sum(committed) / max(1, len(committed)))

        return measure(target, drafter, task, advance)


def decoding_task(request: EvalRequest, target: Target) -> DecodingTask:
    return DecodingTask(
        benchmark=request.benchmark,
        prompts=prompt_ids(request, target),
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        thinking=request.thinking,
        compare_plain=request.compare_plain,
    )


def load_drafter(spec: DrafterSpec, tensors: dict[str, Any]) -> Drafter:
    """A drafter in float32 from an export's tensors; embedding and head, where a format has them, are the target's."""
    own = {name: value for name, value in tensors.items() if name not in BORROWED}
    # a copy even of float32: what was read from a file is a view of it
    return holding(spec, {name: value.to(torch.float32, copy=True) for name, value in own.items()})


def check_fit(draft: Path, spec: DrafterSpec, target: Target) -> str:
    """A drafter belongs to one target: width, depth and vocabulary must agree. Returns them in words."""
    pairs = {
        "hidden_size": (spec.hidden_size, target.parts.hidden_size),
        "num_target_layers": (spec.num_target_layers, len(target.parts.layers)),
        "vocab_size": (spec.vocab_size, target.parts.vocab_size),
    }
    wrong = [f"{name}: drafter {mine}, target {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    if wrong:
        raise InputError(
            f"drafter {draft} was not made for target {target.name}: {'; '.join(wrong)}",
            "name the target that the drafter was trained for (draftline.json says which)",
        )
    return ", ".join(f"{name} {mine}" for name, (mine, _) in pairs.items())


def prompt_ids(request: EvalRequest, target: Target) -> list[list[int]]:
    """Prompts as token ids with the generation prompt, as an engine would make them."""
    longest = int(target.parts.config.max_position_embeddings)
    renderer = ChatRenderer(target.tokenizer, target.stop_ids, request.template_kwargs, longest)
    return [prompt_of(renderer, prompt) for prompt in read_prompts(str(request.prompts), request.max_prompts)]


def prompt_of(renderer: ChatRenderer, prompt: Conversation) -> list[int]:
    try:
        return renderer.prompt_ids(prompt.messages)
    except Unusable as unusable:
        raise InputError(f"{prompt.where}: {unusable.reason}", "mend or remove that line") from unusable


def load_request_target(request: EvalRequest) -> Target:
    return load_target(TargetSection(path=request.target, dtype=request.dtype), choose_device(request.device))


def evaluate_in_vllm(request: EvalRequest) -> EvalReport:
    interpreter = str(request.vllm_python or variables.vllm_python() or sys.executable)
    target = load_target(TargetSection(path=request.target), torch.device("cpu"))
    check_fit(request.draft, read_spec(request.draft), target)
    served = Served(
        target=request.target,
        revision=None,
        prompts=tuple(tuple(ids) for ids in prompt_ids(request, target)),
        benchmark=request.benchmark,
        thinking=request.thinking,
    )
    decoding = Decoding(
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        stop_token_ids=tuple(sorted(target.stop_ids)),
        dtype=request.dtype,
        seed=0,
        compare_plain=request.compare_plain,
    )
    return evaluate_with_vllm(interpreter, request.draft, served, decoding)


def print_report(report: EvalReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json()))
        return
    notices = Notices(stdout_console())
    notices.section(f"{report.benchmark} ({report.engine})")
    notices.facts(report_facts(report))


def report_facts(report: EvalReport) -> dict[str, str]:
    facts = {
        "tau": f"{report.tau:.3f} tokens a verification step, over {report.verify_steps:,} steps",
        "accepted per slot": " ".join(f"{share:.2f}" for share in report.slot_acceptance),
        "prompts": f"{report.prompts}, {report.tokens:,} tokens, at most {report.max_new_tokens} each",
        "decoding": "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}",
        "rate": f"{report.tokens_per_s:,.1f} tokens/s",
    }
    if report.plain_tokens_per_s is not None:
        speedup = report.tokens_per_s / report.plain_tokens_per_s
        facts["speed-up"] = f"{speedup:.2f} over plain decoding at {report.plain_tokens_per_s:,.1f} tokens/s"
    if report.same_text_share is not None:
        facts["same text"] = f"{report.same_text_share:.1%} of the prompts, token for token"
    return facts
