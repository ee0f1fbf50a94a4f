"""tau by walking the target's own greedy answers: decoding's steps without the target's verification of each.

    python benchmarks/race/walk.py --target smollm2 --draft runs/race/export race/held.jsonl race/mtbench.jsonl

Rows carry `answer_ids`, the target's own greedy answer. Greedy speculative decoding commits exactly those tokens, so
one target forward gives the features of all positions, and the decoding loop's own drafter drafts at each token that
decoding would stop at. tau = answer tokens after the first / drafts. Prints one JSON object a file, with the tau of
every `source` among its rows. `draftline eval` decodes for real; on the same answers it gives the same number.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftline.config import TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_conversations
from draftline.decode.models import CachedDrafter
from draftline.drafter.model import Drafter
from draftline.environment.device import choose_device
from draftline.evaluate.evaluation import load_drafter
from draftline.export.folder import read_drafter
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture
from draftline.target.load import Target, load_target


def steps_of(row: TokenRow, target: Target, drafter: Drafter, capture: FeatureCapture) -> int:
    """Verification steps that decode the row's answer."""
    taps = capture.capture(row.ids, [(0, len(row.ids))]).taps[None]
    proposer = CachedDrafter(drafter, target)
    at, steps = int(np.flatnonzero(row.loss_mask)[0]), 0
    while at < len(row.ids) - 1:
        drafted = proposer.forward(int(row.ids[at]), taps[:, proposer.verified : at]).argmax(-1).cpu().numpy()
        following = row.ids[at + 1 : at + 1 + len(drafted)]
        wrong = np.flatnonzero(drafted[: len(following)] != following)
        at += (int(wrong[0]) if len(wrong) else len(following)) + 1
        steps += 1
    return steps


def walk(file: Path, target: Target, drafter: Drafter) -> dict[str, Any]:
    capture = FeatureCapture(target, drafter.spec.target_layer_ids, want_final=False)
    renderer = ChatRenderer(target.tokenizer, target.stop_ids, {}, 4096)
    tokens: dict[str, int] = defaultdict(int)
    steps: dict[str, int] = defaultdict(int)
    conversations, _ = read_conversations([str(file)])
    for conversation in conversations:
        row = renderer.rows(conversation)[-1]
        needed = steps_of(row, target, drafter, capture)
        for name in (str(conversation.source), "all"):
            tokens[name] += int(row.loss_mask.sum()) - 1
            steps[name] += needed
    taus = {f"tau {name}": round(tokens[name] / steps[name], 4) for name in sorted(steps) if steps[name]}
    return {"benchmark": file.stem, "rows": len(conversations), "steps": steps["all"]} | taus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, type=Path)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    options = parser.parse_args()
    target = load_target(TargetSection(path=options.target, dtype=options.dtype), choose_device("auto"))
    spec, tensors = read_drafter(options.draft)
    drafter = load_drafter(spec, tensors).to(target.device)
    with torch.no_grad():
        for file in options.files:
            print(json.dumps(walk(file, target, drafter)), flush=True)


if __name__ == "__main__":
    main()
