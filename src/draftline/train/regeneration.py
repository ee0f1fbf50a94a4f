"""`draftline regenerate`: the target writes the answers it will later be drafted for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftline.config import TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_prompts
from draftline.data.regenerate import RegenerateReport
from draftline.data.regenerate import regenerate as write_answers
from draftline.environment.device import choose_device
from draftline.errors import InputError
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.progress import Progress
from draftline.target.generate import Generator
from draftline.target.load import Target, load_target


@dataclass(frozen=True)
class RegenerateRequest:
    target: str
    prompts: Path
    out: Path
    max_new_tokens: int
    batch_size: int
    temperature: float
    seed: int
    device: str


def regenerate(request: RegenerateRequest) -> RegenerateReport:
    """Write one conversation per prompt to `request.out`; an interrupted call is continued by the same call."""
    notices = Notices(stdout_console())
    target = load_target(TargetSection(path=request.target), choose_device(request.device))
    report = answer_prompts(target, request, notices)
    unusable = ", ".join(f"{number:,} {reason}" for reason, number in report.unusable.most_common())
    notices.facts(
        {
            "written": f"{request.out}: {report.written + report.resumed:,} answers, {report.answer_tokens:,} tokens",
            "cut at the limit": f"{report.cut:,} (no end of turn is trained there)",
            "not used": unusable or "none",
        }
    )
    return report


def answer_prompts(target: Target, request: RegenerateRequest, notices: Notices) -> RegenerateReport:
    room = int(target.parts.config.max_position_embeddings) - request.max_new_tokens
    if room < 1:
        raise InputError(
            f"--max-new-tokens {request.max_new_tokens} leaves no room for a prompt: the target takes "
            f"{target.parts.config.max_position_embeddings} positions",
            "lower it",
        )
    renderer = ChatRenderer(target.tokenizer, target.stop_ids, {}, room)
    generator = Generator(target, request.max_new_tokens, request.batch_size, request.temperature, request.seed)
    prompts = read_prompts(str(request.prompts))
    every = max(1, len(prompts) // 10)
    with Progress("regenerate", len(prompts), console=notices.console, every=every) as progress:

        def generate(ids: list[list[int]]) -> Iterator[tuple[int, list[int], bool]]:
            progress.done = len(prompts) - len(ids)
            for index, answer, finished in generator(ids):
                progress.advance(tokens=len(answer))
                yield index, answer, finished

        header = {
            "target": target.identity,
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        return write_answers(prompts, renderer, renderer.spell, generate, request.out, header)
