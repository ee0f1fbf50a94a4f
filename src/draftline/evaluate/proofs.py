"""Proofs about a drafter and its folder beside its target.

Each returns its figure, or raises InputError with what was expected, what was found, and the likely cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from draftline.decode.models import CachedDrafter, CachedTarget
from draftline.drafter.anchors import Blocks, sample_blocks
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.export.provenance import PROVENANCE_NAME, read_provenance
from draftline.records import DrafterSpec, FeatureBatch
from draftline.target.derive import choose_mask_id
from draftline.target.load import Target
from draftline.target.proofs import check_finite, check_values, judged, own_outputs, prove_embedding


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


def prove_mask(spec: DrafterSpec, target: Target) -> str:
    return describe_mask(choose_mask_id(spec.mask_token_id, target), target)


def describe_mask(mask_id: int, target: Target) -> str:
    return f"{mask_id} {target.tokenizer.convert_ids_to_tokens(mask_id) or '(padding row)'}"


def decoding_limit(target: Target) -> float:
    """Relative difference of a position's logits; bfloat16 kernels of other shapes round otherwise in every layer."""
    return {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}[target.dtype]


@torch.no_grad()
def logits_of(target: Target, states: Tensor) -> Tensor:
    """float32 logits [..., V] of final-normed drafter states [..., d]."""
    return target.parts.head.logits(states).float()


@torch.no_grad()
def prove_slots(target: Target, step: DrafterStep) -> float:
    """The step's anchors and mask token are embedded as the target's first layer receives them (`prove_embedding`)."""
    mask_id = step.drafter.spec.mask_token_id
    ids = sorted({mask_id, *target.stop_ids, *range(0, target.parts.vocab_size, 1 + target.parts.vocab_size // 16)})
    received = own_outputs(target, ids).first_input
    anchor = torch.arange(len(ids), device=target.device)[None]  # a block at every token
    blocks = Blocks(anchor, torch.zeros_like(anchor), torch.ones_like(anchor, dtype=torch.bool))
    slots = step.slot_embeds(torch.tensor([ids], device=target.device), blocks, received.dtype)[0]  # [n, B, d]
    embedded = torch.cat([slots[:, 0], slots[:1, 1]])
    return prove_embedding(target, torch.cat([received, received[ids.index(mask_id)][None]]), embedded)


def prove_decoding_logits(target: Target, step: DrafterStep, batch: FeatureBatch) -> float:
    """Logits of two blocks of two documents, the training forward against the decoding loop (SPEC 9.4).

    The training side is the step's own forward on its own batch. Features come from the two paths as well: captured for
    training, and through the target's cache; a target without its layers has the captured ones for both. Returns the
    largest relative difference of a slot.
    """
    blocks = sample_blocks(batch.packed, step.anchors, step.seed)
    places = two_blocks(blocks)
    ids, position = (torch.from_numpy(a).to(batch.taps.device) for a in (batch.packed.ids, batch.packed.position))
    hidden = step.hidden(batch.taps, ids, position, blocks.to(batch.taps.device)).detach()
    errors = []
    for row, first, second in places:
        trained = logits_of(target, torch.stack([hidden[row, first, 1:], hidden[row, second, 1:]]))
        start, stops = int(blocks.start[row, first]), [int(blocks.anchor[row, n]) for n in (first, second)]
        text = batch.packed.ids[row, start : stops[1] + 1].tolist()
        captured = batch.taps[row : row + 1, start:]
        features = through_cache(target, step, text) if target.has_layers else partial(between, captured)
        decoded = decoded_logits(target, step.drafter, text, [stop - start for stop in stops], features)
        errors.append(judged(target, trained.flatten(0, 1), decoded.flatten(0, 1)))
    limit, worst = decoding_limit(target), float(torch.tensor(errors).max())  # nan stays nan
    if not worst <= limit:
        raise InputError(
            f"expected the training forward's logits from the decoding loop within {limit:g}, found a relative "
            f"difference of {worst:.2g}",
            "likely a cache that keeps a block's own keys, or positions, masks or windows that differ between the two",
        )
    return worst


def two_blocks(blocks: Blocks) -> list[tuple[int, int, int]]:
    """(row, block, later block of the same document) in the first two rows that have blocks: the first of a row, and
    the last of its document."""
    found = []
    for row in range(len(blocks.anchor)):
        kept = blocks.keep[row].nonzero().flatten().tolist()
        if kept:
            mates = [n for n in kept if blocks.start[row, n] == blocks.start[row, kept[0]]]
            found.append((row, mates[0], mates[-1]))
    return found[:2]


Features = Callable[[int, int], Tensor]  # [1, T, K*d] of a text from a position up to another, asked for in order


def between(captured: Tensor, begin: int, end: int) -> Tensor:
    return captured[:, begin:end]


def through_cache(target: Target, step: DrafterStep, text: list[int]) -> Features:
    verifier = CachedTarget(target, step.drafter.spec.target_layer_ids)

    def features(begin: int, end: int) -> Tensor:
        _, taps = verifier.forward(text[begin:end], logits_for=1)
        assert taps is not None
        return taps

    return features


def decoded_logits(
    target: Target, drafter: Drafter, text: list[int], anchors: Sequence[int], features: Features
) -> Tensor:
    """Logits [2, B-1, V] of the decoding loop at two anchors of a text, one after the other."""
    proposer = CachedDrafter(drafter, target)
    logits, begin = [], 0
    for anchor in dict.fromkeys(anchors):
        logits.append(proposer.forward(text[anchor], features(begin, anchor)))
        begin = anchor
    return torch.stack([logits[0], logits[-1]])
