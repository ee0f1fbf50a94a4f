"""Run by the vLLM interpreter, never imported by draftline: one JSON job on stdin, one JSON line of results on stdout.

The job: target, revision, draft (folder or null), num_speculative_tokens, prompts (lists of token ids), max_new_tokens,
stop_token_ids, temperature, dtype, max_model_len, seed. Needs vLLM and the standard library only;
where they cannot do the job, the line is {"refused": reason}.
"""

import json
import os
import sys
import time
from typing import Any

PREFIX = "vllm:spec_decode_num_"
WARM_UP_TOKENS = 8

Job = dict[str, Any]


def make_engine(job: Job) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    speculative = None
    if job["draft"] is not None:
        speculative = {
            "method": "dflash",
            "model": job["draft"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    return LLM(
        job["target"],
        revision=job["revision"],
        speculative_config=speculative,
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=1,  # batch 1: what the speed-up is defined for, and no answer depends on its neighbours
        enable_prefix_caching=False,  # every prompt pays its own prefill, with the drafter and without
        enforce_eager=current_platform.is_cpu(),  # graphs matter on a GPU; on a CPU they cost minutes at start
        skip_tokenizer_init=True,  # prompts and answers are token ids
        disable_log_stats=False,  # the counters are statistics
        seed=job["seed"],
    )


def sampling_params(job: Job, limit: int, number: int) -> Any:
    """number: the prompt's; each draws from a seed of its own, or equal noise would tie their answers together."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=limit,
        temperature=job["temperature"],
        seed=job["seed"] + number,
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
    )


def generate(engine: Any, prompt: list[int], sampling: Any) -> list[int]:
    output = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


def counters(engine: Any) -> dict[str, list[int]]:
    """The speculative-decoding counters since the engine started; empty without a drafter."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(PREFIX):
            name = metric.name[len(PREFIX) :]
            found[name] = list(metric.values) if name.endswith("per_pos") else [metric.value]
    return found


def refusal(job: Job) -> str:
    """Why this interpreter cannot do the job, or nothing."""
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"vllm does not import there: {error}"
    if job["draft"] is not None and job["temperature"] > 0 and current_platform.is_cpu():
        # vLLM 0.32 writes the verification rows' temperature, top-k and top-p into an int64 copy and then samples with
        # uninitialised memory: at temperature 1, 20 of 960 tokens were one whose probability is 0.0005
        return "vLLM on a CPU does not keep the target's distribution when it samples with a drafter"
    return ""


def run(job: Job) -> dict[str, Any]:
    """Decode every prompt after a short warm-up. Counters and seconds cover the prompts alone."""
    import vllm
    from vllm.platforms import current_platform

    engine = make_engine(job)
    generate(engine, job["prompts"][0], sampling_params(job, WARM_UP_TOKENS, 0))
    before, started_s = counters(engine), time.perf_counter()
    limit = job["max_new_tokens"]
    answers = [generate(engine, prompt, sampling_params(job, limit, i)) for i, prompt in enumerate(job["prompts"])]
    seconds = time.perf_counter() - started_s
    moved = {name: [a - b for a, b in zip(now, before[name], strict=True)] for name, now in counters(engine).items()}
    on_cpu = current_platform.is_cpu()
    return {"answers": answers, "seconds": seconds, "counters": moved, "vllm": vllm.__version__, "on_cpu": on_cpu}


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its child processes print to stdout: that goes to stderr, results stay alone
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; one sequence needs far less
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    job = json.load(sys.stdin)
    if os.path.isdir(job["target"]):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    reason = refusal(job)
    results.write(json.dumps({"refused": reason} if reason else run(job)) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
