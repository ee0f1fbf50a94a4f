"""Process-wide switches of torch: the only file that sets them, and the list of those that somebody changed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.utils.deterministic

from draftline.config import Override
from draftline.environment import variables
from draftline.errors import InputError

# Loaded when a recipe names a setting of theirs: two of them bring torch's whole compiler, 800 modules and more.
CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
    "torch.fx.experimental._config",
)
BACKENDS: dict[str, object] = {  # settings outside the config modules, and torch's defaults
    "torch.backends.cuda.matmul.fp32_precision": "none",
    "torch.backends.cudnn.conv.fp32_precision": "tf32",
    "torch.backends.mkldnn.matmul.fp32_precision": "none",
    "torch.backends.cudnn.enabled": True,
    "torch.backends.cudnn.benchmark": False,
}
# Why a changed switch matters; the first three have hidden faults of the compiler for whole runs.
DANGERS = {
    "torch._dynamo.config.force_compile_during_fx_trace": "it silences the error of a compile race and goes on with "
    "what the race left behind: one run fell from 12,800 to 4,600 tokens/s without an error",
    "torch._dynamo.config.suppress_errors": "what fails to compile runs eagerly from then on, without an error",
    "torch._dynamo.config.error_on_nested_fx_trace": "a compiled function called while another thread traces runs "
    "eagerly, without an error",
    "torch._dynamo.config.disable": "nothing is compiled",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "what fails to compile runs eagerly from then on, without an error",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "torch.fx is tracing": "a trace left torch's tracing flag on: every compiled call raises or runs eagerly",
}
OTHER_DANGER = "it can change speed or results, and the record of the run would not say why"


def configure_torch(device: torch.device, threads: int | None = None) -> None:
    """Set what a run needs of torch and nothing else; the precision of float32 products stays at torch's default.

    threads: CPU threads of one operation; None leaves torch's own choice (OMP_NUM_THREADS or the cores).
    On a CPU every operation is made deterministic, so that two runs of one recipe are equal bit by bit; one that
    cannot be raises RuntimeError; torch then also sets its compiler's `deterministic`, which `changed_switches` shows.
    On a GPU it is not asked for: kernels that matter have no deterministic form.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    deterministic = device.type == "cpu"
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # to say so loads torch's compiler
        torch.use_deterministic_algorithms(deterministic)
    # With determinism torch also fills every new tensor with NaN, 260 times a step: no result needs it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def own_changes(device: torch.device) -> dict[str, object]:
    """What `configure_torch` makes differ from torch's defaults."""
    return {"torch._inductor.config.deterministic": True} if device.type == "cpu" else {}


def apply_settings(overrides: Iterable[Override]) -> None:
    """Set the declared torch settings in every thread of this process, before anything is compiled.

    Raises InputError for a setting that this torch has not, a value of another type, and a declared variable that is
    not in the environment: torch reads many at its import, so `overrides.set_variables` sets them before it.
    """
    for override in overrides:
        if override.is_variable:
            refuse_unset(override)
        else:
            set_everywhere(override.switch, fitting(override))


def refuse_unset(override: Override) -> None:
    if variables.value_of(override.switch) != str(override.value):
        raise InputError(
            f"overrides: {override.switch} is not {override.value} in this process's environment",
            "start with `draftline train RECIPE`, which sets it before torch is imported",
        )


def fitting(override: Override) -> object:
    """The override's value as its setting takes it. Raises InputError where torch has no such setting or another
    type."""
    before, value = setting(override.switch), override.value
    if isinstance(before, float) and type(value) is int:
        return float(value)
    if before is not None and type(value) is not type(before):
        kind = type(before).__name__
        raise InputError(f"overrides: {override.switch} is {before!r}, and {value!r} is no {kind}", f"give a {kind}")
    return value


def setting(path: str) -> object:
    """A setting's value by its path. Raises InputError where this torch has none of that name."""
    holder, name = holder_of(path)
    if holder is not None and name in holder.get_config_copy():
        value: object = holder.get_config_copy()[name]
        return value
    if path in BACKENDS:
        return attrgetter(path.removeprefix("torch."))(torch)
    known = ", ".join([*(f"{module}.NAME" for module in CONFIGS), *BACKENDS])
    raise InputError(f"overrides: torch {torch.__version__} has no setting {path}", f"known are {known}")


def holder_of(path: str) -> tuple[Any, str]:
    """The config module of a path and the setting's name in it, which may hold dots (triton.cudagraphs); or None."""
    for module in CONFIGS:
        if path.startswith(f"{module}."):
            return importlib.import_module(module), path.removeprefix(f"{module}.")
    return None, path


def set_everywhere(path: str, value: object) -> None:
    """From torch 2.12 on an assignment to a config module reaches the assigning thread only, and a backward pass may be
    compiled in one of autograd's. What torch takes from the environment is what every thread sees."""
    holder, name = holder_of(path)
    if holder is None:
        parent, _, name = path.removeprefix("torch.").rpartition(".")
        setattr(attrgetter(parent)(torch), name, value)
    else:
        setattr(holder, name, value)
        holder._config[name].env_value_default = value


def danger_of(name: str) -> str:
    """What a changed switch can do to a run."""
    return DANGERS.get(name, OTHER_DANGER)


def changed_switches() -> dict[str, object]:
    """Settings of this process that differ from torch's defaults, name -> value, sorted by name.

    Names are torch's own, `torch._dynamo.config.recompile_limit`, or of an environment variable: torch takes many
    variables as the default itself, so a comparison of settings alone would not show TORCHDYNAMO_SUPPRESS_ERRORS=1.
    A config module that nobody has loaded nobody has changed.
    """
    changed: dict[str, object] = {}
    for module in CONFIGS:
        if module in sys.modules:
            changed.update(changed_in(sys.modules[module]))
    changed.update({path: value for path, default in BACKENDS.items() if (value := setting(path)) != default})
    if torch.get_default_dtype() != torch.float32:
        changed["torch.get_default_dtype()"] = torch.get_default_dtype()
    if torch.is_anomaly_enabled():
        changed["torch.is_anomaly_enabled()"] = True
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        changed["torch.fx is tracing"] = True
    changed.update(variables.compiler_switches())
    return dict(sorted(changed.items()))


def changed_in(config: ModuleType) -> Iterator[tuple[str, object]]:
    """Settings of one of torch's config modules whose value is not the default.

    `get_config_copy` is torch's public reader, but only the private entries know the defaults. torch's own
    `_is_default` is no help: it calls a setting changed that somebody set to its default.
    """
    for name, value in config.get_config_copy().items():
        if value != config._config[name].default:
            yield f"{config.__name__}.{name}", value
