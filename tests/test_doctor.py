"""`draftline doctor` piece by piece: each check's line, its remedy, and what makes it warn or fail."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from command import draftline_here
from draftline.environment import checks, rates
from draftline.environment.checks import (
    architecture_check,
    driver_check,
    filesystem_of,
    fits,
    free_check,
    nearest,
    switches_check,
)
from draftline.environment.device import refuse_old_gpu
from draftline.environment.ports import Greeter, connect, parse_hosts, reachability_checks
from draftline.environment.processes import Ended, run_together
from draftline.errors import InputError
from draftline.train.doctor import at_once_check, flex_check, step_check
from draftline.train.override_trials import judge

CPU = torch.device("cpu")


def result(**values: float | None) -> Ended:
    numbers = ", ".join(f'"{name}": {"null" if value is None else value}' for name, value in values.items())
    return Ended(0, f"a line of another library\n{{{numbers}}}\n", "")


def test_software_of_this_environment_is_fit_and_an_old_torch_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {check.name: check for check in checks.software_checks()}
    assert [check.status for check in found.values() if check.name != "torch switches"] == ["ok"] * 4
    assert found["torch"].found.split("+")[0] == torch.__version__.split("+")[0]  # a wheel may tell no build
    monkeypatch.setitem(checks.LOWEST, "torch", f"{Version(torch.__version__).major + 1}.0")
    old = {check.name: check for check in checks.software_checks()}["torch"]
    assert (old.status, old.remedy) == ("fail", f"pip install 'torch>={Version(torch.__version__).major + 1}.0'")


@pytest.mark.parametrize(
    ("pin", "found", "fit"), [("==3.6.0", "3.6.0", True), ("==3.6.0", "3.5.1", False), ("==1", None, False)]
)
def test_torchs_pins_are_exact(pin: str, found: str | None, fit: int) -> None:
    assert fits(pin, found) == fit


@pytest.mark.parametrize(
    ("newest_cuda", "built_for", "status"),
    [
        (13000, "13.0", "ok"),
        (13010, "12.8", "ok"),
        (12080, "12.9", "warn"),
        (12080, "13.0", "fail"),
        (9020, "12.8", "fail"),
    ],
)
def test_a_driver_serves_older_cudas_and_those_of_its_major_version(
    newest_cuda: int, built_for: str, status: str
) -> None:
    check = driver_check("580.1", newest_cuda, built_for)
    assert check.status == status
    assert check.found.endswith(f"; torch is built for {built_for}") and bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("capability", "built", "status"),
    [
        ((9, 0), ["sm_80", "sm_90"], "ok"),
        ((8, 9), ["sm_80", "sm_86"], "ok"),
        ((12, 0), ["sm_80", "sm_90"], "fail"),
        ((12, 0), ["sm_90", "compute_90"], "ok"),
        ((8, 0), ["sm_86", "sm_90"], "fail"),
        ((9, 0), ["sm_80", "sm_90a"], "ok"),
        ((10, 3), ["sm_100a"], "fail"),
        ((10, 3), ["sm_100f"], "ok"),
        ((7, 5), ["sm_75", "sm_80"], "fail"),
    ],
)
def test_a_gpu_needs_a_torch_built_for_it_and_kernels(
    capability: tuple[int, int], built: list[str], status: str
) -> None:
    check = architecture_check(["GPU A", "GPU A", "GPU B"], capability, built)
    assert check.status == status and check.found.startswith("GPU A x2, GPU B x1 (sm_")
    assert ("training needs sm_80" in check.found) == (capability < (8, 0))


def test_a_gpu_without_kernels_is_refused_before_training() -> None:
    refuse_old_gpu("A100", (8, 0))
    with pytest.raises(InputError, match="Tesla T4 has compute capability 7.5: training on a GPU needs 8.0"):
        refuse_old_gpu("Tesla T4", (7, 5))


def test_a_changed_switch_warns_with_its_danger() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        check = switches_check()
    assert (check.status, check.remedy[:10]) == ("warn", "unset them")
    assert "torch._dynamo.config.suppress_errors=True: what fails to compile runs eagerly" in check.found


def test_free_space_is_judged_by_its_limits(tmp_path: Path) -> None:
    free_gib = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize / 2**30
    statuses = [free_check("disk", tmp_path, *limits, "free some").status for limits in ((0, 0), (0, 1e9), (1e9, 2e9))]
    assert statuses == ["ok", "warn", "fail"]
    assert abs(float(free_check("disk", tmp_path, 0, 0, "").found.split()[0].replace(",", "")) - free_gib) < 1
    assert nearest(tmp_path / "not" / "there") == tmp_path
    assert filesystem_of(Path("/proc/self")) == "proc"


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against time itself: a product of twice the size takes eight times as long at one rate."""
    rate_tflops = rates.matrix_rate(CPU)
    a = torch.randn(1024, 1024)
    seconds = min(rates.once(lambda: a @ a, CPU) for _ in range(10))
    assert 0.3 < rate_tflops / (2 * 1024**3 / seconds / 1e12) < 3
    assert 0.1 < rates.copy_rate(CPU, CPU) < 1000  # GB/s
    assert [check.name for check in rates.rate_checks(CPU)] == ["matrix rate", "memory"]


@pytest.mark.parametrize("text", ["node1", "node1:", ":29500", "node1:x", "node1:0", "node1:70000", "a:1,,b:2"])
def test_a_bad_host_list_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not host:port"):
        parse_hosts(text)


