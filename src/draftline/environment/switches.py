"""Process-wide switches of torch: the only file that sets them, and the list of those that somebody changed."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config

from draftline.environment import variables


def configure_torch(device: torch.device, threads: int | None = None) -> None:
    """Set what a run needs of torch and nothing else; the precision of float32 products stays at torch's default.

    threads: CPU threads of one operation; None leaves torch's own choice (OMP_NUM_THREADS or the cores).
    On a CPU every operation is made deterministic, so that two runs of one recipe are equal bit by bit; one that
    cannot be raises RuntimeError; torch then also sets its compiler's `deterministic`, which `changed_switches` shows.
    On a GPU it is not asked for: kernels that matter have no deterministic form.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(device.type == "cpu")


def changed_switches() -> dict[str, object]:
    """Compiler settings of this process that differ from torch's defaults, name -> value, sorted by name.

    Names are torch's own, `torch._dynamo.config.recompile_limit`, or of an environment variable: torch takes many
    variables as the default itself, so a comparison of settings alone would not show TORCHDYNAMO_SUPPRESS_ERRORS=1.
    """
    changed: dict[str, object] = {}
    for module in (torch._dynamo.config, torch._functorch.config, torch._inductor.config):
        changed.update(changed_in(module))
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
