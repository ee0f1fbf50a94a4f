"""`draftline eval`: one request, three engines, one report. What is measured is always what `export` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from draftline.config import TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_prompts
from draftline.decode.chain import Decoded
from draftline.drafter.model import Drafter
from draftline.environment import variables
from draftline.errors import InputError
from draftline.evaluate.decoding import DecodingTask, Measured, measure
from draftline.evaluate.server import ServerRequest, evaluate_server
from draftline.evaluate.vllm_engine import Decoding, Served, evaluate_with_vllm
from draftline.export.folder import read_drafter
from draftline.monitor.notices import Notices, stderr_console
from draftline.monitor.progress import Progress
from draftline.records import DrafterSpec, EvalReport
from draftline.target.load import Target, choose_device, load_target


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
