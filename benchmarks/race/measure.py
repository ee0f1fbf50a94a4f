"""tau of one drafter on many prompts by real decoding, shared out over processes.

    python benchmarks/race/measure.py --target smollm2 --draft runs/race/export --processes 8 \\
        race/held.jsonl race/mtbench.jsonl race/humaneval.jsonl

Batch-1 decoding of a small target leaves a GPU almost idle, so the prompts of each file are split and every part goes
to a `draftline eval` of its own. tau of a file = tokens committed in all parts / verification steps in all parts.
Prints one JSON object a file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def evaluate(part: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "draftline", "eval", "--target", options.target, "--draft", options.draft]
    command += ["--prompts", str(part), "--max-new-tokens", str(options.max_new_tokens), "--dtype", options.dtype]
    command += ["--json"] if options.compare_plain else ["--no-compare-plain", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{part}: draftline eval ended with {done.returncode}\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def combined(file: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
    steps = sum(r["verify_steps"] for r in reports)
    slots = zip(*(r["slot_acceptance"] for r in reports), strict=True)
    return {
        "benchmark": file.stem,
        "tau": round(sum(r["tau"] * r["verify_steps"] for r in reports) / steps, 4),
        "slot_acceptance": [
            round(sum(s * r["verify_steps"] for s, r in zip(slot, reports, strict=True)) / steps, 3) for slot in slots
        ],
        "verify_steps": steps,
        "prompts": sum(r["prompts"] for r in reports),
        "tokens": sum(r["tokens"] for r in reports),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compare-plain", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        jobs = {}
        for file in options.files:
            lines = file.read_text(encoding="utf-8").splitlines()
            count = max(1, round(options.processes / len(options.files)))
            parts = [Path(folder) / f"{file.stem}-{n}.jsonl" for n in range(count)]
            for n, part in enumerate(parts):
                part.write_text("\n".join(lines[n::count]) + "\n", encoding="utf-8")
            jobs[file] = [pool.submit(evaluate, part, options) for part in parts]
        for file, futures in jobs.items():
            print(json.dumps(combined(file, [future.result() for future in futures])), flush=True)


if __name__ == "__main__":
    main()
