"""Targets loaded in part: without layers where only embedding and head are wanted, or spread over several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from draftline.config import TargetSection
from draftline.errors import InputError
from draftline.target.load import Target, check_folder, load_target


def borrow_target(section: TargetSection, device: torch.device) -> Target:
    """The target's tokenizer, embedding, final norm and head: what a drafter borrows. Its layers are never read."""
    check_folder(section.path)
    config: Any = AutoConfig.from_pretrained(
        section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if "layer_types" in text.to_dict():
        text.layer_types = []
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would list every layer's tensors as unexpected
    try:
        return load_target(section, device, {"config": config})
    finally:
        transformers_logging.set_verbosity(verbosity)


def load_target_shard(section: TargetSection, device: torch.device, mesh: DeviceMesh) -> Target:
    """This rank's shard of a target that the ranks of `mesh` hold together, by the model's own tensor-parallel plan.

    Its layers' outputs and its final states are whole on every rank. Raises InputError for a model without a plan.
    """
    target = load_target(
        section, device, {"distributed_config": DistributedConfig(tp_plan="auto"), "device_mesh": mesh}
    )
    if not target.model.tp_plan:
        raise InputError(
            f"placement.tensor_parallel {mesh.size()}: {type(target.model).__name__} has no tensor-parallel plan",
            "use placement.tensor_parallel=1 for this family",
        )
    return target
