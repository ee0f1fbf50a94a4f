"""What a block can see, proven on the step that trains: change what must be invisible, and its states must stay (SPEC
3).

Each proof runs the step's own forward (fused on CUDA, with the training's shapes) and compares one block of every row,
the one with the shortest context: a single position weighs most there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from draftline.drafter.anchors import Blocks, sample_blocks
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.records import FeatureBatch


@dataclass(frozen=True)
class Sight:
    step: DrafterStep
    batch: FeatureBatch

    @cached_property
    def device(self) -> torch.device:
        return self.batch.taps.device

    @cached_property
    def blocks(self) -> Blocks:
        return sample_blocks(self.batch.packed, self.step.anchors, self.step.seed).to(self.device)

    @cached_property
    def ids(self) -> Tensor:
        return torch.from_numpy(self.batch.packed.ids).to(self.device)

    @cached_property
    def position(self) -> Tensor:
        return torch.from_numpy(self.batch.packed.position).to(self.device)

    @cached_property
    def probe(self) -> Tensor:
        """Number of the watched block in each row [R]: the kept one with the shortest context of two tokens or more."""
        context = self.blocks.anchor - self.blocks.start
        return context.masked_fill(~self.blocks.keep | (context < 2), 1 << 40).argmin(1)

    @cached_property
    def has_probe(self) -> Tensor:
        """bool [R]: False on a row of padding."""
        return self.blocks.keep.gather(1, self.probe[:, None]).squeeze(1)

    @cached_property
    def anchor(self) -> Tensor:
        return self.blocks.anchor.gather(1, self.probe[:, None])  # [R, 1]

    @cached_property
    def distance(self) -> Tensor:
        """int64 [R, S]: each position of a row, counted from the watched block's anchor."""
        return torch.arange(self.ids.shape[1], device=self.device)[None] - self.anchor

    @cached_property
    def same_document(self) -> Tensor:
        document = torch.from_numpy(self.batch.packed.document).to(self.device)
        return document == document.gather(1, self.anchor)

    def states(self, taps: Tensor, ids: Tensor) -> Tensor:
        """The watched blocks' states [R, B, d]."""
        hidden = self.step.hidden(taps, ids, self.position, self.blocks).detach()
        rows = torch.arange(len(hidden), device=self.device)
        return hidden[rows, self.probe][self.has_probe].float()

    @cached_property
    def before(self) -> Tensor:
        return self.states(self.batch.taps, self.ids)

    @cached_property
    def noise(self) -> float:
        """What two equal forwards differ by: 0 but for kernels that add up in no fixed order."""
        return float((self.states(self.batch.taps, self.ids) - self.before).abs().max())

    def without(self, where: Tensor) -> Tensor:
        """Changes of the watched states [R, B] when features at `where` [R, S] are negated and tokens there replaced.

        Only a watched block's own anchor keeps its token: it is the block's input.
        """
        taps = torch.where(where[..., None], -self.batch.taps, self.batch.taps)
        ids = torch.where(where & (self.distance != 0), (self.ids + 1) % self.step.drafter.spec.vocab_size, self.ids)
        return (self.states(taps, ids) - self.before).abs().amax(-1)

    def must_stay(self, where: Tensor, what: str, likely: str) -> str:
        change = float(self.without(where).max())
        if not change <= 2 * self.noise:
            raise InputError(
                f"expected a block's states to stay when {what} change, found a change of {change:.2g}",
                f"likely {likely}",
            )
        count = int(where.sum())
        return f"{count:,} positions changed, states {'bit-equal' if change == 0 else f'within {change:.1e}'}"

    def prove_context(self) -> str:
        """Features of the token before the anchor reach every slot (in a window of W the first W-1, SPEC 3)."""
        spec = self.step.drafter.spec
        reach = min([spec.block_size, *(window - 1 for window in self.windows())])
        slots = self.without((self.distance == -1) & self.same_document)[:, : max(reach, 0)]
        blind = (slots <= 2 * self.noise).nonzero().tolist()
        if blind:
            raise InputError(
                f"expected slot {blind[0][1]} to see the token before its anchor, found its states unchanged",
                "likely context features that are cut one token short, or not used at all",
            )
        smallest = float(slots.min()) if slots.numel() else 0.0
        return f"the token before the anchor moves the first {reach} slots, by {smallest:.1e} or more"

    def windows(self) -> list[int]:
        """The windows of the layers, if all have one; a full layer shows every slot the whole context."""
        spec = self.step.drafter.spec
        found = [spec.window(layer) for layer in range(spec.num_hidden_layers)]
        return [] if None in found else [window for window in found if window is not None]

    def prove_anchor_state(self) -> str:
        where = (self.distance == 0) & self.same_document
        return self.must_stay(where, "the target's states at its anchor", "context p <= a instead of p < a")

    def prove_own_answers(self) -> str:
        """Features and tokens behind the anchor: those the block predicts, and all that follow in the document."""
        where = (self.distance > 0) & self.same_document
        return self.must_stay(
            where, "the tokens that it predicts", "answers fed to the block instead of mask tokens, or context past a"
        )

    def prove_other_documents(self) -> str:
        where = ~self.same_document
        return self.must_stay(
            where, "other documents of its row", "a context that does not begin with the anchor's own document"
        )

    def prove_other_blocks(self) -> str:
        """Anchors of all other blocks, where they are not the watched one's own context features, which stay."""
        others = torch.zeros_like(self.ids, dtype=torch.bool).scatter(1, self.blocks.anchor, self.blocks.keep)
        others &= self.distance != 0
        ids = torch.where(others, (self.ids + 1) % self.step.drafter.spec.vocab_size, self.ids)
        change = float((self.states(self.batch.taps, ids) - self.before).abs().max())
        if not change <= 2 * self.noise:
            raise InputError(
                f"expected a block's states to stay when other blocks' anchors change, found a change of {change:.2g}",
                "likely attention across blocks: block 2 then reads block 1's anchor, which is its answer",
            )
        count = int(np.asarray(others.sum().cpu()))
        return f"{count:,} anchors changed, states {'bit-equal' if change == 0 else f'within {change:.1e}'}"
