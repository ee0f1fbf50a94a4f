"""What a recipe leaves open is derived from the target: taps, sizes, RoPE, mask token. Every choice is reported."""

from __future__ import annotations

from typing import Any

from draftline.config import DrafterSection
from draftline.errors import InputError
from draftline.records import DrafterSpec
from draftline.target.load import Target

KNOWN_MASK_IDS = {"qwen3": 151669, "qwen3_moe": 151669, "qwen3_5": 248070, "qwen3_5_text": 248070}  # SPEC 2

NORM_EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon")
FFN_RATIO = 3  # of the hidden size, where the target states no single FFN size of its own (experts only): as Qwen3-8B
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")  # fixed frequencies, the same in every engine
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")


def derive_spec(section: DrafterSection, target: Target) -> DrafterSpec:
    """The drafter's full geometry from its recipe section and its target. Raises InputError on what cannot fit."""
    config, parts = target.parts.config, target.parts
    refuse_without_keys(config)
    rope = full_attention_rope(config)
    if section.hidden_size not in (None, parts.hidden_size):
        raise InputError(
            f"drafter.hidden_size {section.hidden_size} differs from the target's {parts.hidden_size}",
            "a drafter borrows its target's embedding and head, so it is as wide: leave hidden_size out",
        )
    heads = section.attention_heads or config.num_attention_heads
    kv_heads = section.key_value_heads or stated(config, "num_key_value_heads") or config.num_attention_heads
    if heads % kv_heads:
        raise InputError(f"drafter.attention_heads {heads} must be a multiple of drafter.key_value_heads {kv_heads}")
    depth = len(parts.layers)
    kinds = tuple(
        "sliding_attention" if i in section.sliding_layers else "full_attention" for i in range(section.layers)
    )
    return DrafterSpec(
        hidden_size=parts.hidden_size,
        intermediate_size=section.intermediate_size or intermediate_size(config),
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=rotated_head_dim(section.head_dim or target_head_dim(config), rope),
        vocab_size=parts.vocab_size,
        block_size=section.block_size,
        mask_token_id=choose_mask_id(section.mask_token_id, target),
        target_layer_ids=checked_taps(section.taps, depth) if section.taps else default_taps(depth, section.tap_count),
        num_target_layers=depth,
        rms_norm_eps=stated(config, *NORM_EPS_KEYS),
        rope_parameters=rope,
        max_position_embeddings=config.max_position_embeddings,
        layer_types=kinds,
        sliding_window=section.sliding_window,
        is_causal=section.is_causal,
        bos_token_id=stated(config, "bos_token_id"),
        eos_token_id=stated(config, "eos_token_id"),
        pad_token_id=stated(config, "pad_token_id"),
    )


def default_taps(depth: int, count: int) -> tuple[int, ...]:
    """l_i = round(1 + i (n-4)/(K-1)); n//2 for K = 1 (SPEC 1). A target too shallow for K distinct taps gets fewer."""
    count = min(count, max(depth - 3, 1))
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


def checked_taps(taps: tuple[int, ...], depth: int) -> tuple[int, ...]:
    if not 0 <= taps[0] <= taps[-1] < depth:
        raise InputError(
            f"drafter.taps {list(taps)}: the target has layers 0..{depth - 1}",
            "taps are 0-based decoder layers (vLLM and speculators files hold them plus one)",
        )
    return taps


def stated(config: Any, *names: str) -> Any:
    """The first of these keys that the config has with a value, or None."""
    values = (getattr(config, name) for name in names if hasattr(config, name))
    return next((value for value in values if value is not None), None)


def refuse_without_keys(config: Any) -> None:
    """What a drafter's geometry needs of its target; GPT-2, say, has no RoPE."""
    needed = (("num_attention_heads",), ("rope_parameters",), ("max_position_embeddings",), NORM_EPS_KEYS)
    missing = [" or ".join(keys) for keys in needed if stated(config, *keys) is None]
    if missing:
        raise InputError(
            f"target family {config.model_type}: its config has no {', no '.join(missing)}",
            "the drafter takes these from its target: a family without them is not supported",
        )


