"""`draftline prepare`: the target once over a recipe's data, its features in shards that training reads instead."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftline.channel.shards import (
    BYTES_BESIDE_A_DOCUMENT,
    BYTES_BESIDE_A_SHARD,
    BYTES_BESIDE_A_TOKEN,
    INDEX,
    Identity,
    Index,
    Shard,
    plan,
    read_index,
    refuse_other_features,
    shard_name,
    verify_shard,
    write_index,
    write_shard,
)
from draftline.config import Recipe
from draftline.data.excerpt import excerpt
from draftline.data.stream import RowStream
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter
from draftline.drafter.step import DrafterStep
from draftline.environment.device import choose_device
from draftline.environment.switches import configure_torch
from draftline.errors import InputError, Interrupted
from draftline.evaluate.gates import Gates
from draftline.evaluate.subject import Subject, data_gates, target_gates
from draftline.monitor.notices import Notices, stdout_console
from draftline.monitor.progress import Progress
from draftline.target.capture import FeatureCapture
from draftline.target.derive import derive_spec
from draftline.target.frame import load_frame
from draftline.target.load import load_target
from draftline.train.features import Wanted, identity_of
from draftline.train.interruption import Interruption
from draftline.train.job import row_stream

LINES = 20  # of progress where there is no terminal


@dataclass(frozen=True)
class Work:
    """What is to be written: every planned shard's documents by number, and the shards that are whole already."""

    folder: Path
    who: Identity
    shard_bytes: int
    planned: list[range]
    whole: dict[int, Shard]

    @property
    def missing(self) -> list[int]:
        return [number for number in range(len(self.planned)) if number not in self.whole]

    def index(self) -> Index:
        return Index(identity=self.who, shard_bytes=self.shard_bytes, shards=tuple(self.shards()))

    def shards(self) -> list[Shard]:
        return [shard for _, shard in sorted(self.whole.items())]


def prepare(recipe: Recipe, folder: Path, shard_bytes: int) -> Index:
    """Write the features of all of a recipe's documents to `folder`; an interrupted call is continued by the same one.

    Raises InputError where the folder holds another run's features or the disk is too small (before anything is
    captured), RunError where the disk refuses a write, Interrupted after a signal.
    """
    if recipe.target.features is not None:
        raise InputError("target.features is set, and prepare runs the target itself", "leave target.features out")
    device = choose_device(recipe.placement.device)
    configure_torch(device)
    notices = Notices(stdout_console())
    frame = load_frame(recipe.target, device)  # enough for the budget: a large target is loaded once it fits
    loss = LossKind(recipe.loss.kind, recipe.loss.weights, recipe.gamma, recipe.loss.alpha)
    wanted = Wanted(derive_spec(recipe.drafter, frame).target_layer_ids, loss.needs_final)
    stream, examples = row_stream(recipe, frame, notices, None)
    notices.section("features")
    work = survey(folder, identity_of(frame, recipe.target.revision, stream, wanted), stream, shard_bytes, notices)
    keep_to_budget(work, stream, notices)
    del frame
    if work.missing:
        target = load_target(recipe.target, device)
        notices.facts(target.speed)
        capture = FeatureCapture(target, wanted.taps, wanted.final)
        notices.section("preflight")
        gates = Gates(notices)
        gates.all(data_gates(target, stream, examples))
        gates.all(target_gates(target_subject(recipe, capture, loss, stream)))
        write_all(work, stream, capture, notices)
    size_bytes = sum(shard.size_bytes for shard in work.shards())
    notices.facts(
        {
            "features": f"{folder}: {size_bytes:,} bytes, shards: {len(work.whole)}",
            "use": f"draftline train RECIPE target.features={folder}",
        }
    )
    return work.index()


def target_subject(recipe: Recipe, capture: FeatureCapture, loss: LossKind, stream: RowStream) -> Subject:
    """What training proves of a target before its first step is proven here: later its layers are not loaded."""
    target = capture.target
    with torch.device("meta"):  # the drafter is asked for its shape and for what it embeds, and never run
        drafter = Drafter(derive_spec(recipe.drafter, target))
    step = DrafterStep(drafter, target.embed, target.parts.head, loss, recipe.train.anchors, recipe.train.seed)
    return Subject(target, step, capture, excerpt(stream))


