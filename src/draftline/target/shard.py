"""A target spread over several ranks, by the tensor-parallel plan of its own model class."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from draftline.config import TargetSection
from draftline.errors import InputError
from draftline.target.load import Target, load_target, target_dtype
from draftline.target.packing import Packing

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
WHOLE = {"replicated_with_grad_allreduce"}  # norms within a head: nothing to cut


def load_target_shard(section: TargetSection, device: torch.device, mesh: DeviceMesh) -> Target:
    """This rank's shard of a target that the ranks of `mesh` hold together, by the model's own tensor-parallel plan.

    transformers itself spreads a model over all ranks of a world only, and here other ranks train: so torch's
    parallelize_module follows the plan. The outputs of layers and decoder are whole on every rank, and so is the head.
    Weights pass through host memory. Raises InputError for a model whose layers are planned in other ways.
    """
    kept = str(target_dtype(section.dtype, device)).removeprefix("torch.")
    target = load_target(section.model_copy(update={"dtype": kept}), torch.device("cpu"))
    plan = {name: style for name, style in (target.model.tp_plan or {}).items() if "layers." in name}
    styles = {name: STYLES[style] for name, style in plan.items() if style in STYLES}
    other = sorted(set(plan.values()) - set(STYLES) - WHOLE)
    heads = target.parts.config.num_key_value_heads
    if not styles or other or heads % mesh.size():
        reason = f"{heads} key-value heads" if not other and styles else f"plan {', '.join(other) or 'none'}"
        raise InputError(
            f"placement.tensor_parallel {mesh.size()}: {type(target.model).__name__} cannot be cut that way ({reason})",
            "use placement.tensor_parallel=1, or as many ranks as divide its key-value heads",
        )
    parallelize_module(target.model, mesh, {name: style() for name, style in styles.items()})
    target.model.to(device)
    return replace(target, device=device, packing=Packing(0, f"a shard of {mesh.size()}"))
