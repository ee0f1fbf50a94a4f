"""Export folders: published whole or not at all, read back by whatever format they are in."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from draftline.errors import InputError, RunError
from draftline.export.card import model_card
from draftline.export.geometry import as_exported
from draftline.export.jsonfile import as_text, read_json, replace_text, sync, write_json
from draftline.export.layout import same_bits
from draftline.export.provenance import (
    PROVENANCE_NAME,
    Provenance,
    is_own_export,
    provenance_tree,
    read_provenance,
    with_reports,
)
from draftline.export.reference import ARCHITECTURE, read_reference, read_reference_spec, write_reference
from draftline.export.replace import replace_folder
from draftline.export.speculators import read_speculators, read_speculators_spec, write_speculators
from draftline.records import DrafterSpec, EvalReport

CARD_NAME = "README.md"
Format = Literal["reference", "speculators"]
Compare = Callable[[DrafterSpec, dict[str, Tensor]], float]


@dataclass(frozen=True, slots=True)
class Export:
    """A drafter ready to be published. `tensors` as its format wants them: speculators adds the embedding and head."""

    spec: DrafterSpec
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    format: Format
    provenance: Provenance
    engine_notes: tuple[str, ...] = ()  # where engines are known to run this drafter otherwise than it was trained


def detect_format(folder: Path) -> Format:
    """Which format a drafter folder is in, by its config.json. Raises InputError when it is none draftline reads."""
    config = read_json(folder / "config.json")
    if config.tree.get("speculators_model_type") == "dflash":
        return "speculators"
    if config.tree.get("architectures") == [ARCHITECTURE]:
        return "reference"
    raise InputError(
        f"{config.where}: not a DFlash drafter: architectures is {config.tree.get('architectures')!r}",
        f"a reference folder has architectures [{ARCHITECTURE!r}], a speculators one speculators_model_type 'dflash'",
    )


def read_drafter(folder: Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """Read a drafter folder of either format strictly (see `read_reference`, `read_speculators`)."""
    return read_speculators(folder) if detect_format(folder) == "speculators" else read_reference(folder)


def read_spec(folder: Path) -> DrafterSpec:
    """A drafter's geometry from its config.json alone, of either format."""
    config = read_json(folder / "config.json")
    return read_speculators_spec(config) if detect_format(folder) == "speculators" else read_reference_spec(config)


def publish(folder: Path, export: Export, compare: Compare, tolerance: float = 0.0) -> None:
    """Write an export beside its place, read it back strictly, compare it, and rename it into place.

    Every tensor must read back bit for bit. compare(spec, tensors): the largest absolute logit difference between the
    reloaded and the live drafter. It must be at most `tolerance`, which is 0 unless the export's dtype is coarser than
    the live drafter's.
    An earlier draftline export at `folder` is replaced; any other content is refused before anything is written.
    Raises InputError, or RunError when the disk refuses or the reloaded drafter differs; then nothing is left behind.
    """
    folder = folder.resolve()
    check_place(folder)
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            write_export(fresh, export)
            verify(fresh, export, compare, tolerance)
            sync_tree(fresh)
            fresh.chmod(0o777 & ~current_umask())  # mkdtemp makes private folders; servers run as other users
            replace_folder(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # after a replacement it holds the earlier export


def check_place(folder: Path) -> None:
    if not folder.exists():
        return
    if folder.is_dir() and (not any(folder.iterdir()) or is_own_export(folder)):
        return
    raise InputError(
        f"export folder {folder} exists and is not an earlier draftline export (no {PROVENANCE_NAME})",
        "choose another folder, or move this one away",
    )


def write_export(folder: Path, export: Export) -> None:
    if export.format == "speculators":
        write_speculators(folder, export.spec, export.tensors, export.dtype, export.provenance.target_name)
    else:
        write_reference(folder, export.spec, export.tensors, export.dtype)
    tree = provenance_tree(export.spec, export.provenance, export.format) | {"engine_notes": [*export.engine_notes]}
    write_json(folder / PROVENANCE_NAME, tree)
    (folder / CARD_NAME).write_text(model_card(tree), encoding="utf-8")


def verify(folder: Path, export: Export, compare: Compare, tolerance: float) -> None:
    spec, tensors = read_drafter(folder)
    wanted = as_exported(export.spec)
    if spec != wanted:
        raise RunError(f"the exported config reads back as another drafter: {spec} instead of {wanted}")
    for name, written in export.tensors.items():
        if not same_bits(tensors[name], written.detach().to(export.dtype).cpu()):
            raise RunError(f"the exported {name} reads back with other bits than were written; nothing was published")
    difference = compare(spec, tensors)
    if not difference <= tolerance:  # also catches nan
        raise RunError(
            f"the exported drafter's logits differ from the live one's by {difference:g}, allowed {tolerance:g}; "
            "nothing was published"
        )


def record_tau(folder: Path, reports: Sequence[EvalReport]) -> None:
    """Put measured acceptance into draftline.json and the card of a published export, each replaced atomically.

    The reports replace those recorded before. Raises InputError when the folder is not a draftline export.
    """
    tree = with_reports(read_provenance(folder).tree, reports)
    with disk_errors(folder):
        replace_text(folder / PROVENANCE_NAME, as_text(tree))
        replace_text(folder / CARD_NAME, model_card(tree))


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A full or read-only disk ends the run with one line that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"export to {folder} failed, nothing there was changed: {error}") from error


def sync_tree(folder: Path) -> None:
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
