"""Where a run's features come from: the target in every step, the target once, or files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftline.channel.disk import DiskFeatures, FeatureFiles, files_of
from draftline.channel.shards import (
    INDEX,
    Identity,
    hash_ids,
    plan,
    read_index,
    refuse_other_features,
    whole_shards,
)
from draftline.channel.speculators import Sample, files_of_samples, read_samples, unverified
from draftline.channel.store import FeatureStore
from draftline.config import Recipe
from draftline.data.rendering import RenderedData, refuse_unusable
from draftline.data.stream import RowStream
from draftline.errors import InputError
from draftline.monitor.notices import Notices
from draftline.records import FeatureBatch, PackedBatch, TokenRow
from draftline.target.capture import FeatureCapture
from draftline.target.frame import final_norm, load_frame
from draftline.target.load import Target, load_target

Source = Callable[[PackedBatch], FeatureBatch]
PROOF_SAMPLES = 8


@dataclass(frozen=True)
class Wanted:
    """What the drafter and its loss want of the target."""

    taps: tuple[int, ...]
    final: bool


def open_target(recipe: Recipe, device: torch.device) -> Target:
    """The target, without its layers where features come from files: no forward through them will be asked for."""
    return (load_target if recipe.target.features is None else load_frame)(recipe.target, device)


def foreign_samples(recipe: Recipe) -> list[Sample] | None:
    """The samples of target.features where another tool wrote them; None where draftline did, or there is none.
    Raises InputError where the folder is neither."""
    if recipe.target.features is None:
        return None
    folder = Path(recipe.target.features)
    if not folder.is_dir():
        raise InputError(f"target.features {folder}: no such folder", "`draftline prepare` makes one")
    if (folder / INDEX).exists():
        return None
    samples = read_samples(folder, recipe.data.sequence_length)
    if recipe.drafter.taps is None:
        raise InputError(
            f"target.features {folder}: samples of another tool do not say which layers they hold",
            "set drafter.taps to the layer ids that were written, minus 1 and without the last",
        )
    return samples


def adopt(samples: Sequence[Sample], rendered: RenderedData, max_unusable_share: float) -> RenderedData:
    """The rows of another tool's samples, in the files' order. A sample's loss mask is its own, or that of the
    conversation that renders to its very tokens; a sample with neither is counted and left out."""
    masks = {row.ids.tobytes(): row.loss_mask for row in rendered.rows}
    rows, unusable, notes, found = [], Counter[str](), Counter[str](), set()
    for sample in samples:
        key = sample.ids.tobytes()
        mask = masks.get(key) if sample.loss_mask is None else sample.loss_mask
        if key in masks:
            found.add(key)
        if mask is None:
            unusable["sample that no conversation of data.train renders to"] += 1
        elif not mask.any():
            unusable["sample without an answer inside data.sequence_length"] += 1
        else:
            notes["loss masks from " + ("data.train" if sample.loss_mask is None else "the files")] += 1
            rows.append(TokenRow(sample.ids, mask, str(sample.path)))
    if absent := len(masks) - len(found):
        notes["rows of data.train without a sample"] = absent
    adopted = RenderedData(rows, len(samples), unusable, rendered.notes + notes)
    refuse_unusable(adopted, max_unusable_share)
    return adopted


def identity_of(target: Target, revision: str | None, stream: RowStream, wanted: Wanted) -> Identity:
    return Identity(
        target_weights=target.identity,
        target_revision=revision,
        target_dtype=str(target.dtype).removeprefix("torch."),
        hidden_size=target.parts.hidden_size,
        taps=wanted.taps,
        has_final=wanted.final,
        chat_template=target.template_hash,
        documents=len(stream.lengths),
        tokens=len(stream.ids),
        token_ids=hash_ids(stream.lengths, stream.ids),
    )


def feature_source(
    recipe: Recipe, target: Target, wanted: Wanted, stream: RowStream, samples: list[Sample] | None, notices: Notices
) -> Source:
    """Live capture, or a store on the device where target.keep_features_gib holds all of it, or files read as training
    goes on (which the same key lifts onto the device)."""
    width = target.parts.hidden_size * (len(wanted.taps) + wanted.final)
    needed_gib = len(stream.ids) * width * target.dtype.itemsize / 2**30
    is_kept = needed_gib <= recipe.target.keep_features_gib
    if recipe.target.features is not None:
        disk = disk_features(recipe, target, wanted, stream, samples, notices)
        return kept(disk.store, needed_gib, len(stream.ids), "read", notices) if is_kept else disk
    capture = FeatureCapture(target, wanted.taps, wanted.final)
    if not is_kept:
        return capture
    return kept(lambda: captured(capture, stream), needed_gib, len(stream.ids), "captured", notices)


def captured(capture: FeatureCapture, stream: RowStream) -> FeatureStore:
    """The whole data set through the target, in a fixed order, so that a resumed run trains on the same bits."""
    flat = capture.capture(stream.ids, list(zip(stream.starts[:-1].tolist(), stream.lengths.tolist(), strict=True)))
    return FeatureStore(flat.taps, flat.final)


def kept(make: Callable[[], FeatureStore], gib: float, tokens: int, how: str, notices: Notices) -> FeatureStore:
    started = time.perf_counter()
    store = make()
    if store.taps.is_cuda:
        torch.cuda.synchronize()
    rate = tokens / (time.perf_counter() - started)
    notices.facts({"features": f"{gib:.2f} GiB kept, {rate:,.0f} tokens/s {how}"})
    return store


def disk_features(
    recipe: Recipe, target: Target, wanted: Wanted, stream: RowStream, samples: list[Sample] | None, notices: Notices
) -> DiskFeatures:
    """Files held against this run; raises InputError naming what differs, with both values."""
    if samples is None:
        files, finish = prepared_files(recipe, target, wanted, stream), None
    else:
        by_path = {str(sample.path): sample for sample in samples}
        used = [by_path[where] for where in stream.where]
        files = files_of_samples(used, len(wanted.taps), target.parts.hidden_size, wanted.final)
        finish = final_norm(target.parts).requires_grad_(False) if files.final_columns else None
    gib, number = files.bytes_per_token * len(stream.ids) / 2**30, len(files.paths)
    facts = {
        "on disk": f"{gib:.2f} GiB in {number:,} files of {recipe.target.features}; the target's layers are not loaded"
    }
    disk = DiskFeatures(files, stream.batch, len(stream), target.device, target.dtype, finish)
    if samples is not None:
        facts["not proven"] = unverified(wanted.taps)
        if files.final_columns:
            facts["last layer"] = f"its head predicts {agreement(disk, target, stream):.0%} of the answers' tokens"
    notices.facts(facts)
    return disk


def prepared_files(recipe: Recipe, target: Target, wanted: Wanted, stream: RowStream) -> FeatureFiles:
    folder = Path(str(recipe.target.features))
    index, now = read_index(folder), identity_of(target, recipe.target.revision, stream, wanted)
    refuse_other_features(
        folder, index.identity, now, "give the recipe they were prepared with, or prepare this one's in another folder"
    )
    whole_shards(index, plan(stream.lengths, index.identity.bytes_per_token, index.shard_bytes))
    return files_of(folder, index, stream.lengths, stream.ids)


@torch.no_grad()
def agreement(disk: DiskFeatures, target: Target, stream: RowStream) -> float:
    """Share of answer tokens that the head predicts from the state before them, over the first documents: a target's
    own answers give more than half, another target's last layer (or another layer) next to nothing."""
    hits = count = 0
    for document in range(min(PROOF_SAMPLES, len(stream.lengths))):
        start, length = int(stream.starts[document]), int(stream.lengths[document])
        _, final = disk.document(document)
        assert final is not None
        best = target.parts.head.logits(final[:-1]).argmax(-1).cpu()
        here = slice(start + 1, start + length)
        trained = torch.from_numpy(stream.loss_mask[here])
        hits += int((best == torch.from_numpy(stream.ids[here]))[trained].sum())
        count += int(trained.sum())
    return hits / max(count, 1)
