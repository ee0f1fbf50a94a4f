"""The files that `draftline prepare` writes: features of a whole data set, in shards of whole documents.

A folder holds `index.json` and `shard-00000.safetensors` and so on. The index says whose features these are
(`Identity`), and lists the shards that are whole. The documents are those of the training stream, in its order of
documents (the data's own, not an epoch's). A shard holds

    features   [T, C]  the target's dtype; a row is one token: its K taps ascending, d values each, then, where the
                       index says `has_final`, the final-normed last state; so a document is one run of bytes
    token_ids  [T]     int32
    lengths    [D]     int64, tokens of each document
    crc32      [D]     int64, of each document's bytes in `features`

and, as metadata, a `Heading`: schema, first document, the hash of its token ids and the identity again, so that a
shard that lost its index, or was put in another's place, is recognised. A shard appears whole (write, fsync, rename),
and the index, which is replaced in the same way after each, never names one that is not.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftline.channel.tensorfile import TensorFile, open_file, open_tensors, read_into, torn
from draftline.errors import InputError, RunError

SCHEMA = 1
INDEX = "index.json"
HEADING = "draftline"
BYTES_BESIDE_A_TOKEN = 4  # its id
BYTES_BESIDE_A_DOCUMENT = 16  # length and checksum
BYTES_BESIDE_A_SHARD = 4096  # header, and the last block of a file system


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(Record):
    """Whose features these are. Training refuses them where any of it differs from its own."""

    target_weights: str  # target.load.weights_identity
    target_revision: str | None  # of a hub id; compared only where both sides name one, for the weights decide
    target_dtype: str
    hidden_size: int
    taps: tuple[int, ...]
    has_final: bool
    chat_template: str
    documents: int
    tokens: int
    token_ids: str  # sha256 over lengths and ids of all documents

    @property
    def columns(self) -> int:
        """Values of one token."""
        return self.hidden_size * (len(self.taps) + self.has_final)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.target_dtype]
        return dtype

    @property
    def bytes_per_token(self) -> int:
        return self.columns * self.dtype.itemsize


class Shard(Record):
    file: str
    first_document: int
    documents: int
    tokens: int
    size_bytes: int
    token_ids: str


class Heading(Record):
    """What a shard says of itself: one metadata key, for the library writes several in a random order."""

    schema_version: Literal[1] = 1
    first_document: int
    token_ids: str
    identity: Identity


class Index(Record):
    schema_version: Literal[1] = 1
    identity: Identity
    shard_bytes: int  # the bound that the documents were cut into shards by
    shards: tuple[Shard, ...]  # whole ones


def hash_ids(lengths: np.ndarray, ids: np.ndarray) -> str:
    """sha256 over documents' lengths [D] and their ids [T], one document after the other."""
    digest = hashlib.sha256(np.ascontiguousarray(lengths, dtype="<i8").data)
    digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
    return digest.hexdigest()


def plan(lengths: np.ndarray, bytes_per_token: int, shard_bytes: int) -> list[range]:
    """Document numbers of each shard: whole documents, in order, at most `shard_bytes` unless one alone has more."""
    cuts, used = [0], 0
    for document, size in enumerate((lengths * bytes_per_token).tolist()):
        if used and used + size > shard_bytes:
            cuts.append(document)
            used = 0
        used += size
    return [range(first, last) for first, last in pairwise([*cuts, len(lengths)])]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def write_shard(path: Path, features: Tensor, lengths: np.ndarray, ids: np.ndarray, first: int, who: Identity) -> Shard:
    """Write one shard whole (write, fsync, rename). features [T, C] on the host. RunError where the disk refuses."""
    token_ids = hash_ids(lengths, ids)
    rows, ends = features.view(torch.uint8).numpy(), np.cumsum(lengths)
    checksums = [zlib.crc32(rows[end - length : end].data) for length, end in zip(lengths, ends, strict=True)]
    tensors = {
        "features": features,
        "token_ids": torch.from_numpy(ids.astype(np.int32)),
        "lengths": torch.from_numpy(lengths.astype(np.int64)),
        "crc32": torch.tensor(checksums, dtype=torch.int64),
    }
    heading = Heading(first_document=first, token_ids=token_ids, identity=who)
    partial = path.with_name(f".partial-{path.name}")
    try:
        save_file(tensors, partial, {HEADING: heading.model_dump_json()})
        partial.chmod(path.with_name(INDEX).stat().st_mode)  # the library gives its files to their owner alone
        publish(partial, path)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error class
        partial.unlink(missing_ok=True)
        raise RunError(
            f"{path} could not be written: {error}",
            "free space, then give the same command again: the shards before this one are whole and are kept",
        ) from error
    size_bytes = path.stat().st_size
    return Shard(
        file=path.name, first_document=first, documents=len(lengths), tokens=len(ids), size_bytes=size_bytes,
        token_ids=token_ids,
    )  # fmt: skip


