"""What one row of a training step costs, counted: useful FLOP by part, and the bytes that must pass through memory."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.records import DrafterSpec

# logits that the CUDA step holds at once, and at most as many of the target's where they are compared
CHUNK_LOGITS = 160 * 1024 * 1024
PLAIN_CHUNK_LOGITS = 128 * 1024 * 1024  # the plain loss


def whole_chunks(blocks: int, limit: int) -> int:
    """Largest divisor of `blocks` up to `limit`: all chunks alike."""
    return next(size for size in range(min(limit, blocks), 0, -1) if blocks % size == 0)


@dataclass(frozen=True)
class RowWork:
    """What a packed row gives a step to do, as a mean over the rows of a batch."""

    tokens: int  # S
    anchors: int  # A
    mean_context: float  # context positions that a slot sees in full layers
    supervised: float  # slots that carry weight, A (B-1) at most: the head is multiplied with no others
    compared: float  # positions whose target logits they are compared with, each counted once; 0 for ce


@dataclass(frozen=True)
class StepCost:
    """FLOP of one packed row. The head is frozen: forward and input gradient only."""

    body: float  # the layers' products over block slots
    context: float  # keys and values of the context, and fc
    attention: float
    head: float
    teacher: float  # the target's head on its own states, for losses that compare distributions

    @property
    def total(self) -> float:
        return self.body + self.context + self.attention + self.head + self.teacher


def step_cost(spec: DrafterSpec, work: RowWork) -> StepCost:
    """body 6 P_q A B, context (6 P_c + 4 P_fc) S, attention 14 Hq (seen + B) A B a layer, head 4 V d a supervised slot,
    teacher 2 V d a compared position, with P_q = L (2 d Hq + 2 d Hkv + 3 d f), P_c = 2 L d Hkv, P_fc = K d^2.
    Attention's backward is counted as 2.5 forwards."""
    d, layers, size = spec.hidden_size, spec.num_hidden_layers, spec.block_size
    hq, hkv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    slots = work.anchors * size
    seen = [min(work.mean_context, spec.window(i) or work.mean_context) + size for i in range(layers)]
    return StepCost(
        body=6.0 * layers * (2 * d * hq + 2 * d * hkv + 3 * d * spec.intermediate_size) * slots,
        context=(12.0 * layers * d * hkv + 4.0 * len(spec.target_layer_ids) * d * d) * work.tokens,
        attention=14.0 * hq * sum(seen) * slots,
        head=4.0 * spec.vocab_size * d * work.supervised,
        teacher=2.0 * spec.vocab_size * d * work.compared,
    )


def fp8_flop(spec: DrafterSpec, tokens: int, anchors: int) -> float:
    """FLOP of one packed row that `train.products: fp8` takes to FP8: the layers' forward and input gradients,
    4 P_q A B + 4 P_c S of `step_cost`."""
    d, layers = spec.hidden_size, spec.num_hidden_layers
    hq, hkv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    body = layers * (2 * d * hq + 2 * d * hkv + 3 * d * spec.intermediate_size) * anchors * spec.block_size
    return 4.0 * (body + 2 * layers * d * hkv * tokens)


def fp8_bytes(spec: DrafterSpec, tokens: int, anchors: int) -> float:
    """Bytes of one packed row that FP8 products move more than bf16 ones: every operand read once and written as one
    byte (forward: 2 d + Hq + f a slot, backward: 2 d + Hq + 2 Hkv + 2 f), and three sums added in passes of their own,
    two a slot and one a context position."""
    d, layers, f = spec.hidden_size, spec.num_hidden_layers, spec.intermediate_size
    hq, hkv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    slot = 3 * (4 * d + 2 * hq + 2 * hkv + 3 * f) + 6 * 2 * d
    position = 3 * (d + 2 * hkv) + 6 * d
    return float(layers * (slot * anchors * spec.block_size + position * tokens))


def step_bytes(spec: DrafterSpec, work: RowWork, item: int) -> float:
    """Bytes read and written by one row's forward and backward if every tensor between two products passes once.

    A layer's forward moves 10 d + 6 Hq + 4 Hkv + 6 f values a slot; its backward two and a half times that. A logit is
    written, read, overwritten by its gradient and read; one of the target's is written, read for its statistics and
    once more for each slot that it is compared with. `item`: bytes of a value. Weights are read by three products and
    their fp32 gradient read and written.
    """
    d, layers = spec.hidden_size, spec.num_hidden_layers
    hq, hkv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    slots = work.anchors * spec.block_size
    values = 3.5 * layers * (10 * d + 6 * hq + 4 * hkv + 6 * spec.intermediate_size) * slots
    values += (len(spec.target_layer_ids) + 12) * d * work.tokens
    logits = spec.vocab_size * (work.supervised * (5 if work.compared else 4) + 2 * work.compared)
    weights = layers * (2 * d * hq + 2 * d * hkv + 3 * d * spec.intermediate_size) + len(spec.target_layer_ids) * d * d
    return item * (values + logits) + weights * (3 * item + 8) + 2 * item * spec.vocab_size * d
