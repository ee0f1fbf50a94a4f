"""tau by walking the target's own greedy answers, in seconds instead of minutes.

    python benchmarks/race/walk.py --target smollm2 --draft runs/race/export race/held.jsonl race/mtbench.jsonl

Rows carry `answer_ids`, the target's own greedy answer. Greedy speculative decoding commits exactly those tokens, so
its steps can be counted without decoding: one target forward gives the features of all positions, one drafter forward
drafts after every answer token, and the walk advances by matched prefix + 1. Prints one JSON object a file, with the
tau of every `source` among its rows. `draftline eval` decodes for real and must agree.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from draftline.config import TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.conversations import read_conversations
from draftline.drafter.anchors import Blocks, to_device
from draftline.drafter.losses import LossKind
from draftline.drafter.step import DrafterStep
from draftline.evaluate.evaluation import load_drafter
from draftline.export.folder import read_drafter
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture
from draftline.target.load import choose_device, load_target

ROWS = 4  # documents in one drafter forward


class Walker:
    def __init__(self, target_path: str, draft: Path) -> None:
        self.target = load_target(TargetSection(path=target_path), choose_device("auto"))
        self.spec, tensors = read_drafter(draft)
        drafter = load_drafter(self.spec, tensors).to(self.target.device)
        parts = self.target.parts
        self.step = DrafterStep(drafter, parts.embedding, parts.head.weight, LossKind("ce", "exponential", 7, 0), 1, 0)
        if self.target.device.type == "cuda":
            self.step.compile()
        self.capture = FeatureCapture(self.target, self.spec.target_layer_ids, want_final=False)

    def rows(self, file: Path) -> list[TokenRow]:
        conversations, _ = read_conversations([str(file)])
        renderer = ChatRenderer(self.target.tokenizer, self.target.stop_ids, {}, 4096)
        return [renderer.rows(conversation)[-1] for conversation in conversations]

    @torch.no_grad()
    def drafts(self, rows: list[TokenRow], length: int, count: int) -> list[np.ndarray]:
        """Drafted ids [answer tokens - 1, B-1] after every answer token but the last, for each row."""
        ids = np.zeros((len(rows), length), dtype=np.int64)
        anchor = np.zeros((len(rows), count), dtype=np.int64)
        keep = np.zeros((len(rows), count), dtype=bool)
        for n, row in enumerate(rows):
            ids[n, : len(row.ids)] = row.ids
            at = np.flatnonzero(row.loss_mask)[:-1]
            anchor[n, : len(at)], keep[n, : len(at)] = at, True
        spans = [(n * length, len(row.ids)) for n, row in enumerate(rows)]
        taps = self.capture.capture(ids.reshape(-1), spans).taps.view(len(rows), length, -1)
        device = taps.device
        blocks = Blocks(*(torch.from_numpy(a) for a in (anchor, np.zeros_like(anchor), keep))).to(device)
        position = torch.arange(length, device=device).expand(len(rows), -1)
        hidden = self.step.hidden(taps, to_device(torch.from_numpy(ids), device), position, blocks)[:, :, 1:]
        chosen = torch.cat([(part @ self.step.head.T).argmax(-1) for part in hidden.flatten(0, 2).split(8192)])
        chosen = chosen.view(len(rows), count, -1).cpu().numpy()
        return [chosen[n, : int(keep[n].sum())] for n in range(len(rows))]

    def walk(self, file: Path) -> dict[str, object]:
        rows = [row for row in self.rows(file) if row.loss_mask.sum() > 1]
        sources = [json.loads(line).get("source", "") for line in file.read_text().splitlines() if line.strip()]
        longest = -(-max(len(row.ids) for row in rows) // 128) * 128
        count = -(-max(int(row.loss_mask.sum()) for row in rows) // 128) * 128
        tokens: dict[str, int] = defaultdict(int)
        steps: dict[str, int] = defaultdict(int)
        for begin in range(0, len(rows), ROWS):
            part = rows[begin : begin + ROWS]
            part = part + part[:1] * (ROWS - len(part))  # one compiled shape; the repeated rows are not counted
            for row, drafted, source in zip(part, self.drafts(part, longest, count), sources[begin : begin + ROWS], strict=False):
                answer = row.ids[row.loss_mask]
                for name in (source, "all"):
                    tokens[name] += len(answer) - 1
                    steps[name] += steps_of(answer, drafted)
        return {"benchmark": file.stem, "rows": len(rows)} | {
            f"tau {name}": round(tokens[name] / steps[name], 4) for name in sorted(steps)
        }


def steps_of(answer: np.ndarray, drafted: np.ndarray) -> int:
    at, steps = 0, 0
    while at < len(answer) - 1:
        following = answer[at + 1 : at + 1 + drafted.shape[1]]
        wrong = np.flatnonzero(drafted[at, : len(following)] != following)
        at += (int(wrong[0]) if len(wrong) else len(following)) + 1
        steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, type=Path)
    options = parser.parse_args()
    walker = Walker(options.target, options.draft)
    for file in options.files:
        print(json.dumps(walker.walk(file)), flush=True)


if __name__ == "__main__":
    main()