def publish(partial: Path, path: Path) -> None:
    """Make a file's bytes durable, give it its name, and make that durable too."""
    for name, then in ((partial, True), (path.parent, False)):
        handle = os.open(name, os.O_RDONLY)
        try:
            if not then:
                os.replace(partial, path)
            os.fsync(handle)
        finally:
            os.close(handle)


def write_index(folder: Path, index: Index) -> None:
    partial = folder / f".partial-{INDEX}"
    try:
        partial.write_text(index.model_dump_json(indent=1) + "\n", encoding="utf-8")
        publish(partial, folder / INDEX)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{folder / INDEX} could not be written: {error.strerror}", "free space and go on") from error


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        return Index.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", "give a folder that `draftline prepare` wrote") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(
            f"{path}: {place}: {first['msg']}",
            f"schema {SCHEMA} is what this version reads: prepare the features again in another folder",
        ) from error


def differences(prepared: Identity, now: Identity) -> list[str]:
    """Every field that differs, in words, with both values."""
    found = []
    for name in Identity.model_fields:
        old, new = (who.model_dump(mode="json")[name] for who in (prepared, now))
        covered = name == "has_final" and old  # a final state that the loss does not want is passed over
        unnamed = name == "target_revision" and None in (old, new)
        if old != new and not covered and not unnamed:
            found.append(f"{name.replace('_', ' ')}: prepared {old}, now {new}")
    return found


def refuse_other_features(folder: Path, prepared: Identity, now: Identity, remedy: str) -> None:
    if wrong := differences(prepared, now):
        raise InputError(f"the features in {folder} are not this run's:\n  " + "\n  ".join(wrong), remedy)


def open_shard(folder: Path, shard: Shard, who: Identity) -> TensorFile:
    """A shard's header, held against the index. Raises InputError naming the file where they differ."""
    path = folder / shard.file
    file = open_tensors(path)
    try:
        heading = Heading.model_validate_json(file.metadata.get(HEADING, ""))
    except ValidationError as error:
        raise torn(path, f"its metadata are not a shard's: {error.errors()[0]['msg']}") from error
    expected = {
        "bytes": (shard.size_bytes, path.stat().st_size),
        "token ids": (shard.token_ids, heading.token_ids),
        "first document": (shard.first_document, heading.first_document),
        "identity": (who, heading.identity),
        "features": ((who.dtype, (shard.tokens, who.columns)), tuple_of(file, "features")),
        "lengths": ((torch.int64, (shard.documents,)), tuple_of(file, "lengths")),
        "crc32": ((torch.int64, (shard.documents,)), tuple_of(file, "crc32")),
    }
    for name, (index, found) in expected.items():
        if index != found:
            raise torn(path, f"{name}: the index says {index}, the file {found}")
    return file


def tuple_of(file: TensorFile, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    return file.place(name).dtype, file.place(name).shape


def verify_shard(folder: Path, shard: Shard, who: Identity) -> None:
    """Read a shard through once, document by document. Raises InputError naming the file where a byte is wrong."""
    file = open_shard(folder, shard, who)
    place, lengths, checksums = file.place("features"), file.read("lengths").tolist(), file.read("crc32").tolist()
    offset = place.start_bytes
    with open_file(file.path) as handle:
        for number, (length, checksum) in enumerate(zip(lengths, checksums, strict=True)):
            part = memoryview(bytearray(length * who.bytes_per_token))
            read_into(handle, part, offset, file.path)
            check_document(file.path, shard.first_document + number, part, checksum)
            offset += len(part)


def check_document(path: Path, document: int, part: memoryview, checksum: int) -> None:
    found = zlib.crc32(part)
    if found != checksum:
        raise torn(path, f"document {document} has checksum {found:08x}, written was {checksum:08x}")


def whole_shards(index: Index, planned: Sequence[range]) -> None:
    """Raises InputError where shards of the plan are missing from the index."""
    missing = len(planned) - len(index.shards)
    if missing:
        raise InputError(
            f"{missing} of {len(planned)} shards are not written yet",
            "give the `draftline prepare` command again: it goes on where it stopped",
        )
