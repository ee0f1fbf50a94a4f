"""Block attention as Triton kernels: every query row carries its own range of context, and sees its own block.

The context part is causal attention whose limit rises with the anchors instead of the rows, so all key tiles of a query
tile but the edges are seen in full and need no mask. The block part is one small dense tile. Both are in one kernel and
share one softmax. Backward: `query_kernel` gives dq, `context_kernel` dk and dv of the context, `own_kernel` of blocks.

Shapes: q [R, Q, H, D] with Q = N*B slots, context keys [R, S, KV, D], block keys [R, Q, KV, D]. The heads of a group
lie in one tile of rows (`PACK` of them) where the group's size is a power of two: they share keys and limits. Any
Q and S, B and D as `tiling.py` has tiles for; all tensors may be slices of wider ones along the last two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftline.kernels.attention_backward import context_kernel, own_kernel, query_kernel
from draftline.kernels.attention_forward import forward_kernel
from draftline.kernels.launch import launch
from draftline.kernels.tiling import Geometry, Tilings
from draftline.kernels.visibility import Visible

LOG2_E = 1 / 0.6931471805599453


@dataclass(frozen=True)
class BlockAttention:
    """Attention of one kind of layer for one micro-batch: `forward` and `backward` on plain tensors, no autograd."""

    geometry: Geometry
    tiling: Tilings
    visible: Visible

    def forward(self, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor) -> Any:
        """(out [R, Q, H, D], log2-sum-exp float32 [R, H, Q])."""
        one, (rows, slots, heads, _) = self.tiling.forward, q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((rows, heads, slots), dtype=torch.float32, device=q.device)
        pack = self.geometry.pack(one.rows)
        tile_slots = self.geometry.slots(one.rows, pack)
        grid = (heads // pack, -(-slots // tile_slots), rows)
        launch(
            forward_kernel, grid,
            q, k_context, v_context, k_block, v_block, out, lse, self.visible.low, self.visible.high,
            self.visible.forward, slots, k_context.shape[1], *strides(q, k_context, v_context, k_block, v_block, out),
            self.scale * LOG2_E, H=heads, PACK=pack, ROWS=one.rows, SLOTS=tile_slots, BLOCK_N=one.keys,
            OWN=own_keys(tile_slots), num_warps=one.warps, num_stages=one.stages,
            GROUP=self.geometry.group, **self.constants(q), B=self.geometry.block_size, CAUSAL=self.geometry.causal,
        )  # fmt: skip
        return out, lse

    def backward(
        self, do: Tensor, q: Tensor, keys: tuple[Tensor, Tensor, Tensor, Tensor], out: Tensor, lse: Tensor,
        into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Writes dq, dk_context, dv_context, dk_block, dv_block `into` tensors shaped like their inputs.

        keys: k_context, v_context, k_block, v_block.
        """
        delta = torch.empty_like(lse)
        self.query_backward(do, q, keys, out, lse, delta, into[0])
        self.context_backward(do, q, keys, lse, delta, into[1], into[2])
        self.own_backward(do, q, keys, lse, delta, into[3], into[4])

    def query_backward(
        self, do: Tensor, q: Tensor, keys: tuple[Tensor, ...], out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor
    ) -> None:
        one, (rows, slots, heads, _) = self.tiling.query, q.shape
        pack = self.geometry.pack(one.rows)
        tile_slots = self.geometry.slots(one.rows, pack)
        launch(
            query_kernel, (heads // pack, -(-slots // tile_slots), rows),
            q, *keys, out, do, dq, lse, delta, self.visible.low, self.visible.high, self.visible.query, slots,
            keys[0].shape[1], *strides(q, *keys, out, do, dq), self.scale * LOG2_E, self.scale, H=heads, PACK=pack,
            ROWS=one.rows, SLOTS=tile_slots, BLOCK_N=one.keys, OWN=own_keys(tile_slots),
            num_warps=one.warps, num_stages=one.stages, GROUP=self.geometry.group, **self.constants(q),
            B=self.geometry.block_size, CAUSAL=self.geometry.causal,
        )  # fmt: skip

    def context_backward(
        self, do: Tensor, q: Tensor, keys: tuple[Tensor, ...], lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        one, (rows, slots, heads, _), length = self.tiling.context, q.shape, keys[0].shape[1]
        pack = self.geometry.pack(one.rows)
        launch(
            context_kernel, (self.geometry.kv_heads, -(-length // one.keys), rows),
            q, keys[0], keys[1], do, dk, dv, lse, delta, self.visible.low, self.visible.high, self.visible.context,
            slots, length, *strides(q, keys[0], keys[1], do, dk, dv), self.scale * LOG2_E, self.scale, H=heads,
            PACK=pack, ROWS=one.rows, SLOTS=self.geometry.slots(one.rows, pack), BLOCK_N=one.keys,
            num_warps=one.warps, num_stages=one.stages, GROUP=self.geometry.group, **self.constants(q),
        )  # fmt: skip

    def own_backward(
        self, do: Tensor, q: Tensor, keys: tuple[Tensor, ...], lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        one, (rows, slots, heads, _) = self.tiling.own, q.shape
        tile_slots = self.geometry.slots(one.rows, 1)
        launch(
            own_kernel, (self.geometry.kv_heads, -(-slots // tile_slots), rows),
            q, keys[2], keys[3], do, dk, dv, lse, delta, slots, *strides(q, keys[2], keys[3], do, dk, dv),
            self.scale * LOG2_E, self.scale, H=heads, ROWS=one.rows, SLOTS=tile_slots, num_warps=one.warps,
            num_stages=one.stages, GROUP=self.geometry.group, **self.constants(q), B=self.geometry.block_size,
            CAUSAL=self.geometry.causal,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return self.geometry.head_dim**-0.5

    def constants(self, q: Tensor) -> dict[str, Any]:
        size = self.geometry.head_dim
        return {
            "D": size,
            "BLOCK_D": max(16, triton.next_power_of_2(size)),
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }


def own_keys(slots: int) -> int:
    """Keys that a tile of so many slots reads beside the context: its own, and at least the 16 that a product takes.
    Those of other blocks are masked."""
    return max(16, triton.next_power_of_2(slots))


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Elements between positions. Heads and their dimensions must be dense, and rows follow each other."""
    for t in tensors:
        assert (
            t.stride(3) == 1 and t.stride(2) == t.shape[3] and (len(t) == 1 or t.stride(0) == t.stride(1) * t.shape[1])
        )
    return tuple(t.stride(1) for t in tensors)