def test_a_host_list() -> None:
    assert parse_hosts("node1:29500, [::1]:80") == [("node1", 29500), ("::1", 80)]


@pytest.fixture
def port() -> Iterator[int]:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
    yield number


def test_what_connecting_says(port: int) -> None:
    assert connect(("127.0.0.1", port)) == "Connection refused"
    assert connect(("no-such-host.invalid", port)) == "the name is not known here"
    greeter = Greeter(("127.0.0.1", port))
    try:
        assert [connect(("127.0.0.1", port)) for _ in range(3)] == ["", "", ""]
    finally:
        greeter.close()
    with socket.create_server(("127.0.0.1", port)):  # takes the connection and says nothing
        assert connect(("127.0.0.1", port)).startswith("no answer")


def test_own_addresses_are_listened_on_and_a_host_that_does_not_answer_fails(port: int) -> None:
    mine, other = ("127.0.0.1", port), ("192.0.2.1", port)  # a network that exists in documents only
    found = list(reachability_checks([mine, other], limit_s=1.5))
    assert [(check.name, check.status) for check in found] == [
        (f"127.0.0.1:{port}", "ok"),
        (f"192.0.2.1:{port}", "fail"),
    ]
    assert "open all ports" in found[1].remedy
    with socket.create_server(mine):
        (taken,) = reachability_checks([mine], limit_s=1.0)
    assert (taken.status, taken.found) == ("fail", f"port {port} is taken on this host")


def test_processes_run_at_once_and_tell_how_they_ended() -> None:
    wait = "import time; time.sleep({}); print('{{\"a\": 1}}')"
    commands = [
        ["-c", wait.format(0)],
        ["-c", "import os; print(os.environ['MARK']); raise SystemExit('bad luck')"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"],
        ["-c", wait.format(60)],
    ]
    ended = run_together(commands, [{}, {"MARK": "here"}, {}, {}], limit_s=5)
    assert [one.result for one in ended] == [{"a": 1}, None, None, None]
    assert ended[1].out == "here\n"
    assert [one.last_words for one in ended[1:]] == ["bad luck", "it was killed by signal 11", "it did not end in time"]


def test_what_the_flex_probe_says_becomes_a_line() -> None:
    assert flex_check(result(forward_error=1e-6, backward_error=None, compile_s=7), "cpu").found == (
        "compiled in 7 s: forward 1e-06 from dense; backward: the dense one, torch compiles none on a CPU"
    )
    assert flex_check(result(forward_error=1e-3, backward_error=1e-2, compile_s=7), "cuda").status == "ok"
    for wrong in (
        result(forward_error=1e-3, backward_error=0.5, compile_s=7),
        result(forward_error="NaN", backward_error=None),
    ):
        check = flex_check(wrong, "cuda")
        assert check.status == "fail" and check.found.startswith("compiled, and wrong")
    broken = flex_check(Ended(1, "", "Traceback\nInvalidCxxCompiler: no g++\n"), "cpu")
    assert (broken.status, broken.found) == ("warn", "does not compile here: InvalidCxxCompiler: no g++")
    assert "g++" in broken.remedy


def test_processes_that_fail_or_disagree_are_a_failure() -> None:
    good = result(loss=2.5, compile_s=3)
    assert at_once_check([good, result(loss=2.5, compile_s=9.6)], "cuda").found == (
        "2 processes on an empty cache came up in 10 s, with one result"
    )
    assert at_once_check([good, result(loss=2.6, compile_s=3)], "cuda").status == "fail"
    race = Ended(1, "", "RuntimeError: Detected that you are using FX to symbolically trace\n")
    check = at_once_check([good, race], "cuda")
    assert (check.status, check.found[:56]) == ("fail", "1 of 2 processes on an empty cache failed: RuntimeError:")
    assert at_once_check([good, race], "cpu").status == "warn"  # a CPU trains uncompiled


def test_a_step_that_misses_the_reference_fails() -> None:
    assert step_check(result(loss_error=1e-3, gradient_error=2e-2), "cuda").status == "ok"
    assert step_check(result(loss_error=1e-3, gradient_error=4e-2), "cuda").status == "fail"


def test_how_an_override_is_judged() -> None:
    fast, slow = result(loss=2.0, step_s=0.010), result(loss=2.0, step_s=0.020)
    failed = Ended(1, "", "Traceback\n  a line\nRunError: it ran eagerly\n  see doctor\nSet A=1 for more\n")
    assert judge(fast, fast) == ("not needed", "a step takes 10.00 ms without it, 10.00 ms with it")
    assert judge(fast, slow)[0] == "needed"
    assert judge(slow, fast)[0] == "not needed"
    assert judge(fast, result(loss=2.1, step_s=0.010)) == (
        "needed",
        "the loss is 2.100000 without it and 2.000000 with it",
    )
    assert judge(fast, failed) == ("needed", "without it: RunError: it ran eagerly")
    assert judge(failed, fast)[0] == "not needed"
    assert judge(failed, failed)[0] == "cannot tell"


def test_bad_words_of_the_verb_end_with_2(tmp_path: Path) -> None:
    done = draftline_here("doctor", "--hosts", "node1")
    assert (done.code, done.out) == (2, "") and "'node1' is not host:port" in done.err
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target: {path: t}\ndata: {train: a}\n")
    assert "the recipe declares no overrides" in draftline_here("doctor", "--overrides", recipe).err
