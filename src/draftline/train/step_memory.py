"""The memory that a rank's step takes, counted from sizes alone: what `--plan` shows before anything is loaded, what
the preflight holds against the device, what an out-of-memory error was predicted to need. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftline.drafter.cost import CHUNK_LOGITS, PLAIN_CHUNK_LOGITS, whole_chunks
from draftline.records import DrafterSpec

FP32 = 4
CAPTURE_TOKENS = 16384  # of one target forward, at most
CAPTURE_STATES = 8  # states of width d, and
CAPTURE_FFN = 4  # of the FFN's width, alive at once in one layer of the target's forward


@dataclass(frozen=True)
class Sizes:
    """R rows of S tokens, N blocks of B slots a row, e bytes an element of the compute dtype."""

    drafter: DrafterSpec
    rows: int
    length: int
    anchors: int
    item_bytes: int
    on_cuda: bool
    compares: bool  # whether the loss needs the target's final states
    target_ffn: int
    spread: int = 1  # drafter ranks that masters and moments are spread over
    fp8: bool = False  # the layers' products

    @property
    def slots(self) -> int:
        return self.rows * self.anchors * self.drafter.block_size

    @property
    def heads_width(self) -> int:
        return self.drafter.num_attention_heads * self.drafter.head_dim

    @property
    def kv_width(self) -> int:
        return self.drafter.num_key_value_heads * self.drafter.head_dim

    @property
    def states(self) -> int:
        """Of the target at each position: taps, and the final one where the loss compares."""
        return len(self.drafter.target_layer_ids) + self.compares

    @property
    def matrix_numbers(self) -> int:
        """L (2 d Hq + 2 d Hkv + 3 d f) + K d^2."""
        spec, d = self.drafter, self.drafter.hidden_size
        layer = 2 * d * self.heads_width + 2 * d * self.kv_width + 3 * d * spec.intermediate_size
        return spec.num_hidden_layers * layer + len(spec.target_layer_ids) * d * d

    @property
    def vector_numbers(self) -> int:
        """Norms, and biases where attention has them."""
        spec, d = self.drafter, self.drafter.hidden_size
        biases = self.heads_width + 2 * self.kv_width + d if spec.attention_bias else 0
        return spec.num_hidden_layers * (2 * d + 2 * spec.head_dim + biases) + 2 * d

    @property
    def parameters(self) -> int:
        return self.matrix_numbers + self.vector_numbers


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device that come on top of the weights (target, masters, working copies) and of kept features."""

    gradients: int
    moments: int
    features: int
    activations: int
    logits: int
    capture: int

    @property
    def peak(self) -> int:
        """Capture runs between steps, when activations and logits are gone; everything else stays."""
        return self.gradients + self.moments + self.features + max(self.activations + self.logits, self.capture)


def weights_bytes(sizes: Sizes) -> int:
    """fp32 masters, this rank's part of the matrices' where they are spread, and the copy that products use. A CPU's
    step multiplies by the masters themselves; where they are spread, it and a float32 step hold the whole copy alone.
    FP8 products have two bytes a weight in place of a bf16 copy, and beside the one that spread masters need."""
    copy = sizes.item_bytes if sizes.on_cuda else 0
    masters = FP32 * sizes.matrix_numbers
    if sizes.spread > 1:
        copy = copy or FP32
        masters = 0 if copy == FP32 else -(-masters // sizes.spread)
        copy += 2 if sizes.fp8 else 0
    return masters + copy * sizes.matrix_numbers + FP32 * sizes.vector_numbers


def footprint(sizes: Sizes) -> Footprint:
    """With P trained parameters (M in matrices), K taps, hidden d, f the target's FFN:

    gradients 4 P, and 4 M / n of the sum where masters are spread over n ranks; moments 8 P, the matrices' spread.
    features R S (K [+1 with final states]) d e, twice: one batch is captured ahead. activations: see `layer_bytes`;
    logits: see `logits_bytes`; capture: (8 d + 4 f) e for each of the tokens of one target forward.
    """
    spec, size, own = sizes.drafter, sizes.item_bytes, -(-sizes.matrix_numbers // sizes.spread)
    positions = sizes.rows * sizes.length
    state = CAPTURE_STATES * spec.hidden_size + CAPTURE_FFN * sizes.target_ffn + sizes.states * spec.hidden_size
    return Footprint(
        gradients=FP32 * (sizes.parameters + (own if sizes.spread > 1 else 0)),
        moments=2 * FP32 * (own + sizes.vector_numbers),
        features=2 * positions * sizes.states * spec.hidden_size * size,
        activations=spec.num_hidden_layers * layer_bytes(sizes) + 6 * positions * spec.hidden_size * FP32,
        logits=logits_bytes(sizes),
        capture=min(CAPTURE_TOKENS, positions) * size * state,
    )


def layer_bytes(sizes: Sizes) -> int:
    """Kept by one layer for its backward. On CUDA what `drafter/fused.py` keeps: of each of the Q = N B block slots a
    row two states of width d, two of the FFN's width, queries and their output, keys and values; of each context
    position keys and values.

    The plain model (CPU) keeps under autograd six states of width d, three of the FFN's, queries and keys three times,
    the fp32 steps of norms and rotations, and its attention's weights over [context ; block], three copies of them.
    """
    spec, size, heads, kv_heads = sizes.drafter, sizes.item_bytes, sizes.heads_width, sizes.kv_width
    per_slot = size * 2 * (spec.hidden_size + spec.intermediate_size + heads + kv_heads)
    per_position = size * 2 * kv_heads
    if not sizes.on_cuda:
        per_slot = size * (6 * spec.hidden_size + 3 * spec.intermediate_size + 3 * (heads + kv_heads))
        per_slot += FP32 * (4 * spec.hidden_size + 3 * (heads + kv_heads))
        per_slot += FP32 * 3 * spec.num_attention_heads * (sizes.length + spec.block_size)
        per_position = (size + FP32) * 3 * 2 * kv_heads
    return sizes.slots * per_slot + sizes.rows * sizes.length * per_position


def logits_bytes(sizes: Sizes) -> int:
    """On CUDA one chunk of logits, which become their gradient, as many of a teacher's, and the head's input with its
    gradient.

    The plain loss (CPU) has a chunk's logits and their gradient in the compute dtype, and of log-probabilities,
    probabilities and gradient in fp32 as many as the loss has: three, or six beside a teacher's; and hidden states with
    their gradient."""
    spec, item, blocks = sizes.drafter, sizes.item_bytes, sizes.rows * sizes.anchors
    slots = spec.block_size - 1
    if sizes.on_cuda:
        held = min(CHUNK_LOGITS, blocks * slots * spec.vocab_size) * (1 + sizes.compares)
        return item * (held + 2 * sizes.slots * spec.hidden_size)
    chunk = whole_chunks(blocks, max(1, PLAIN_CHUNK_LOGITS // (slots * spec.vocab_size)))
    each = (2 * item + 3 * FP32) * (1 + sizes.compares)
    return chunk * slots * spec.vocab_size * each + 4 * blocks * slots * spec.hidden_size * item
