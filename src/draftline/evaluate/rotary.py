"""RoPE of drafter and target: the tables that each really turns its keys with, at several positions."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from draftline.drafter.model import Drafter
from draftline.errors import InputError
from draftline.target.derive import full_attention_rope
from draftline.target.load import Target

POSITIONS = (0, 1, 2, 17, 101, 500, 1001, 2047, 4095)  # those the target reaches are compared
TABLE_TOLERANCE = 2e-3  # float32 angles of some thousand radians are exact to 1e-4 to 1e-3
# cos and sin of a bfloat16 target are rounded to it
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def prove_rope(drafter: Drafter, target: Target) -> str:
    """The drafter's parameters are the target's, and so are its cos and sin, from the target's own rotary module.

    Where head sizes differ, or the target has no such module, the parameters alone are compared.
    """
    expected = {key: value for key, value in full_attention_rope(target.parts.config).items() if value is not None}
    found = {key: value for key, value in drafter.spec.rope_parameters.items() if value is not None}
    if found != expected:
        raise InputError(
            f"expected the target's RoPE {expected}, found {found} in the drafter",
            "likely a default base, scaling or partial factor instead of the target's own, which its config holds in "
            "rope_parameters",
        )
    stated = f"base {expected['rope_theta']:g}, {expected['rope_type']}"
    own = own_tables(target) if target.has_layers else None
    if own is None:
        return f"{stated}; by its parameters, for there is no rotary module to ask"
    return f"{stated}, {compare(drafter, target, own)}"


def compare(drafter: Drafter, target: Target, own: tuple[Tensor, Tensor]) -> str:
    position = torch.tensor([positions(target)], device=target.device)
    with torch.no_grad():
        mine = [table[0, :, 0].float().cpu() for table in drafter.rope(position)]  # [P, rotary]
    half = mine[0].shape[-1] // 2
    theirs = [half_table(table) for table in own]
    if theirs[0].shape[-1] != half:
        own_size = head_size(target)
        if own_size != drafter.spec.head_dim:
            return f"{2 * half} of {drafter.spec.head_dim} dimensions turned; other head sizes than the target's"
        raise InputError(
            f"expected {2 * theirs[0].shape[-1]} of {own_size} dimensions turned, as the target does, found {2 * half}",
            "likely a partial rotary factor that one of the two ignores",
        )
    error = max(float((a[:, :half] - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
    limit = TABLE_TOLERANCE + ROUNDING[target.dtype]
    if not error <= limit:
        raise InputError(
            f"expected the cos and sin of the target's own rotary module within {limit:g}, found a difference of "
            f"{error:.2g}",
            "likely another base, scaling or attention factor than the target really uses",
        )
    return f"{2 * half} dimensions, cos and sin differ by {error:.1e} up to position {int(position.max())}"


def positions(target: Target) -> list[int]:
    """Within the length that the target was first trained for: some kinds of RoPE change their tables beyond."""
    config = target.parts.config
    limit = full_attention_rope(config).get("original_max_position_embeddings") or config.max_position_embeddings
    return [position for position in POSITIONS if position < int(limit)]


def own_tables(target: Target) -> tuple[Tensor, Tensor] | None:
    """cos and sin [P, ...] of the target's rotary module for full attention, float32 on the host; None without one."""
    modules = [m for m in target.parts.decoder.modules() if "inv_freq" in dict(m.named_buffers()) or is_rotary(m)]
    rotary = next((m for m in modules if is_rotary(m)), None)
    if rotary is None:
        return None
    position = torch.tensor([positions(target)], device=target.device)
    position = position.expand(*grids(target, rotary), *position.shape)
    by_type = "layer_type" in signature(rotary.forward).parameters
    states = torch.zeros(1, 1, 1, device=target.device, dtype=target.dtype)
    with torch.no_grad():
        tables = rotary(states, position, *(["full_attention"] if by_type else []))
    cos, sin = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables  # Llama 4 turns complex numbers
    while cos.dim() > 2:
        cos, sin = cos[0], sin[0]
    return cos.float().cpu(), sin.float().cpu()


@torch.no_grad()
def grids(target: Target, rotary: nn.Module) -> tuple[int, ...]:
    """Dimensions of the positions before [R, S], as the decoder itself hands them to its rotary module: 3 where time,
    height and width count apart, which for text are alike."""
    seen = list[Tensor]()

    def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

    handle = rotary.register_forward_pre_hook(given, with_kwargs=True)
    try:
        target.parts.decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=target.device), use_cache=False)
    finally:
        handle.remove()
    return tuple(seen[0].shape[:-2]) if seen else ()


def is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding") and "position_ids" in signature(module.forward).parameters


def half_table(table: Tensor) -> Tensor:
    """[P, rotary/2], one value a frequency, whether the table repeats them in halves, in pairs, or not at all."""
    size = table.shape[-1]
    first, second = table[:, : size // 2], table[:, size // 2 :]
    if size % 2 == 0 and torch.equal(first, second):
        return first
    if size % 2 == 0 and torch.equal(table[:, ::2], table[:, 1::2]):
        return table[:, ::2]
    return table


def head_size(target: Target) -> int:
    config: Any = target.parts.config
    return int(config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads)
