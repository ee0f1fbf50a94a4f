"""Cold starts: several processes at once compile draftline's step on an emptied cache, round after round.

    python tests/cold_start/rounds.py --rounds 20                   # CPU, three processes
    python tests/cold_start/rounds.py --rounds 3 --device cuda      # one visible GPU a process, in turn

Prints a line per round and ends with 1 if any process failed, disagreed on the loss or missed the uncompiled step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass

from draftline.environment.processes import Ended, run_together

LIMIT_S = 1500
ERROR_LIMIT = {"cpu": 1e-4, "cuda": 3e-2}  # float32 there, bfloat16 here, both against float32


@dataclass(frozen=True)
class Round:
    seconds: float
    ended: list[Ended]
    error_limit: float

    @property
    def faults(self) -> list[str]:
        """Why the round failed: nothing where all came up, agree, and equal the uncompiled step."""
        results = [ended.result for ended in self.ended]
        failed = [f"process {i}: {e.last_words}" for i, e in enumerate(self.ended) if e.result is None]
        losses = {result["loss"] for result in results if result is not None}
        disagree = [f"losses differ: {sorted(losses)}"] if len(losses) > 1 else []
        wrong = [
            f"process {i}: {name} {result[name]:.1e}"
            for i, result in enumerate(results)
            for name in ("loss_error", "gradient_error")
            if result is not None and not result[name] < self.error_limit
        ]
        return failed + disagree + wrong


def cold_round(processes: int, device: str, gpus: int = 1, keep_cache: str | None = None) -> Round:
    """One round on an empty cache, or on `keep_cache` as it is."""
    with tempfile.TemporaryDirectory(prefix="draftline-cold-") as empty:
        cache = keep_cache or empty
        change: dict[str, str | None] = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        changes = [
            change | ({"CUDA_VISIBLE_DEVICES": str(i % gpus)} if device == "cuda" else {}) for i in range(processes)
        ]
        started = time.perf_counter()
        ended = run_together([["-m", "draftline.train.compile_probe", device]] * processes, changes, LIMIT_S)
        return Round(time.perf_counter() - started, ended, ERROR_LIMIT[device])


def line(number: int, done: Round) -> str:
    results = [ended.result for ended in done.ended if ended.result is not None]
    compiled = " ".join(f"{result['compile_s']:6.1f}" for result in results)
    loss = f"{results[0]['loss']:.6f}" if results else "none"
    return f"{number:>5}  {done.seconds:7.1f}  {compiled}  {loss:>10}  {'; '.join(done.faults) or 'ok'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that the processes are dealt out to")
    words = parser.parse_args()
    print(f"round  seconds  first step of each process, s{'':{max(0, 7 * words.processes - 28)}}  loss", flush=True)
    faults, started = 0, time.perf_counter()
    for number in range(1, words.rounds + 1):
        done = cold_round(words.processes, words.device, words.gpus)
        faults += bool(done.faults)
        print(line(number, done), flush=True)
    print(f"{words.rounds - faults} of {words.rounds} rounds came up, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