def intermediate_size(config: Any) -> int:
    size = stated(config, "intermediate_size")
    return size if isinstance(size, int) else FFN_RATIO * int(config.hidden_size)


def rotated_head_dim(head_dim: int, rope: dict[str, Any]) -> int:
    """head_dim, if RoPE can turn its dimensions in pairs."""
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if rotary < 2 or rotary % 2:
        raise InputError(
            f"drafter.head_dim {head_dim}: RoPE turns {rotary} of its dimensions, and must turn pairs",
            "give an even one",
        )
    return head_dim


def target_head_dim(config: Any) -> int:
    explicit = config.to_dict().get("head_dim")
    return explicit or config.hidden_size // config.num_attention_heads


def full_attention_rope(config: Any) -> dict[str, Any]:
    """RoPE of the target's full-attention layers: type, base, scaling and partial factor, from `rope_parameters`.

    What places images is left out: over text its position streams are equal, and turn as one.
    """
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    if "rope_theta" not in parameters:
        raise InputError(
            f"target family {config.model_type}: rope_parameters {parameters} has no rope_theta for full attention",
            "targets without RoPE in full-attention layers are not supported",
        )
    if parameters["rope_type"] not in ROPE_TYPES:
        raise InputError(
            f"target family {config.model_type}: RoPE type {parameters['rope_type']!r}",
            f"supported are {', '.join(ROPE_TYPES)}; dynamic and longrope change their frequencies with the length of "
            "a text, and engines disagree about when",
        )
    return {key: value for key, value in parameters.items() if key not in IMAGE_ROPE_KEYS and value is not None}


def choose_mask_id(wanted: int | None, target: Target) -> int:
    """A token of the target's vocabulary that no text uses, with an embedding row (SPEC 2).

    A wanted id is checked. Otherwise: the known id of the family, a padding row above the tokenizer's ids, or an
    unused special token, the last one first. Raises InputError saying which ids are free where none fits.
    """
    rows, free = target.parts.vocab_size, free_ids(target)
    if wanted is not None:
        if wanted >= rows:
            raise InputError(
                f"drafter.mask_token_id {wanted} has no embedding row: the target has {rows}",
                f"free ids: {shown(free)}",
            )
        if wanted not in free:
            raise InputError(
                f"drafter.mask_token_id {wanted} is {target.tokenizer.convert_ids_to_tokens(wanted)!r}: it is ordinary "
                "text, pad, bos, eos or part of the chat template",
                f"free ids: {shown(free)}",
            )
        return wanted
    known = KNOWN_MASK_IDS.get(target.parts.config.model_type)
    if known in free:
        return known
    if not free:
        raise InputError(
            "no token of the target is free to be the mask token",
            "add an unused special token to the tokenizer, with a row in the embedding, and give its id as "
            "drafter.mask_token_id",
        )
    return free[0]


def free_ids(target: Target) -> list[int]:
    """Usable mask ids, best first: padding rows in ascending order, then unused special tokens in descending order."""
    tokenizer, rows = target.tokenizer, target.parts.vocab_size
    vocabulary = set(tokenizer.get_vocab().values())
    config = target.parts.config
    eos = stated(config, "eos_token_id")
    taken = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    taken |= {stated(config, "pad_token_id"), stated(config, "bos_token_id")} | target.stop_ids
    taken |= set(eos) if isinstance(eos, list) else {eos}
    padding = [i for i in range(max(vocabulary) + 1, rows) if i not in taken]
    template = str(tokenizer.chat_template)
    special = [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i not in taken and token.content not in template and i < rows
    ]
    return padding + sorted(special, reverse=True)


def shown(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "") if ids else "none"
