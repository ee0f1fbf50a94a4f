"""Fingerprint, switches, compile cache and variables against the machine and torch themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config

import draftline
from draftline.environment import variables
from draftline.environment.compile_cache import cache_folder, use_compile_cache
from draftline.environment.fingerprint import commit, compiler_stack, fingerprint
from draftline.environment.switches import changed_switches, configure_torch


def test_fingerprint_names_everything_and_matches_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    print_of_machine = fingerprint()
    assert set(print_of_machine) == {
        "draftline", "commit", "python", "os", "torch", "cuda", "driver", "gpus", "triton", "transformers", "cpu",
        "variables", "switches",
    }  # fmt: skip
    assert print_of_machine["draftline"] == draftline.__version__
    assert print_of_machine["torch"].startswith(torch.__version__)
    assert print_of_machine["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert "NCCL_DEBUG=WARN" in print_of_machine["variables"]
    assert "secret" not in str(print_of_machine)
    assert all(value != "" for value in print_of_machine.values())


def test_gpus_and_driver_are_none_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    stack = compiler_stack()
    assert (stack["gpus"], stack["driver"]) == ("none", "none")


def test_commit_tells_clean_from_modified_and_ignores_untracked_files(tmp_path: Path) -> None:
    assert commit(tmp_path) == "none"
    run_git(tmp_path, "init", "-q")
    assert commit(tmp_path) == "none"  # no commit yet
    file = tmp_path / "a.txt"
    file.write_text("one")
    run_git(tmp_path, "add", "a.txt")
    run_git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "one")
    head = run_git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    (tmp_path / "untracked.txt").write_text("x")
    assert commit(tmp_path) == head
    file.write_text("two")
    assert commit(tmp_path) == f"{head} (modified)"


def run_git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_changed_switches_lists_what_code_changed_and_nothing_else() -> None:
    before = changed_switches()
    with dynamo_config.patch(recompile_limit=99), inductor_config.patch({"triton.cudagraphs": True}):
        changed = changed_switches()
    assert {name: value for name, value in changed.items() if name not in before} == {
        "torch._dynamo.config.recompile_limit": 99,
        "torch._inductor.config.triton.cudagraphs": True,
    }
    assert changed_switches() == before


def test_a_fresh_process_shows_what_its_environment_and_draftline_itself_changed_and_no_more() -> None:
    """torch takes the variable as the default itself, and its own determinism on a CPU reaches the compiler."""
    code = (
        "import torch; from draftline.environment.switches import changed_switches, configure_torch\n"
        "for device in ('cuda', 'cpu'): configure_torch(torch.device(device)); print(changed_switches())"
    )
    changes = {"TORCHDYNAMO_SUPPRESS_ERRORS": "1", "TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    assert in_fresh_process(code, changes).splitlines() == [
        "{'TORCHDYNAMO_SUPPRESS_ERRORS': '1'}",
        "{'TORCHDYNAMO_SUPPRESS_ERRORS': '1', 'torch._inductor.config.deterministic': True}",
    ]


def in_fresh_process(code: str, changes: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(variables.COMPILER_PREFIXES)}
    done = subprocess.run([sys.executable, "-c", code], env=kept | changes, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_configure_torch_is_deterministic_on_a_cpu_only_and_leaves_precision_alone() -> None:
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        configure_torch(torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == threads
        configure_torch(torch.device("cuda"), threads=2)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
        assert torch.get_float32_matmul_precision() == precision == "highest"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_compile_cache_is_named_by_the_stack_and_nothing_else(tmp_path: Path) -> None:
    stack = compiler_stack()
    folder = cache_folder(tmp_path, stack)
    assert folder == cache_folder(tmp_path, dict(reversed(stack.items())))
    assert len({cache_folder(tmp_path, stack | {name: "other"}) for name in stack} | {folder}) == len(stack) + 1


def test_use_compile_cache_makes_an_absolute_folder_and_torch_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = use_compile_cache()
    assert folder.is_dir()
    assert folder == cache_folder(tmp_path, compiler_stack())
    assert cache_dir() == str(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert use_compile_cache() == folder  # what the environment names is kept


def test_the_default_that_torch_puts_into_the_environment_is_not_taken_for_the_callers_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that monkeypatch takes back what torch sets
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    default = cache_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default
    assert use_compile_cache() == cache_folder(tmp_path, compiler_stack())


def test_a_relative_cache_home_is_ignored_as_the_xdg_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert variables.cache_home() == Path.home() / ".cache"


def test_environment_for_a_child_sets_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "1")
    child = variables.for_child({"NEW": "2", "OLD": None})
    assert child["NEW"] == "2"
    assert "OLD" not in child
    assert os.environ["OLD"] == "1"
    assert child["PATH"] == os.environ["PATH"]
