"""README.md of an export: what the drafter is for, how it was trained, how fast it is, how to serve it."""

from __future__ import annotations

import json
import shlex
from typing import Any

TABLE_HEAD = (
    "| benchmark | engine | temperature | thinking | prompts | output limit | tau | speed-up |\n"
    "|---|---|---|---|---|---|---|---|"
)


def model_card(tree: dict[str, Any]) -> str:
    """The card of an export as Markdown. tree: the content of its draftline.json."""
    return f"""---
base_model: {json.dumps(tree["target_name"])}
tags: [dflash, speculative-decoding]
---
# DFlash drafter for {tree["target_name"]}

A block-diffusion draft model ([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)) that lets its target decode
several tokens per step without changing what it says. It is of no use alone.
Trained with draftline {tree["versions"]["draftline"]}.

{facts(tree)}

## Acceptance
{tau_table(tree)}

## Serving
{serving(tree)}
{notes(tree)}"""


def facts(tree: dict[str, Any]) -> str:
    thinking = {True: "on", False: "off", None: "not applicable"}[tree["thinking"]]
    lines = {
        "target": f"{tree['target_name']}, revision {tree['target_revision'] or 'not pinned'}",
        "block size": f"{tree['block_size']} (one anchor and {tree['block_size'] - 1} drafted tokens)",
        "taps": f"{tree['target_layer_ids']}: {tree['tap_convention']}",
        "attention": tree["window_rule"],
        "labels": tree["label_source"],
        "thinking": thinking,
        "products in training": {"plain": "in the target's dtype", "fp8": "layers in FP8 rows"}[tree["products"]],
        "data": f"hash {tree['data_hash']}, chat template hash {tree['template_hash']}",
    }
    return "\n".join(f"- {name}: {value}" for name, value in lines.items())


def tau_table(tree: dict[str, Any]) -> str:
    if not tree["tau"]:
        return "Not measured yet."
    note = "tau: tokens committed per verification step, bonus token included, by real decoding.\n\n"
    return note + "\n".join([TABLE_HEAD, *(tau_row(report) for report in tree["tau"])])


def tau_row(report: dict[str, Any]) -> str:
    plain = report["plain_tokens_per_s"]
    cells = [
        report["benchmark"],
        report["engine"],
        f"{report['temperature']:g}",
        {True: "on", False: "off", None: "-"}[report["thinking"]],
        str(report["prompts"]),
        str(report["max_new_tokens"]),
        f"{report['tau']:.2f}",
        f"{report['tokens_per_s'] / plain:.2f}x" if plain else "-",
    ]
    return f"| {' | '.join(cells)} |"


def notes(tree: dict[str, Any]) -> str:
    return "".join(f"\nKnown difference: {note}.\n" for note in tree["engine_notes"])


def serving(tree: dict[str, Any]) -> str:
    """Commands for the engines that read this folder format. The target is quoted for the shell."""
    target, block = shlex.quote(tree["target_name"]), tree["block_size"]
    config = json.dumps({"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": block - 1})
    vllm = f"vLLM:\n\n    vllm serve {target} --speculative-config '{config}'"
    if tree["format"] == "speculators":
        return f"{vllm}\n\nor, as the folder names its target: `vllm serve THIS_FOLDER`."
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path THIS_FOLDER --speculative-num-draft-tokens {block}"
    )
    return f"{vllm}\n\nSGLang:\n\n    {sglang}"
