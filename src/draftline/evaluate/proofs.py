"""Proofs about a drafter folder beside its target.

Each returns its figure, or raises InputError with what was expected, what was found, and the likely cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.decode.models import CachedDrafter, CachedTarget
from draftline.drafter.anchors import Blocks
from draftline.drafter.attention import DenseAttention
from draftline.drafter.model import Drafter
from draftline.errors import InputError
from draftline.export.provenance import PROVENANCE_NAME, read_provenance
from draftline.records import DrafterSpec
from draftline.target.derive import choose_mask_id, full_attention_rope
from draftline.target.load import Target
from draftline.target.proofs import capture_alone, check_finite, check_values, relative

LOGIT_TOLERANCE = 1e-4  # float32, relative to the length of a position's logits


def prove_tensors(tensors: Mapping[str, Tensor]) -> int:
    """Every tensor finite and not zero (a bias may be); returns their number."""
    for name, value in tensors.items():
        (check_finite if name.endswith(".bias") else check_values)(value, name)
    return len(tensors)


def prove_origin(draft: Path, spec: DrafterSpec, target: Target) -> str:
    """draftline.json beside config.json: same block size and taps, and the template the drafter was trained with.

    A tap list that is off by one fits every shape. Here it shows; without this file only by a low tau. Other weights
    of the target are said and not refused: a drafter may serve a fine-tuned target, at a lower tau.
    """
    if not (draft / PROVENANCE_NAME).is_file():
        return f"no {PROVENANCE_NAME}: taps show only in tau"
    recorded = read_provenance(draft)
    now = {
        "block_size": spec.block_size,
        "target_layer_ids": list(spec.target_layer_ids),
        "template_hash": target.template_hash,
    }
    pairs = {key: (recorded.value(key), value) for key, value in now.items()}
    wrong = [f"{key} {before!r}, found {value!r}" for key, (before, value) in pairs.items() if before != value]
    if wrong:
        raise InputError(
            f"{recorded.where}: expected {'; '.join(wrong)}",
            "likely a config.json edited by hand, or a target whose template changed since training",
        )
    known = recorded.value("target_revision") == target.identity
    return f"trained for {recorded.value('target_name')}, {'these' if known else 'not these'} weights"


def prove_rope(spec: DrafterSpec, target: Target) -> str:
    expected = {key: value for key, value in full_attention_rope(target.parts.config).items() if value is not None}
    found = {key: value for key, value in spec.rope_parameters.items() if value is not None}
    if found != expected:
        raise InputError(
            f"expected the target's RoPE {expected}, found {found} in the drafter",
            "likely a default base instead of the target's own, which config.json holds in rope_parameters",
        )
    return f"base {expected['rope_theta']:g}, {expected['rope_type']}"


def prove_mask(spec: DrafterSpec, target: Target) -> str:
    return describe_mask(choose_mask_id(spec.mask_token_id, target), target)


def describe_mask(mask_id: int, target: Target) -> str:
    return f"{mask_id} {target.tokenizer.convert_ids_to_tokens(mask_id) or '(padding row)'}"


@torch.no_grad()
def prove_forward(target: Target, drafter: Drafter, ids: list[int]) -> float:
    """Logits of two blocks, training forward against decoding loop, on a real text: the largest relative difference.

    Features come from the two paths as well: captured at once, and through the target's cache.
    """
    first, second = len(ids) // 2, len(ids) - 1
    trained = training_logits(target, drafter, ids, [first, second])
    verifier, proposer = CachedTarget(target, drafter.spec.target_layer_ids), CachedDrafter(drafter, target)
    decoded = []
    for begin, anchor in ((0, first), (first, second)):
        _, features = verifier.forward(ids[begin:anchor], logits_for=1)
        assert features is not None
        decoded.append(proposer.forward(ids[anchor], features))
    error = relative(trained, torch.stack(decoded))
    if not error <= LOGIT_TOLERANCE:
        raise InputError(
            f"expected the training forward's logits from the decoding loop within {LOGIT_TOLERANCE:g}, found a "
            f"relative difference of {error:.2g}",
            "likely a cache that keeps a block's own keys, or positions or windows that differ between the two",
        )
    return error


def training_logits(target: Target, drafter: Drafter, ids: list[int], anchors: list[int]) -> Tensor:
    """Logits [N, B-1, V] of the blocks at `anchors`, all in one forward under the training mask."""
    spec, device = drafter.spec, target.device
    taps = capture_alone(target, spec.target_layer_ids, ids).taps[None]
    anchor = torch.tensor([anchors], device=device)
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.ones_like(anchor, dtype=torch.bool))
    block_ids = torch.full((len(anchors), spec.block_size), spec.mask_token_id, device=device)
    block_ids[:, 0] = torch.tensor([ids[a] for a in anchors], device=device)
    position = anchor[..., None] + torch.arange(spec.block_size, device=device)
    states: Any = drafter(
        target.embed(block_ids).flatten(0, 1)[None], position.flatten(1), drafter.context(taps),
        torch.arange(len(ids), device=device)[None], DenseAttention(spec, blocks, len(ids)),
    )  # fmt: skip
    return target.parts.head.logits(states.unflatten(1, (len(anchors), -1))[0, :, 1:]).float()
