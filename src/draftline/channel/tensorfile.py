"""Where the tensors of a safetensors file lie, so that a part of one can be read without the rest.

The format: 8 bytes with the length of a JSON header (little endian), the header, then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftline.errors import InputError

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64, "I32": torch.int32,
    "BOOL": torch.bool, "U8": torch.uint8,
}  # fmt: skip
LONGEST_HEADER_BYTES = 100 << 20  # the library's own limit


@dataclass(frozen=True, slots=True)
class TensorPlace:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int  # from the beginning of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    path: Path
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]

    def place(self, name: str) -> TensorPlace:
        if name not in self.tensors:
            raise torn(self.path, f"it holds no tensor {name!r}, but {', '.join(sorted(self.tensors)) or 'none'}")
        return self.tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        place = self.place(name)
        buffer = bytearray(place.size_bytes)
        with open_file(self.path) as file:
            read_into(file, memoryview(buffer), place.start_bytes, self.path)
        if not buffer:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(buffer, dtype=place.dtype).view(place.shape)


def open_file(path: Path) -> Any:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise torn(path, f"cannot be opened ({error.strerror})") from error


def open_tensors(path: Path) -> TensorFile:
    """Read a file's header. Raises InputError naming the file where it is not whole."""
    size_bytes = path.stat().st_size if path.is_file() else 0
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or not 2 <= length <= min(size_bytes - 8, LONGEST_HEADER_BYTES):
            raise torn(path, f"its {size_bytes:,} bytes do not begin with a safetensors header")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {name: tensor_place(entry, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise torn(path, f"its header is not one of safetensors ({error})") from error
    end = max((place.start_bytes + place.size_bytes for place in tensors.values()), default=8 + length)
    if end != size_bytes:
        raise torn(path, f"it has {size_bytes:,} bytes, and its header says {end:,}")
    return TensorFile(path, tensors, metadata)


def tensor_place(entry: dict[str, Any], base_bytes: int) -> TensorPlace:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for shape {list(shape)} of {entry['dtype']}")
    return TensorPlace(dtype, shape, base_bytes + start, end - start)


def read_into(file: Any, part: memoryview, offset_bytes: int, path: Path) -> None:
    """Fill `part` with the file's bytes from `offset_bytes` on, front to back."""
    while len(part):
        try:
            count = os.preadv(file.fileno(), [part], offset_bytes)
        except OSError as error:
            raise torn(path, f"cannot be read at byte {offset_bytes:,} ({error.strerror})") from error
        if count == 0:
            raise torn(path, f"it ends at byte {offset_bytes:,}, {len(part):,} bytes early")
        part, offset_bytes = part[count:], offset_bytes + count


def torn(path: Path, why: str) -> InputError:
    return InputError(f"{path} is torn or damaged: {why}", "make it again, or copy it again")
