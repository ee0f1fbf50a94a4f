"""A target without its layers: embedding, final norm, head, config, tokenizer. Training from features needs no more."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from draftline.config import TargetSection
from draftline.errors import InputError
from draftline.target.load import Target, check_folder, fault, load_target, remedy_for
from draftline.target.parts import TargetParts


class AbsentLayer(nn.Module):
    """Stands where a decoder layer would be, so that depth is counted as ever; a forward through it is a bug."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise RuntimeError("this target was loaded without its layers: its features come from disk")


def load_frame(section: TargetSection, device: torch.device) -> Target:
    """As load_target, but the layers' tensors are never read: the model is built with a depth of 0, and transformers
    reads only what a model has. Raises InputError as load_target does."""
    check_folder(section.path)
    try:
        config: Any = AutoConfig.from_pretrained(
            section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"target.path {section.path}: {fault(section.path, error)}", remedy_for(section.path)
        ) from error
    target = load_without_layers(section, device, config)
    restore_depth(target.parts, config.get_text_config(decoder=True))
    return replace(target, has_layers=False)


def load_without_layers(section: TargetSection, device: torch.device, config: Any) -> Target:
    """A target of depth 0. transformers lists every tensor it left out in a warning, which here is all of the layers':
    the switch that silences it is process-wide and is put back."""
    shallow = deepcopy(config)
    text = shallow.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if "layer_types" in text.to_dict():
        text.layer_types = []
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        return load_target(section, device, {"config": shallow})
    finally:
        transformers_logging.set_verbosity(verbosity)


def restore_depth(parts: TargetParts, config: Any) -> None:
    """Give the model its own text config's depth back, every layer absent."""
    parts.config.num_hidden_layers = config.num_hidden_layers
    if "layer_types" in config.to_dict():
        parts.config.layer_types = config.layer_types
    parts.layers.extend(AbsentLayer() for _ in range(config.num_hidden_layers))


def final_norm(parts: TargetParts) -> nn.Module:
    """The decoder's final norm: its only child that holds vectors of the hidden size alone. InputError otherwise."""
    vector = {(parts.hidden_size,)}  # a weight, or a weight and a bias
    found = [child for child in parts.decoder.children() if {tuple(p.shape) for p in child.parameters()} == vector]
    if len(found) != 1:
        raise InputError(
            f"target class {type(parts.decoder).__name__}: expected one final norm, found {len(found)}",
            "features that hold the last layer before its norm need it: write them with `draftline prepare`",
        )
    return found[0]
