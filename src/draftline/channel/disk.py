"""Features read from disk while training goes on: the same `get` as live capture, without a target's forward.

Batches come in the stream's shuffled order, so documents are read in any order, but each in one run of bytes, front to
back, straight into the batch's buffer: there is no second copy on the host. A few batches are read ahead by threads
(reading and checksums leave the interpreter free); their buffers are what stays in memory, whatever the files' size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftline.channel.shards import Index, check_document, hash_ids, open_shard
from draftline.channel.store import FeatureStore
from draftline.channel.tensorfile import open_file, read_into, torn
from draftline.records import FeatureBatch, PackedBatch

READERS = 4  # threads: one checks 2.8 GB/s, and disks answer faster when several ask
AHEAD_BYTES = 1 << 30
MOST_AHEAD = 16  # batches: more only delays the end of an interrupted run


@dataclass(frozen=True)
class FeatureFiles:
    """Where the features of every document of a data set lie, in the stream's order of documents."""

    paths: tuple[Path, ...]
    file: np.ndarray  # int64 [D] number of the document's file in `paths`
    offset_bytes: np.ndarray  # int64 [D]
    tokens: np.ndarray  # int64 [D]
    checksum: np.ndarray | None  # int64 [D] crc32 of its bytes; None where the writer left none
    dtype: torch.dtype  # of the files
    tap_columns: int  # values of a token: taps first,
    final_columns: int  # then the last state, or 0

    @property
    def bytes_per_token(self) -> int:
        return (self.tap_columns + self.final_columns) * self.dtype.itemsize

    def read(self, document: int, part: memoryview) -> None:
        """Fill `part` with a document's bytes. Raises InputError naming the file where it is torn or damaged."""
        path = self.paths[self.file[document]]
        with open_file(path) as file:
            read_into(file, part, int(self.offset_bytes[document]), path)
        if self.checksum is not None:
            check_document(path, document, part, int(self.checksum[document]))


def files_of(folder: Path, index: Index, lengths: np.ndarray, ids: np.ndarray) -> FeatureFiles:
    """The places of all documents in the shards of a whole index, each shard's header held against the index and the
    data (lengths [D], ids [T]). Raises InputError naming the file that does not fit."""
    who, offsets, checksums, numbers = index.identity, [], [], []
    for number, shard in enumerate(index.shards):
        file = open_shard(folder, shard, who)
        mine = slice(shard.first_document, shard.first_document + shard.documents)
        first = int(lengths[: mine.start].sum())
        held, wanted = file.read("lengths").numpy(), lengths[mine]
        token_ids = hash_ids(wanted, ids[first : first + shard.tokens])
        if not np.array_equal(held, wanted) or token_ids != shard.token_ids:
            raise torn(file.path, f"token ids: written {shard.token_ids}, the data's {token_ids}")
        starts = np.concatenate([[0], np.cumsum(held)[:-1]]) * who.bytes_per_token
        offsets.append(file.place("features").start_bytes + starts)
        checksums.append(file.read("crc32").numpy())
        numbers.append(np.full(shard.documents, number))
    taps = who.hidden_size * len(who.taps)
    return FeatureFiles(
        tuple(folder / shard.file for shard in index.shards), np.concatenate(numbers), np.concatenate(offsets), lengths,
        np.concatenate(checksums), who.dtype, taps, who.columns - taps,
    )  # fmt: skip


