"""A small drafter step, compiled, warmed and checked against the plain one. Run as a process of its own:

    python -m draftline.train.compile_probe cpu|cuda ['[{"switch": ..., "value": ...}, ...]']

prints one JSON object. On CUDA the step is draftline's own, whose kernels Triton compiles; on a CPU, where draftline
trains uncompiled, torch compiles the drafter's layers, to show that this environment can. The second word is a list of
overrides to set before anything is compiled.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn

from draftline.config import Override
from draftline.drafter.losses import LossKind
from draftline.drafter.model import untrained
from draftline.drafter.step import DrafterStep
from draftline.environment.compile_guard import CompileGuard, graph_counts
from draftline.environment.switches import apply_settings
from draftline.errors import RunError
from draftline.records import DrafterSpec, FeatureBatch, Head, PackedBatch
from draftline.train.warm_up import random_features, shapes_of, synchronize, warm_up

TIMED_STEPS = 10
LENGTH, ANCHORS, BLOCK = 256, 16, 16  # two tiles of keys and two of queries in the fused attention
SPEC = DrafterSpec(
    hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=512, block_size=BLOCK, mask_token_id=0, target_layer_ids=(0, 1), num_target_layers=4,
    rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=4096,
    layer_types=("full_attention",),
)  # fmt: skip


@dataclass(frozen=True)
class ProbeResult:
    loss: float
    loss_error: float  # relative to the plain step on a CPU in float32
    gradient_error: float  # the worst parameter's norm of the difference over its norm
    compile_s: float  # forward and backward of the first step
    step_s: float  # the fastest of TIMED_STEPS later ones
    graphs: int  # by torch's compiler
    kernels: int  # by Triton, outside torch's compiler


def probe(device: torch.device) -> ProbeResult:
    """Raises RunError where torch compiles after the first step, or did not compile at all, and what torch raises."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    guard, step, packed = CompileGuard(), make_step(device, dtype), packed_row()
    if step.fused is None:
        for layer in step.drafter.layers:
            layer.compile(fullgraph=True, dynamic=False)
    compile_s = warm_up(step, [packed], dtype, guard)
    batch = random_features(step, packed, dtype)
    with guard.steady(lambda: shapes_of(batch)):
        micro = step.forward_backward(batch)
    reference = make_step(torch.device("cpu"), torch.float32)
    final = None if batch.final is None else batch.final.float().cpu()
    expected = reference.forward_backward(FeatureBatch(packed, batch.taps.float().cpu(), final))
    pairs = zip(step.drafter.parameters(), reference.drafter.parameters(), strict=True)
    errors = [relative(one.grad, other.grad) for one, other in pairs]
    if step.fused is None and graph_counts()["graphs"] == 0:
        raise RunError("torch compiled nothing: its compiler is off here", "is TORCHDYNAMO_DISABLE set?")
    return ProbeResult(
        loss=float(micro.loss_sum / micro.weight_sum),
        loss_error=abs(float(micro.loss_sum) / float(expected.loss_sum) - 1),
        gradient_error=max(errors),
        compile_s=compile_s,
        step_s=min(timed(step, batch, guard) for _ in range(TIMED_STEPS)),
        graphs=graph_counts()["graphs"],
        kernels=guard.kernels,
    )


def make_step(device: torch.device, dtype: torch.dtype) -> DrafterStep:
    generator = torch.Generator().manual_seed(1)
    embedding = nn.Embedding(SPEC.vocab_size, SPEC.hidden_size).requires_grad_(False)
    embedding.weight.data = torch.randn(embedding.weight.shape, generator=generator)
    head = 0.3 * torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=generator)
    loss = LossKind("kl", "dpace", gamma=None, alpha=0.5)
    drafter = untrained(SPEC, 2, std=0.1).to(device)
    return DrafterStep(drafter, embedding.to(device, dtype), Head(head.to(device, dtype)), loss, ANCHORS, seed=0)


def packed_row() -> PackedBatch:
    """One row of one document, answers from its first quarter on."""
    place = np.arange(LENGTH, dtype=np.int64)[None]
    ids = np.random.default_rng(0).integers(1, SPEC.vocab_size, (1, LENGTH))
    return PackedBatch(0, ids, place >= LENGTH // 4, np.zeros_like(place), place, place)


def timed(step: DrafterStep, batch: FeatureBatch, guard: CompileGuard) -> float:
    synchronize(step.head.weight.device)
    started = time.perf_counter()
    with guard.steady(lambda: shapes_of(batch)):
        step.forward_backward(batch)
    synchronize(step.head.weight.device)
    return time.perf_counter() - started


def relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found.float().cpu() - expected).norm() / expected.norm())


def main() -> None:
    overrides = TypeAdapter(tuple[Override, ...]).validate_json(sys.argv[2]) if len(sys.argv) > 2 else ()
    apply_settings(overrides)
    print(json.dumps(asdict(probe(torch.device(sys.argv[1])))))


if __name__ == "__main__":
    main()
