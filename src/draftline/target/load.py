"""The frozen target: its model, tokenizer and stop tokens, loaded from a folder or from the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from draftline.config import TargetSection
from draftline.errors import InputError
from draftline.target.fast_parts import FastParts, fuse_parts
from draftline.target.packing import UNTRIED, Packing, find_packing
from draftline.target.parts import TargetParts, find_parts


@dataclass(frozen=True)
class Target:
    """A loaded target. `parts` are its embedding, decoder, layers and head; nothing in it is ever trained."""

    model: Any
    tokenizer: Any
    parts: TargetParts
    name: str
    identity: str  # of its weights, see weights_identity
    stop_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    has_layers: bool = True  # False: only embedding, final norm and head are in memory, see frame.py
    fast: FastParts = FastParts()
    packing: Packing = UNTRIED

    @property
    def template_hash(self) -> str:
        return hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:16]

    @property
    def speed(self) -> dict[str, str]:
        """How its forward runs on a GPU, for people."""
        if self.device.type == "cpu" or not self.has_layers:
            return {}
        return {"capture": self.packing.text, "one kernel": self.fast.text}

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the target's first layer receives them. ids [...] -> [..., d]."""
        return self.parts.embed(ids)


def load_target(section: TargetSection, device: torch.device, changes: Mapping[str, Any] | None = None) -> Target:
    """Load model and tokenizer; weights from safetensors only, nothing unpickled.

    changes: further words for from_pretrained, see `frame.py`.
    Raises InputError where the folder or hub id cannot be used, naming it and the remedy.
    """
    dtype = target_dtype(section.dtype, device)
    common: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    check_folder(section.path)
    if section.revision is not None and Path(section.path).exists():
        raise InputError(
            f"target.revision {section.revision}: target.path {section.path} is a folder, which has no revisions",
            "leave target.revision out, or give a hub id",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(section.path, **common)
        with no_bar_over(section.path):
            loaded: Any = auto_class(section.path, common).from_pretrained(
                section.path,
                dtype=dtype,
                device_map=section.device_map,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are listed and refused below
                **common,
                **(changes or {}),
            )
    except ImportError as error:  # of a quantised model's library, accelerate, or a tokenizer's
        raise InputError(
            f"target.path {section.path}: {' '.join(str(error).split())}",
            "install what it names, or give a model that does not need it (an unquantised one)",
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"target.path {section.path}: {fault(section.path, error)}", remedy_for(section.path)
        ) from error
    model, loading = loaded
    refuse_unloaded(section.path, loading)
    refuse_empty_tokenizer(section.path, tokenizer)
    model.eval().requires_grad_(False)
    if section.device_map is None:
        model.to(device)
    parts = find_parts(model, device)
    refuse_other_dtype(section.path, parts.head.weight.dtype, dtype)
    identity = weights_identity(model_folder(section))
    target = Target(model, tokenizer, parts, section.path, identity, stop_ids(model, tokenizer), device, dtype)
    return at_best_speed(target) if device.type == "cuda" else target


def at_best_speed(target: Target) -> Target:
    """The target with its parts fused and its documents packed, as far as either is proven equal."""
    parts, device = target.parts, target.device
    fast = fuse_parts(parts, device)
    places = {parameter.device for parameter in parts.decoder.parameters()}
    if len(places) > 1:
        return replace(target, fast=fast, packing=Packing(0, f"its layers lie on {len(places)} devices"))
    return replace(target, fast=fast, packing=find_packing(parts, device))


def auto_class(path: str, common: Mapping[str, Any]) -> Any:
    """transformers' class of causal language models, or that of wrappers which read images as well as text."""
    config = AutoConfig.from_pretrained(path, **common)
    own_code = config.to_dict().get("auto_map") or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise InputError(
        f"target.path {path}: model type {config.model_type!r} is neither a causal language model nor one that reads "
        "images beside text, for the installed transformers",
        "draftline drafts for decoder-only language models",
    )


@contextmanager
def no_bar_over(path: str) -> Iterator[None]:
    """Without transformers' progress bar while a folder is read; a hub id keeps it, for a download takes minutes.

    The switch is process-wide: whoever uses transformers beside draftline finds it as it was.
    """
    silenced = Path(path).is_dir() and transformers_logging.is_progress_bar_enabled()
    if silenced:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if silenced:
            transformers_logging.enable_progress_bar()


def refuse_unloaded(path: str, loading: Mapping[str, Any]) -> None:
    """transformers fills what the files lack with random numbers and goes on; a target must be whole."""
    mismatched = {
        name: f"shape {list(found)}, not {list(wanted)}" for name, found, wanted in loading["mismatched_keys"]
    }
    wrong = {name: "missing" for name in loading["missing_keys"]} | mismatched
    if wrong:
        first = ", ".join(f"{name} ({fault})" for name, fault in sorted(wrong.items())[:8])
        raise InputError(
            f"target.path {path}: {len(wrong)} tensors of the model are not in its safetensors files: {first}",
            "copy or save the whole model again; config.json must be the one of these weights",
        )


def refuse_other_dtype(path: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """A quantised model may load in the dtype that its quantiser likes, whatever was asked for."""
    if found != wanted:
        names = [str(dtype).removeprefix("torch.") for dtype in (found, wanted)]
        raise InputError(
            f"target.path {path}: its head loads as {names[0]}, not {names[1]}", f"give target.dtype={names[0]}"
        )


def refuse_empty_tokenizer(path: str, tokenizer: Any) -> None:
    """transformers makes an empty tokenizer where a folder has no tokenizer files."""
    words = len(tokenizer.get_vocab())
    if words <= len(tokenizer.get_added_vocab()):
        raise InputError(
            f"target.path {path}: its tokenizer has no vocabulary", "put tokenizer.json and tokenizer_config.json there"
        )


def model_folder(section: TargetSection) -> Path:
    """The folder the weights came from: the given one, or the hub's snapshot."""
    if Path(section.path).is_dir():
        return Path(section.path)
    config_file = cached_file(section.path, "config.json", revision=section.revision)
    return Path(str(config_file)).parent


def weights_identity(folder: Path) -> str:
    """16 hex digits that tell one revision of a model from another, wherever it lies.

    Hashes config.json and, of each safetensors file, its size and its first and last MiB: reading whole weights
    would take minutes for a large target.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size_bytes = file.stat().st_size
        digest.update(f"{file.name} {size_bytes}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 20))
            handle.seek(max(0, size_bytes - (1 << 20)))
            digest.update(handle.read())
    return digest.hexdigest()[:16]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"target {path}: {fault(path, error)}", remedy_for(path)) from error


def target_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_folder(path: str) -> None:
    """Name the faults of a local folder before transformers turns them into a hub look-up."""
    folder = Path(path)
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if not folder.exists():
        if looks_local:
            raise InputError(
                f"target.path {path}: no such folder", "give a folder with config.json, or a hub id org/name"
            )
        return
    if not folder.is_dir():
        raise InputError(f"target.path {path}: is a file, not a folder", "give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise InputError(f"target.path {path}: holds no config.json", "give a folder written by save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"target.path {path}: holds no safetensors weights, and draftline never unpickles",
            "save the model again with save_pretrained, which writes safetensors",
        )


def fault(path: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:400]
    return said if Path(path).exists() else f"no such folder, and as a hub id: {said}"


def remedy_for(path: str) -> str:
    if Path(path).exists():
        return "is the folder complete, and is its model class known to the installed transformers?"
    return (
        "a hub id needs a reachable hub and, for a gated model, a login (`hf auth login`); "
        "without a network download the model elsewhere and give its folder"
    )


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a turn: generation_config's eos ids and the tokenizer's."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    stated = [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]
    ids = {int(i) for i in stated if i is not None}
    if not ids:
        raise InputError(
            "the target names no end-of-turn token (generation_config.eos_token_id, tokenizer.eos_token)",
            "set eos_token_id in the target's generation_config.json",
        )
    return frozenset(ids)