class DiskFeatures:
    """Callable: PackedBatch -> FeatureBatch by reading, with the batches after it read ahead.

    source and count: the stream, for the batches to come; they are expected in steps of `stride`. A batch out of turn
    (the first one of a resumed run) is read at once and reading ahead starts over from there.
    finish: makes the final state of what the files hold as last, where that is not it already.
    """

    def __init__(
        self,
        files: FeatureFiles,
        source: Callable[[int], PackedBatch],
        count: int,
        device: torch.device,
        dtype: torch.dtype,
        finish: Callable[[Tensor], Tensor] | None = None,
        *,
        stride: int = 1,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self.files = files
        self.source = source
        self.count = count
        self.device = device
        self.dtype = dtype
        self.finish = finish
        self.stride = stride
        self.ahead_bytes = ahead_bytes
        self.starts = np.concatenate([[0], np.cumsum(files.tokens)])
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="features")
        self.ahead: deque[tuple[int, Future[Tensor]]] = deque()

    def __call__(self, packed: PackedBatch) -> FeatureBatch:
        if not self.ahead or self.ahead[0][0] != packed.index:
            self.start_over(packed)
        _, waiting = self.ahead.popleft()
        host = waiting.result()
        self.read_ahead(packed.index + self.stride * (len(self.ahead) + 1), host.nbytes)
        return FeatureBatch(packed, *self.split(host.to(self.device, non_blocking=True)))

    def start_over(self, packed: PackedBatch) -> None:
        for _, waiting in self.ahead:
            waiting.cancel()
        self.ahead = deque([(packed.index, self.readers.submit(self.read, packed))])

    def read_ahead(self, index: int, batch_bytes: int) -> None:
        """Queue batches from `index` on while fewer than the bound are waiting: at least one, so that reading and
        training always overlap."""
        most = min(max(1, self.ahead_bytes // batch_bytes), MOST_AHEAD)
        while len(self.ahead) < most and index < self.count:
            self.ahead.append((index, self.readers.submit(self.read_numbered, index)))
            index += self.stride

    def read_numbered(self, index: int) -> Tensor:
        return self.read(self.source(index))

    def read(self, packed: PackedBatch) -> Tensor:
        """A batch's bytes as they lie in the files, [R, S, C] on the host; zeros on padding, as capture leaves them."""
        files, (rows, length) = self.files, packed.ids.shape
        columns = files.tap_columns + files.final_columns
        host = torch.empty(rows, length, columns, dtype=files.dtype, pin_memory=self.device.type == "cuda")
        flat = host.view(torch.uint8).view(rows * length, -1).numpy()
        token, position = packed.token.reshape(-1), packed.position.reshape(-1)
        flat[token < 0] = 0
        begins = np.flatnonzero((position == 0) & (token >= 0))
        documents = np.searchsorted(self.starts, token[begins], side="right") - 1
        for turn in np.lexsort((files.offset_bytes[documents], files.file[documents])):  # in the order of the disk
            begin, document = begins[turn], documents[turn]
            files.read(int(document), flat[begin : begin + files.tokens[document]].reshape(-1).data)
        return host

    def split(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """(taps, final or None) of rows [..., C], in the target's dtype."""
        values, taps = values.to(self.dtype), self.files.tap_columns
        if not self.files.final_columns:
            return values, None
        last = values[..., taps:].contiguous()
        return values[..., :taps].contiguous(), last if self.finish is None else self.finish(last)

    def store(self) -> FeatureStore:
        """All features at once, on the device: every file read once, front to back."""
        files, tokens = self.files, int(self.starts[-1])
        taps = torch.empty(tokens, files.tap_columns, dtype=self.dtype, device=self.device)
        final = torch.empty(tokens, files.final_columns, dtype=self.dtype, device=self.device)
        for document in range(len(files.tokens)):
            here = slice(self.starts[document], self.starts[document + 1])
            taps[here], last = self.document(document)
            if last is not None:
                final[here] = last
        return FeatureStore(taps, final if files.final_columns else None)

    def document(self, number: int) -> tuple[Tensor, Tensor | None]:
        """(taps [T, K*d], final [T, d] or None) of one document, on the device."""
        files = self.files
        host = torch.empty(int(files.tokens[number]), files.tap_columns + files.final_columns, dtype=files.dtype)
        files.read(number, host.view(torch.uint8).view(-1).numpy().data)
        return self.split(host.to(self.device))