def survey(folder: Path, who: Identity, stream: RowStream, shard_bytes: int, notices: Notices) -> Work:
    """What is planned and what of it is whole. Torn shards of an earlier call are named; they are written again."""
    work = Work(folder, who, shard_bytes, plan(stream.lengths, who.bytes_per_token, shard_bytes), {})
    if not (folder / INDEX).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"--features {folder} already holds other files", "name another folder, or remove this one"
            )
        return work
    index = read_index(folder)
    refuse_other_features(folder, index.identity, who, "name another folder, or remove this one")
    if index.shard_bytes != shard_bytes:
        raise InputError(
            f"--shard-gib: the shards in {folder} were cut at {index.shard_bytes / 2**30:g} GiB, now "
            f"{shard_bytes / 2**30:g}",
            "give the value it was begun with, or name another folder",
        )
    for shard in index.shards:
        number = next(n for n, documents in enumerate(work.planned) if documents.start == shard.first_document)
        try:
            verify_shard(folder, shard, who)
        except InputError as error:
            notices.say(f"  {error.what}: it is written again")
        else:
            work.whole[number] = shard
    return work


def keep_to_budget(work: Work, stream: RowStream, notices: Notices) -> None:
    """Print what the missing shards need and what the disk has; InputError where that is less."""
    who = work.who
    documents = sum(len(work.planned[number]) for number in work.missing)
    tokens = sum(tokens_of(stream, work.planned[number]) for number in work.missing)
    needed = tokens * (who.bytes_per_token + BYTES_BESIDE_A_TOKEN) + documents * BYTES_BESIDE_A_DOCUMENT
    needed += len(work.missing) * BYTES_BESIDE_A_SHARD
    place = next(parent for parent in (work.folder.absolute(), *work.folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    kinds = f"{len(who.taps)} taps{' and the final state' if who.has_final else ''} of {who.hidden_size}"
    notices.facts(
        {
            "taps": f"{list(who.taps)}; {kinds} in {who.target_dtype}: {who.bytes_per_token:,} bytes a token",
            "shards": f"{len(work.planned)} of at most {work.shard_bytes / 2**30:g} GiB, {len(work.whole)} whole",
            "disk": f"{needed / 2**30:.3f} GiB needed ({needed:,} bytes), {free / 2**30:.1f} GiB free in {place}",
        }
    )
    if needed > free:
        raise InputError(
            f"--features {work.folder}: {needed:,} bytes are needed, and its disk has {free:,} free",
            "name a folder on a larger disk, or take fewer drafter.taps or less data",
        )


def tokens_of(stream: RowStream, documents: range) -> int:
    return int(stream.starts[documents.stop] - stream.starts[documents.start])


def write_all(work: Work, stream: RowStream, capture: FeatureCapture, notices: Notices) -> None:
    """Capture shard after shard while the one before is being written: at most two are in memory."""
    work.folder.mkdir(parents=True, exist_ok=True)
    write_index(work.folder, work.index())
    total, done = len(stream.ids), sum(shard.tokens for shard in work.shards())
    forwards = len(stream.lengths) if capture.tokens_per_forward == 1 else total // capture.tokens_per_forward
    started = time.perf_counter()
    with (
        Progress("prepare", total, console=notices.console, every=max(1, forwards // LINES), done=done) as progress,
        Interruption() as interruption,
        ThreadPoolExecutor(1) as writer,
    ):

        def advance(tokens: int) -> None:
            progress.advance(tokens, tokens=tokens)
            if interruption.received is not None:
                name = interruption.received.name
                raise Interrupted(name, interruption.received, "whole shards are kept: the same command goes on")

        writing: Future[None] | None = None
        for number in work.missing:
            features = capture_shard(capture, stream, work.planned[number], advance)
            if writing is not None:
                writing.result()
            writing = writer.submit(write_one, work, stream, number, features)
        if writing is not None:
            writing.result()
    seconds = time.perf_counter() - started
    rate = f"{(total - done) / seconds:,.0f} tokens/s"
    notices.facts({"captured": f"{total - done:,} tokens in {seconds:.1f} s, {rate}, the last write included"})


def capture_shard(
    capture: FeatureCapture, stream: RowStream, documents: range, advance: Callable[[int], None]
) -> Tensor:
    """Features [T, C] of consecutive documents, on the host."""
    base, end = int(stream.starts[documents.start]), int(stream.starts[documents.stop])
    spans = [(int(stream.starts[d]) - base, int(stream.lengths[d])) for d in documents]
    flat = capture.capture(stream.ids[base:end], spans, advance)
    parts = [flat.taps] if flat.final is None else [flat.taps, flat.final]
    return torch.cat([part.cpu() for part in parts], dim=-1)


def write_one(work: Work, stream: RowStream, number: int, features: Tensor) -> None:
    documents = work.planned[number]
    here = slice(int(stream.starts[documents.start]), int(stream.starts[documents.stop]))
    work.whole[number] = write_shard(
        work.folder / shard_name(number), features, stream.lengths[documents.start : documents.stop],
        stream.ids[here], documents.start, work.who,
    )  # fmt: skip
    write_index(work.folder, work.index())
