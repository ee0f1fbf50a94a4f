"""Drafters trained in a second or two, by the pieces of the real loop, for tests of learning and decoding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from builders import open_target, qwen3_config, save_target, spec_for, word_tokenizer
from draftline.config import OptimSection
from draftline.data.stream import RowStream
from draftline.decode.chain import Limits, Sampler, decode_plain
from draftline.drafter.anchors import sample_blocks
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter, untrained
from draftline.drafter.step import DrafterStep
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture
from draftline.target.load import Target
from draftline.train.optimizer import Optimizer

NO_STOP: frozenset[int] = frozenset()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    target: Target
    drafter: Drafter
    slot_accuracy: list[float]  # over every eligible anchor of the data, against the labels it was trained on
    proxy_tau: float  # over the same anchors


def train(target: Target, rows: Sequence[TokenRow], steps: int, row_length: int) -> Trained:
    """Batches of 4 packed rows, as many epochs as the steps need."""
    spec = spec_for(target, mask_token_id=31)
    drafter = untrained(spec, seed=0, std=0.1)
    loss = LossKind("ce", "exponential", gamma=4.0, alpha=0.5)
    step = DrafterStep(drafter, target.embed, target.parts.head, loss, anchors=24, seed=0)
    capture = FeatureCapture(target, spec.target_layer_ids, loss.needs_final)
    optimizer = Optimizer(drafter, OptimSection(lr=3e-3), steps)
    stream = RowStream(rows, row_length, rows_per_batch=4, seed=0, epochs=4 * steps)
    for index in range(steps):
        micro = step.forward_backward(capture(stream.batch(index)))
        optimizer.finish(micro.weight_sum)
    return Trained(target, drafter, *judged(step, capture, RowStream(rows, row_length, len(rows), seed=0, epochs=1)))


@torch.no_grad()
def judged(step: DrafterStep, capture: FeatureCapture, data: RowStream) -> tuple[list[float], float]:
    """(slot accuracy, proxy tau) over the whole data in one batch."""
    batch = capture(data.batch(0))
    _, micro = step.forward(batch, sample_blocks(batch.packed, data.row_length, seed=0))
    return (micro.slot_correct / micro.slot_count).tolist(), float(micro.committed / micro.verify_steps)


def row(ids: Sequence[int], prompt: int) -> TokenRow:
    return TokenRow(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= prompt, "made")


def counting_target(folder: Path) -> Target:
    """A Qwen3 that answers every token t < 7 with (t+1) mod 7: layers that add nothing, an embedding of unit vectors,
    and a head whose row (t+1) mod 7 is that of t."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(tie_word_embeddings=False))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(32)
    model.lm_head.weight.data.zero_()
    for t in range(7):
        model.lm_head.weight.data[(t + 1) % 7, t] = 1.0
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return open_target(folder)


@cache
def counting() -> Trained:
    """CASES 13: trained on answers with next token (t+1) mod 7, the mask token in the padding."""
    with tempfile.TemporaryDirectory() as folder:
        target = counting_target(Path(folder))
    return train(target, counting_rows(), steps=120, row_length=64)


def counting_rows() -> list[TokenRow]:
    return [row([(t + start) % 7 for t in range(length)], 8) for start in range(7) for length in (28, 31, 33, 36)]


@dataclass(frozen=True)
class Overfitted:
    trained: Trained
    prompts: list[list[int]]
    answers: list[list[int]]  # the target's own, 41 tokens each


@cache
def overfitted(steps: int) -> Overfitted:
    """SPEC 9.10: ten answers that a random target gave greedily, learned by heart where the steps suffice."""
    with tempfile.TemporaryDirectory() as folder:
        target = open_target(save_target(Path(folder), seed=1, tie_word_embeddings=False))
    rng, limits = np.random.default_rng(0), Limits(41, NO_STOP)
    prompts = [rng.integers(5, 32, int(n)).tolist() for n in rng.integers(4, 12, 10)]
    answers = [decode_plain(target, prompt, limits, Sampler(0, 0, CPU)).ids for prompt in prompts]
    rows = [row(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    trained = train(target, rows, steps, row_length=112)
    return Overfitted(trained, prompts, answers)
