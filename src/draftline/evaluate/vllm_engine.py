"""tau and speed-up in vLLM, run in an interpreter of its own: vLLM pins a torch of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftline.errors import InputError, RunError
from draftline.evaluate.acceptance import Acceptance, check_counts
from draftline.export.folder import read_drafter, read_spec
from draftline.export.provenance import PROVENANCE_NAME, read_provenance
from draftline.monitor.notices import Notices, stderr_console
from draftline.records import EvalReport

WORKER = Path(__file__).with_name("vllm_worker.py")
STDERR_LINES = 12
SHARED_NORM_LIMIT = 0.02  # k_norm weights start at 1; below this spread vLLM's fault on CPUs does not show


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to decode. stop_token_ids: the ids that end an answer; vLLM adds those of the target's generation config."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    dtype: Literal["auto", "float32", "bfloat16"]
    seed: int
    compare_plain: bool  # decode once more without the drafter: speed-up and, when greedy, same_text_share


@dataclass(frozen=True, slots=True)
class Served:
    """Where the target is and what it is asked."""

    target: str
    revision: str | None
    prompts: tuple[tuple[int, ...], ...]  # token ids, so that both sides see the same text tokenised the same way
    benchmark: str
    thinking: bool | None


def evaluate_with_vllm(interpreter: str, draft: Path, served: Served, decoding: Decoding) -> EvalReport:
    """Decode all prompts in vLLM, one at a time, and report acceptance by vLLM's own counters.

    interpreter: the Python that has vLLM. draft: an exported folder of either format.
    Raises InputError when vLLM does not import there or would sample wrongly (on a CPU above temperature 0), RunError
    when it fails or its counters do not add up.
    """
    if not served.prompts or not all(served.prompts):
        raise InputError(f"{served.benchmark}: no prompts, or an empty one", "give at least one token per prompt")
    spec = read_spec(draft)
    job = make_job(draft, spec.block_size, served, decoding)
    fast = run_worker(interpreter, job)
    plain = run_worker(interpreter, job | {"draft": None}) if decoding.compare_plain else None
    warn_of_notes(draft)
    if fast["on_cpu"]:
        warn_of_shared_k_norm(fast["vllm"], draft)
    found = acceptance(fast["counters"])
    tokens = count_tokens(fast)
    check_counts(f"vLLM {fast['vllm']}", found, tokens, len(served.prompts))
    return EvalReport(
        benchmark=served.benchmark,
        engine=f"vllm {fast['vllm']}",
        tau=found.tau(tokens, len(served.prompts)),
        slot_acceptance=found.slot_acceptance,
        prompts=len(served.prompts),
        verify_steps=found.drafts,
        tokens=tokens,
        temperature=decoding.temperature,
        thinking=served.thinking,
        block_size=spec.block_size,
        max_new_tokens=decoding.max_new_tokens,
        tokens_per_s=tokens / fast["seconds"],
        plain_tokens_per_s=count_tokens(plain) / plain["seconds"] if plain else None,
        same_text_share=same_text_share(fast["answers"], plain["answers"])
        if plain and not decoding.temperature
        else None,
    )


def warn_of_shared_k_norm(version: str, draft: Path) -> None:
    """Say that tau is too low where it is: vLLM's CPU kernel norms every layer's context keys with layer 0's k_norm.

    It ignores that the weights it is given differ by layer. Found on a SmolLM2 drafter of 5 layers, 8 prompts: 177
    verification steps in vLLM 0.32, 167 by definition, and 177 in draftline with layer 0's weights put in.
    """
    spread = k_norm_spread(draft)
    if spread > SHARED_NORM_LIMIT:
        Notices(stderr_console()).warn(
            "vLLM on a CPU misreads this drafter",
            f"vLLM {version} norms the context keys of all layers with layer 0's k_norm; this drafter's differ by up "
            f"to {spread:.2g}, so tau is lower here than by definition",
            "the text is not affected; take tau from --engine draftline, or measure on the hardware that will serve",
        )


def warn_of_notes(draft: Path) -> None:
    """What the export knows of engines that run it otherwise than it was trained."""
    if (draft / PROVENANCE_NAME).is_file():
        for note in read_provenance(draft).value("engine_notes"):
            Notices(stderr_console()).warn("engines run this drafter otherwise", note, "the text is not affected")


def k_norm_spread(draft: Path) -> float:
    """Largest absolute difference between a layer's k_norm weights and those of layer 0."""
    spec, tensors = read_drafter(draft)
    first, *others = [tensors[f"layers.{i}.self_attn.k_norm.weight"].float() for i in range(spec.num_hidden_layers)]
    return max((float((weight - first).abs().max()) for weight in others), default=0.0)


def make_job(draft: Path, block_size: int, served: Served, decoding: Decoding) -> dict[str, Any]:
    longest = max(map(len, served.prompts))
    return {
        "target": served.target,
        "revision": served.revision,
        "draft": str(draft.resolve()),
        "num_speculative_tokens": block_size - 1,
        "prompts": served.prompts,
        "max_new_tokens": decoding.max_new_tokens,
        "stop_token_ids": decoding.stop_token_ids,
        "temperature": decoding.temperature,
        "dtype": decoding.dtype,
        # vLLM stops drafting where a block would pass this limit; two blocks of room keep the last step drafted
        "max_model_len": longest + decoding.max_new_tokens + 2 * block_size,
        "seed": decoding.seed,
    }


def run_worker(interpreter: str, job: dict[str, Any]) -> Any:
    """Run one job in the other interpreter. -I keeps this one's PYTHONPATH and folder out of it."""
    command = [interpreter, "-I", str(WORKER)]
    try:
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"vLLM interpreter {interpreter}: {error.strerror}", other_interpreter()) from error
    if done.returncode != 0:
        last = "\n  ".join(done.stderr.strip().splitlines()[-STDERR_LINES:])
        raise RunError(f"vLLM ended with code {done.returncode}; its last lines:\n  {last}")
    result = json.loads(done.stdout)
    if "refused" in result:
        raise InputError(f"vLLM interpreter {interpreter}: {result['refused']}", other_interpreter())
    return result


def other_interpreter() -> str:
    return (
        "name the Python of an environment with vLLM; scripts/setup_vllm_cpu.sh makes one for CPUs, temperature 0 only"
    )


def acceptance(counters: dict[str, list[int]]) -> Acceptance:
    if "drafts" not in counters:
        raise RunError(f"this vLLM reports no speculative-decoding counters, only {sorted(counters)}")
    return Acceptance(
        drafts=sum(counters["drafts"]),
        accepted=sum(counters["accepted_tokens"]),
        accepted_per_slot=tuple(counters["accepted_tokens_per_pos"]),
    )


def count_tokens(result: Any) -> int:
    return sum(map(len, result["answers"]))


def same_text_share(answers: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> float:
    """Share of prompts whose answers are equal token for token."""
    return sum(list(a) == list(b) for a, b in zip(answers, plain, strict=True)) / len(plain)
