"""What a run will need, predicted from counted tensors: memory at its peak, and disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from draftline.drafter.head_rows import chunk_rows
from draftline.drafter.losses import CHUNK_LOGITS, whole_chunks
from draftline.environment.memory import free_memory_bytes
from draftline.errors import InputError
from draftline.train.folder import RunFolder
from draftline.train.job import Job

FP32 = 4
GIB = 2**30
CAPTURE_STATES = 8  # states of width d, and
CAPTURE_FFN = 4  # of the FFN's width, alive at once in one layer of the target's forward
MATRIX_BYTES = 1 << 20  # allocators round up and keep pieces: nothing smaller is worth a word


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device that come on top of what is resident before step 1 (target, masters, kept features)."""

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


def predict(job: Job) -> Footprint:
    """The formula, with R rows of S tokens, N blocks of B slots a row, P trained parameters, K taps, hidden d, e bytes
    an element of the compute dtype:

    gradients 4 P, moments 8 P (fp32); features R S (K [+1 with final states]) d e, twice: one batch is captured ahead.
    activations: see `layer_bytes`; logits: see `logits_bytes`; capture: (8 d + 4 f) e for each of the tokens of one
    target forward, f the FFN's width.
    """
    parameters = sum(p.numel() for p in job.drafter.parameters())
    rows, length = job.recipe.train.rows_per_micro_batch, job.recipe.data.sequence_length
    hidden, size = job.spec.hidden_size, job.target.dtype.itemsize
    states = len(job.spec.target_layer_ids) + job.step.loss.needs_final
    tokens = min(16384, rows * length)
    ffn = int(job.target.parts.config.to_dict().get("intermediate_size") or 4 * hidden)
    return Footprint(
        gradients=FP32 * parameters,
        moments=2 * FP32 * parameters,
        features=2 * rows * length * states * hidden * size,
        activations=job.spec.num_hidden_layers * layer_bytes(job) + 6 * rows * length * hidden * FP32,
        logits=logits_bytes(job),
        capture=tokens * size * (CAPTURE_STATES * hidden + CAPTURE_FFN * ffn + states * hidden),
    )


def layer_bytes(job: Job) -> int:
    """Kept by one layer for its backward. On CUDA what `drafter/fused.py` keeps: of each of the Q = N B block slots a
    row two states of width d, two of the FFN's width, queries and their output, keys and values; of each context
    position keys and values.

    The plain model (CPU) keeps under autograd six states of width d, three of the FFN's, queries and keys three times,
    the fp32 steps of norms and rotations, and its attention's weights over [context ; block], three copies of them.
    """
    spec, train = job.spec, job.recipe.train
    rows, length, size = train.rows_per_micro_batch, job.recipe.data.sequence_length, job.target.dtype.itemsize
    slots = rows * job.step.anchors * spec.block_size
    heads, kv_heads = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    per_slot = size * 2 * (spec.hidden_size + spec.intermediate_size + heads + kv_heads)
    per_position = size * 2 * kv_heads
    if job.target.device.type == "cpu":
        per_slot = size * (6 * spec.hidden_size + 3 * spec.intermediate_size + 3 * (heads + kv_heads))
        per_slot += FP32 * (4 * spec.hidden_size + 3 * (heads + kv_heads))
        per_slot += FP32 * 3 * spec.num_attention_heads * (length + spec.block_size)
        per_position = (size + FP32) * 3 * 2 * kv_heads
    return slots * per_slot + rows * length * per_position


def logits_bytes(job: Job) -> int:
    """On CUDA one chunk of logits, which become their gradient, as many of a teacher's, and the head's input with its
    gradient.

    The plain loss (CPU) has a chunk's logits and their gradient in the compute dtype, and of log-probabilities,
    probabilities and gradient in fp32 as many as the loss has: three, or six beside a teacher's; and hidden states with
    their gradient."""
    spec = job.spec
    blocks = job.recipe.train.rows_per_micro_batch * job.step.anchors
    slots, item = spec.block_size - 1, job.target.dtype.itemsize
    if job.target.device.type == "cuda":
        held = min(chunk_rows(spec.vocab_size), blocks * slots) * (1 + job.step.loss.needs_final)
        return item * (held * spec.vocab_size + 2 * blocks * spec.block_size * spec.hidden_size)
    chunk = whole_chunks(blocks, max(1, CHUNK_LOGITS // (slots * spec.vocab_size)))
    each = (2 * item + 3 * FP32) * (1 + job.step.loss.needs_final)
    return chunk * slots * spec.vocab_size * each + 4 * blocks * slots * spec.hidden_size * item


def prove_memory(job: Job) -> str:
    need, free = predict(job), free_memory_bytes(job.target.device)
    parts = ", ".join(
        f"{name} {gib(value)}"
        for name, value in (
            ("gradients and moments", need.gradients + need.moments),
            ("features", need.features),
            ("activations and logits", need.activations + need.logits),
        )
    )
    if free is not None and need.peak > free:
        raise InputError(
            f"expected {gib(need.peak)} of memory beside what is loaded ({parts}), found {gib(free)} free on "
            f"{job.target.device}",
            "lower train.rows_per_micro_batch, train.anchors or data.sequence_length, or target.keep_features_gib",
        )
    left = "free memory unknown" if free is None else f"{gib(free)} free"
    return f"{gib(need.peak)} more at the peak ({parts}), {left}"


def disk_bytes(job: Job) -> int:
    """Checkpoints hold masters and two moments, 12 P; one more than are kept exists while it replaces the oldest. The
    export holds P elements of the target's dtype, and in the speculators format its embedding and head; it is written
    beside an earlier one."""
    parameters = sum(p.numel() for p in job.drafter.parameters())
    borrowed = 2 * job.spec.vocab_size * job.spec.hidden_size if job.recipe.export.format == "speculators" else 0
    checkpoint = 3 * FP32 * parameters + MATRIX_BYTES
    export = (parameters + borrowed) * job.target.dtype.itemsize + MATRIX_BYTES
    return checkpoint * (job.recipe.train.keep_checkpoints + 1) + 2 * export


def prove_disk(job: Job, folder: RunFolder) -> str:
    need, free = disk_bytes(job), shutil.disk_usage(folder.root).free
    if need > free:
        raise InputError(
            f"expected {gib(need)} of disk for checkpoints and export, found {gib(free)} free at {folder.root}",
            "free space, name a train.out on another disk, or lower train.keep_checkpoints",
        )
    return f"{gib(need)} for {job.recipe.train.keep_checkpoints} + 1 checkpoints and the export, {gib(free)} free"


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
