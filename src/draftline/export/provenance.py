"""draftline.json: where an exported drafter comes from and what was measured with it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftline import __version__
from draftline.errors import InputError
from draftline.export.geometry import stated_causality
from draftline.export.jsonfile import JsonObject, read_json
from draftline.records import DrafterSpec, EvalReport

PROVENANCE_NAME = "draftline.json"
PRODUCER = "draftline"
TAP_CONVENTION = "0-based outputs of decoder layers, before the final norm"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What training knows and the weights do not say."""

    target_name: str
    target_revision: str | None
    label_source: str  # the loss's labels: "ce", "ce_target", "kl" or "tv"
    template_hash: str
    thinking: bool | None
    data_hash: str
    products: str  # of the drafter's layers in training: "plain" or "fp8"


def provenance_tree(spec: DrafterSpec, provenance: Provenance, folder_format: str) -> dict[str, Any]:
    """The whole of draftline.json before anything was measured: `tau` is an empty list until `record_tau` fills it."""
    return {
        "producer": PRODUCER,
        "format": folder_format,
        **asdict(provenance),
        "block_size": spec.block_size,
        "target_layer_ids": list(spec.target_layer_ids),
        "tap_convention": TAP_CONVENTION,
        "window_rule": window_rule(spec),
        "versions": versions(),
        "tau": [],
    }


def window_rule(spec: DrafterSpec) -> str:
    """SPEC 3 in words, for slot j of a block with anchor a."""
    within = {True: "causal", False: "bidirectional", None: "causal in sliding layers, bidirectional in full layers"}
    inside = f"inside the block {within[stated_causality(spec)]}"
    if spec.sliding_window is None or "sliding_attention" not in spec.layer_types:
        return f"context p < a; {inside}"
    return f"context p < a, in sliding layers also p > a + j - {spec.sliding_window}; {inside}"


def versions() -> dict[str, str]:
    return {
        "draftline": __version__,
        "python": platform.python_version(),
        "safetensors": version("safetensors"),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def read_provenance(folder: Path) -> JsonObject:
    """Raises InputError when the folder is not a draftline export."""
    tree = read_json(folder / PROVENANCE_NAME)
    if tree.value("producer") != PRODUCER:
        raise InputError(f"{tree.where}: producer must be {PRODUCER!r}, got {tree.value('producer')!r}")
    return tree


def is_own_export(folder: Path) -> bool:
    """Whether the folder is an earlier draftline export, which a new one may replace."""
    if not (folder / PROVENANCE_NAME).is_file():
        return False
    return read_json(folder / PROVENANCE_NAME).tree.get("producer") == PRODUCER


def with_reports(tree: dict[str, Any], reports: Sequence[EvalReport]) -> dict[str, Any]:
    return tree | {"tau": [report.as_json() for report in reports]}
