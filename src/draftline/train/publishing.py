"""From a checkpoint to a served folder: export, strict reload, logits compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.config import TargetSection
from draftline.drafter.anchors import Blocks
from draftline.drafter.attention import DenseAttention
from draftline.drafter.model import holding
from draftline.export.folder import Export, publish
from draftline.export.layout import drafter_shapes
from draftline.export.provenance import Provenance
from draftline.monitor.notices import Notices, stderr_console
from draftline.records import DrafterSpec, Head
from draftline.target.load import Target, load_target
from draftline.train.checkpoint import Checkpoint, open_checkpoint

ENGINE_REMEDY = "the text is not affected; measure tau with the engine that will serve"


def export_command(checkpoint_folder: Path, out: Path, format: str) -> None:
    """`draftline export`: the target is loaded again, from where the checkpoint's recipe says it lies."""
    checkpoint = open_checkpoint(checkpoint_folder)
    section = TargetSection(**checkpoint.state["recipe"]["target"])
    export_checkpoint(checkpoint, out, format, load_target(section, torch.device("cpu")))
    print(f"wrote {out}: reloads to the same logits")


def export_checkpoint(checkpoint: Checkpoint, out: Path, format: Any, target: Target) -> None:
    """Write the drafter in its target's dtype; published only if the reloaded folder gives the same logits.

    Raises InputError where `out` holds something else, RunError where the reloaded drafter differs.
    """
    provenance = Provenance(**checkpoint.state["provenance"])
    for note in publish_drafter(checkpoint.spec, checkpoint.drafter_tensors(), provenance, out, format, target):
        Notices(stderr_console()).warn("engines run this drafter otherwise", note, ENGINE_REMEDY)


def publish_drafter(
    spec: DrafterSpec, masters: dict[str, Tensor], provenance: Provenance, out: Path, format: Any, target: Target
) -> tuple[str, ...]:
    """As `export_checkpoint`, from a drafter's float32 masters, wherever they lie. Returns its engine notes, unsaid."""
    dtype, head = target.dtype, target.parts.head
    tensors = {name: value.detach().to(dtype).cpu() for name, value in masters.items()}
    live = probe_logits(spec, tensors, head)
    if format == "speculators":
        tensors = tensors | {
            "embed_tokens.weight": embedding_table(target).cpu(),
            "lm_head.weight": head.weight.cpu(),
        }

    def compare(spec: DrafterSpec, reloaded: dict[str, Tensor]) -> float:
        return float((live - probe_logits(spec, reloaded, head)).abs().max())

    notes = engine_notes(target, format)
    publish(out, Export(spec, tensors, dtype, format, provenance, notes), compare)
    return notes


def engine_notes(target: Target, format: str) -> tuple[str, ...]:
    """Where vLLM is known to run a drafter of this target otherwise than it was trained: lower tau, the same text.

    Read in vLLM 0.32: its DFlash model looks slots up in the target's embedding table, unscaled, unless the folder
    brings a table of its own (speculators), and multiplies with the head's matrix alone. A scale or soft-cap on the
    logits moves no greedy draft.
    """
    table = target.parts.embedding.weight
    ids = torch.arange(min(16, len(table)), device=table.device)
    found = []
    if format == "reference" and not torch.equal(target.embed(ids), table[ids]):
        found.append(
            "the target scales its embedding; vLLM gives the drafter unscaled rows of it, and tau is much lower there "
            "than measured here. export.format=speculators brings a scaled table"
        )
    if target.parts.head.bias is not None:
        found.append("the target's head has a bias; vLLM leaves it out of the drafter's logits, so tau is lower there")
    return tuple(found)


def embedding_table(target: Target) -> Tensor:
    """[V, d] as the drafter was trained on it, scaled where the target scales: an engine looks rows up and no more."""
    return target.embed(torch.arange(target.parts.vocab_size, device=target.device))


@torch.no_grad()
def probe_logits(spec: DrafterSpec, tensors: Mapping[str, Tensor], head: Head) -> Tensor:
    """Logits [2, B-1, V] of two blocks on seeded random features: every tensor of the drafter takes part.

    In the tensors' own dtype, as they are served: a float32 copy of a billion parameters takes longer than all the
    rest. What that rounds away shows in the tensors' bits, which `publish` compares one by one.
    """
    drafter = holding(spec, {name: tensors[name] for name in drafter_shapes(spec)})
    dtype = drafter.fc.weight.dtype
    generator = torch.Generator().manual_seed(0)
    context, anchors = 24, torch.tensor([[9, 20]])
    taps = torch.randn(1, context, len(spec.target_layer_ids) * spec.hidden_size, generator=generator).to(dtype)
    embeds = torch.randn(1, 2 * spec.block_size, spec.hidden_size, generator=generator).to(dtype)
    blocks = Blocks(anchors, torch.zeros_like(anchors), torch.ones_like(anchors, dtype=torch.bool))
    position = (anchors[..., None] + torch.arange(spec.block_size)).flatten(1)
    states = drafter(
        embeds, position, drafter.context(taps), torch.arange(context)[None], DenseAttention(spec, blocks, context)
    )
    return head.logits(states.unflatten(1, (2, -1))[0, :, 1:].to(head.weight)).float()
