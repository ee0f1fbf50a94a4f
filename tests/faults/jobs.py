"""Real jobs on tiny random targets, to be spoilt, and the gate that stops a spoilt one."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Phi3Config, Phi3ForCausalLM

from builders import word_tokenizer
from draftline.config import load_recipe
from draftline.errors import InputError
from draftline.monitor.notices import Notices
from draftline.train.folder import RunFolder
from draftline.train.job import Job, assemble
from draftline.train.optimizer import Optimizer
from draftline.train.preflight import preflight
from runs import write_recipe

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 3, "pad_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip


def quiet() -> Notices:
    return Notices(Console(file=io.StringIO(), width=200, highlight=False, emoji=False, markup=False))


def job_in(home: Path, **sections: dict[str, object]) -> Job:
    """A job on home/target, a random Qwen3 unless another lies there."""
    home.mkdir(parents=True, exist_ok=True)
    return assemble(load_recipe(write_recipe(home, **sections)), quiet())


def save_model(folder: Path, model: Any) -> None:
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.5 if "embed" in name else 0.2)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


def gemma_job(home: Path) -> Job:
    """An embedding scaled by sqrt(d), and sliding beside full layers."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SMALL, head_dim=16, layer_types=kinds, sliding_window=8, query_pre_attn_scalar=16)
    save_model(home / "target", Gemma3ForCausalLM(config))
    return job_in(home)


def phi_job(home: Path) -> Job:
    """RoPE turns half of each head."""
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    config = Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=256)
    save_model(home / "target", Phi3ForCausalLM(config))
    return job_in(home)


def with_drafter(job: Job, drafter: Any) -> Job:
    """The job with another drafter in its step and optimizer."""
    step = type(job.step)(drafter, job.step.embed, job.step.head, job.step.loss, job.step.anchors, job.step.seed)
    optimizer = Optimizer(drafter, job.recipe.optim, job.total_steps)
    return replace(job, drafter=drafter, step=step, optimizer=optimizer, spec=drafter.spec)


@dataclass(frozen=True)
class Verdict:
    gate: str | None  # that failed; None: all passed
    said: str
    figures: dict[str, str]


def fly(job: Job, home: Path) -> Verdict:
    """Preflight of a job: the name of the gate that failed, and what it said."""
    folder = RunFolder(home / "run")
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        passed = preflight(job, folder, quiet())
    except InputError as error:
        named = re.match(r"gate '([^']+)': ", str(error))
        assert named is not None, f"no gate is named in: {error}"
        assert named[1] == "mask token" or ("expected" in error.what and "found" in error.what), error
        assert error.remedy
        return Verdict(named[1], str(error), {})
    return Verdict(None, "", passed.gates)
