"""Random drafters for the export tests."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftline.export.folder import Export
from draftline.export.layout import drafter_shapes
from draftline.export.provenance import Provenance
from draftline.export.speculators import speculators_shapes
from draftline.records import DrafterSpec

SPEC = DrafterSpec(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=64,
    block_size=8,
    mask_token_id=63,
    target_layer_ids=(1, 3, 5),
    num_target_layers=9,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    max_position_embeddings=4096,
    layer_types=("full_attention", "full_attention"),
    bos_token_id=1,
    eos_token_id=[2, 3],
    pad_token_id=0,
)
MIXED = replace(SPEC, layer_types=("sliding_attention", "full_attention"), sliding_window=32)
PROVENANCE = Provenance("org/target", "abc123", "ce", "t-hash", False, "d-hash", "plain")


def random_tensors(spec: DrafterSpec, borrowed: bool = False, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = speculators_shapes(spec) if borrowed else drafter_shapes(spec)
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}


def make_export(spec: DrafterSpec = SPEC, seed: int = 0, **changes: Any) -> Export:
    tensors = random_tensors(spec, changes.get("format") == "speculators", seed)
    return replace(Export(spec, tensors, torch.float32, "reference", PROVENANCE), **changes)
