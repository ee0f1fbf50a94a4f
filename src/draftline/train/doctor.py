"""`draftline doctor`: is this machine fit to train? A line a check, each with a remedy where it is not well."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.text import Text

from draftline.environment.checks import Check, Status, gpu_checks, software_checks, storage_checks
from draftline.environment.fingerprint import fingerprint
from draftline.environment.ports import Address, reachability_checks
from draftline.environment.processes import Ended, run_together
from draftline.environment.rates import rate_checks
from draftline.monitor.notices import Notices

AT_ONCE = 3  # processes that compile at the same time, on one empty cache
PROBE_LIMIT_S = 300.0
REACH_LIMIT_S = 20.0
ERROR_LIMIT = {"cpu": 1e-4, "cuda": 3e-2}  # float32 on a CPU, bfloat16 on CUDA, against float32
STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}
FLEX_REMEDY = {
    "cpu": "install a C++ compiler (g++) if your target compiles; draftline's own CPU step does not",
    "cuda": "another build of torch if your target uses flex_attention; draftline's own step does not",
}
FLEX, STEP = "draftline.environment.flex_probe", "draftline.train.compile_probe"


def doctor(hosts: Sequence[Address], notices: Notices | None) -> bool:
    """Run every check; True if none fails. With notices each line is shown as it is found, without them one JSON object
    is printed at the end."""
    checks = []
    for check in all_checks(hosts):
        checks.append(check)
        if notices is not None:
            show(check, notices)
    fit = all(check.status != "fail" for check in checks)
    if notices is None:
        print(json.dumps({"fit": fit, "checks": [asdict(check) for check in checks], "environment": fingerprint()}))
    else:
        counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
        notices.say(", ".join(f"{count} {status}" for status, count in counts.items()))
    return fit


def all_checks(hosts: Sequence[Address]) -> Iterator[Check]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from software_checks()
    yield from gpu_checks()
    yield from storage_checks(Path.cwd())
    yield from rate_checks(device)
    yield from compile_checks(device)
    if hosts:
        yield from reachability_checks(hosts, REACH_LIMIT_S)


def compile_checks(device: torch.device) -> Iterator[Check]:
    """Attention and, on CUDA, draftline's whole step, compiled by several processes at once on an empty cache.

    Torch has no compiled backward of flex_attention on a CPU.
    """
    on_cuda = device.type == "cuda"
    modules = [STEP] * AT_ONCE + [FLEX] if on_cuda else [FLEX] * AT_ONCE
    with tempfile.TemporaryDirectory(prefix="draftline-doctor-") as empty:
        change = {"TORCHINDUCTOR_CACHE_DIR": empty, "TRITON_CACHE_DIR": f"{empty}/triton"}
        ended = run_together(
            [["-m", module, device.type] for module in modules], [change] * len(modules), PROBE_LIMIT_S
        )
    yield flex_check(ended[-1], device.type)
    yield at_once_check(ended[:AT_ONCE], device.type)
    if on_cuda:
        yield step_check(ended[0], device.type)


def flex_check(ended: Ended, device_type: str) -> Check:
    name, result = "flex_attention", ended.result
    if result is None:
        return Check(name, "warn", f"does not compile here: {ended.last_words}", FLEX_REMEDY[device_type])
    errors = {side: result[f"{side}_error"] for side in ("forward", "backward") if result[f"{side}_error"] is not None}
    found = ", ".join(f"{side} {error:.0e} from dense" for side, error in errors.items())
    if not all(error < ERROR_LIMIT[device_type] for error in errors.values()):
        remedy = "do not train here: another build of torch, or of the driver"
        return Check(name, "fail", f"compiled, and wrong: {found}", remedy)
    if "backward" not in errors:
        found += "; backward: the dense one, torch compiles none on a CPU"
    return Check(name, "ok", f"compiled in {result['compile_s']:.0f} s: {found}")


def at_once_check(ended: Sequence[Ended], device_type: str) -> Check:
    """On CUDA the processes train; on a CPU, where draftline trains uncompiled, they compile attention alone."""
    name, agreeing = "compiling at once", {"cpu": "forward_error", "cuda": "loss"}[device_type]
    failed = [one.last_words for one in ended if one.result is None]
    results = [one.result for one in ended if one.result is not None]
    if failed:
        found = f"{len(failed)} of {len(ended)} processes on an empty cache failed: {failed[0]}"
        status: Status = "warn" if device_type == "cpu" else "fail"
        return Check(name, status, found, "another build of torch; is the cache's disk local and not full?")
    values = {result[agreeing] for result in results}
    slowest = max(result["compile_s"] for result in results)
    if len(values) > 1:
        found = f"{len(ended)} processes computed different numbers: {sorted(values)}"
        return Check(name, "fail", found, "do not train here: another build of torch, or of the driver")
    return Check(name, "ok", f"{len(ended)} processes on an empty cache came up in {slowest:.0f} s, with one result")


def step_check(ended: Ended, device_type: str) -> Check:
    name, result = "training step", ended.result
    if result is None:
        return Check(
            name, "fail", f"does not run here: {ended.last_words}", "another build of torch, for this driver's CUDA"
        )
    found = f"loss {result['loss_error']:.0e} and gradients {result['gradient_error']:.0e} from the float32 reference"
    if max(result["loss_error"], result["gradient_error"]) >= ERROR_LIMIT[device_type]:
        return Check(name, "fail", f"compiled, and wrong: {found}", "do not train here: another build of torch")
    return Check(name, "ok", found)


def show(check: Check, notices: Notices) -> None:
    text = Text()
    text.append(f"{check.status:<5} ", style=STYLE[check.status])
    text.append(f"{check.name:<18} {check.found}")
    if check.remedy:
        text.append(f"\n{'':<25}{check.remedy}", style="dim")
    notices.console.print(text, soft_wrap=True)
