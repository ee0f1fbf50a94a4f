"""Features that another tool wrote, in the layout of the `speculators` project (vLLM's hidden-states connector).

One safetensors file a sample, `hs_12.safetensors` say, with `token_ids` (or `input_ids`) [T] and `hidden_states`
[T, L, d]: the outputs of L layers, ascending, each before the final norm. Its layer ids count from 1: id l+1 is the
output of layer l, and the last is usually the model's depth, the last layer's output, which its trainer sends through
the final norm and head. L is then K + 1. `loss_mask` [T] is read where a file has one; the tool keeps it in a data set
of its own, so mostly it does not. Which layers and whose they are, no file says: `unverified` lists that in words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftline.channel.disk import FeatureFiles
from draftline.channel.tensorfile import TensorPlace, open_tensors, torn
from draftline.errors import InputError


@dataclass(frozen=True)
class Sample:
    path: Path
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray | None  # bool [T]
    states: TensorPlace  # [T, L, d]


def read_samples(folder: Path, longest_tokens: int) -> list[Sample]:
    """Every sample of a folder, by number; ids and mask cut to `longest_tokens` (a layer's output depends on nothing
    after it). Raises InputError naming the file that is not in the layout."""
    paths = [path for path in folder.glob("*.safetensors") if not path.name.startswith(".")]
    if not paths:
        pickled = any(folder.glob("*.pt"))
        raise InputError(
            f"target.features {folder}: holds no safetensors files" + (", but pickled .pt files" if pickled else ""),
            "draftline never unpickles: convert them to safetensors" if pickled else "give a folder of features",
        )
    return [read_sample(path, longest_tokens) for path in sorted(paths, key=by_number)]


def by_number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.stem)
    return (int(digits[-1]) if digits else -1, path.name)


def read_sample(path: Path, longest_tokens: int) -> Sample:
    file = open_tensors(path)
    name = "token_ids" if "token_ids" in file.tensors else "input_ids"
    ids, states = file.read(name), file.place("hidden_states")
    mask = file.read("loss_mask") if "loss_mask" in file.tensors else None
    if ids.dim() != 1 or len(states.shape) != 3 or states.shape[0] != len(ids) or not len(ids):
        raise torn(path, f"{name} {list(ids.shape)} and hidden_states {list(states.shape)} are not [T] and [T, L, d]")
    if mask is not None and mask.shape != ids.shape:
        raise torn(path, f"loss_mask {list(mask.shape)} is not as long as {name} {list(ids.shape)}")
    return Sample(
        path,
        ids[:longest_tokens].numpy().astype(np.int32),
        None if mask is None else mask[:longest_tokens].numpy().astype(bool),
        states,
    )


def files_of_samples(samples: Sequence[Sample], taps: int, hidden_size: int, want_final: bool) -> FeatureFiles:
    """Raises InputError naming the first sample whose layers or widths are not the run's, and both."""
    allowed = (taps + 1,) if want_final else (taps, taps + 1)
    shape, dtype = samples[0].states.shape[1:], samples[0].states.dtype
    for sample in samples:
        layers, width = sample.states.shape[1:]
        if width != hidden_size:
            raise InputError(
                f"{sample.path}: hidden_states are {width} wide, the target's {hidden_size}",
                "these are features of another target",
            )
        if layers not in allowed:
            wanted = f"{taps} taps and the last layer" if want_final else f"{taps} taps, with or without the last layer"
            raise InputError(
                f"{sample.path}: hidden_states of {layers} layers, and this run wants {wanted}",
                "set drafter.taps to the layer ids that were written, minus 1 and without the last",
            )
        if (layers, width) != shape or sample.states.dtype != dtype:
            raise torn(sample.path, f"{layers} layers in {sample.states.dtype}, the first file {shape[0]} in {dtype}")
    return FeatureFiles(
        paths=tuple(sample.path for sample in samples),
        file=np.arange(len(samples)),
        offset_bytes=np.array([sample.states.start_bytes for sample in samples]),
        tokens=np.array([len(sample.ids) for sample in samples]),
        checksum=None,
        dtype=dtype,
        tap_columns=taps * hidden_size,
        final_columns=(shape[0] - taps) * hidden_size,
    )


def unverified(taps: Sequence[int]) -> str:
    """What the files cannot prove, in words."""
    return (
        f"taken on trust, for no file says it: the target's weights and revision, that its layers are {list(taps)} "
        f"(ids {[tap + 1 for tap in taps]} there), and that no byte changed since"
    )
