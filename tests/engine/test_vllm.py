"""Drafters of every kind in the real serving engine, with random weights; `test_trained.py` has trained ones.

Slow: vLLM starts anew for every run, up to a minute on a CPU. DRAFTLINE_VLLM_PYTHON names the interpreter that has it
(`scripts/setup_vllm_cpu.sh` makes one).
"""

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dense import Counts, DenseDrafter, speculate
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from draftline.errors import InputError, RunError
from draftline.evaluate.vllm_engine import Decoding, Served, evaluate_with_vllm, run_worker
from draftline.export.layout import drafter_shapes
from draftline.export.reference import write_reference
from draftline.export.speculators import write_speculators
from draftline.records import DrafterSpec, EvalReport

INTERPRETER = os.environ.get("DRAFTLINE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETER, reason="DRAFTLINE_VLLM_PYTHON does not name an interpreter that has vLLM"),
]
LIMIT = 24
Prompts = tuple[tuple[int, ...], ...]
GREEDY = Decoding(
    max_new_tokens=LIMIT, temperature=0.0, stop_token_ids=(), dtype="float32", seed=0, compare_plain=False
)


def random_target(folder: Path, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    target = Qwen3ForCausalLM(config).eval()
    target.save_pretrained(folder)
    return target


def spec_for(config: Any, mask_token_id: int, **changes: Any) -> DrafterSpec:
    layers = config.num_hidden_layers
    spec = DrafterSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=8,
        mask_token_id=mask_token_id,
        target_layer_ids=(1, layers // 2, layers - 3),
        num_target_layers=layers,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        layer_types=("full_attention", "full_attention"),
    )
    return replace(spec, **changes)


def random_weights(spec: DrafterSpec, spread: float) -> dict[str, Tensor]:
    """Matrices around 0, norms around 1, so that no tensor may be left out or swapped unseen."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator) * spread + (len(shape) == 1)
        for name, shape in drafter_shapes(spec).items()
    }


def random_prompts(vocab_size: int) -> Prompts:
    numbers = random.Random(0)
    return tuple(tuple(numbers.randrange(vocab_size) for _ in range(length)) for length in (3, 17, 40))


def comparable_prompts(target: PreTrainedModel, drafter: DenseDrafter, count: int) -> tuple[Prompts, Counts]:
    """Random prompts of 3 to 40 tokens on which no draft hangs on rounding, and what the definition accepts on them."""
    numbers, prompts = random.Random(0), list[tuple[int, ...]]()
    total = Counts([], 0, [0] * (drafter.spec.block_size - 1))
    while len(prompts) < count:
        prompt = [numbers.randrange(drafter.spec.vocab_size) for _ in range(numbers.randint(3, 40))]
        found = speculate(target, drafter, prompt, LIMIT)
        if found is not None:
            prompts.append(tuple(prompt))
            total.add(found)
    return tuple(prompts), total


def serve(target: str, draft: Path, prompts: Prompts, **changes: Any) -> EvalReport:
    served = Served(target, None, prompts, "random", None)
    return evaluate_with_vllm(INTERPRETER, draft, served, replace(GREEDY, **changes))


@dataclass
class Case:
    folder_format: str
    changes: dict[str, Any]


SLIDING = {"layer_types": ("sliding_attention", "sliding_attention"), "sliding_window": 12}
CASES = {
    "full": Case("reference", {}),
    "causal inside the block": Case("reference", {"is_causal": True}),
    "sliding": Case("reference", SLIDING),
    "sliding in a speculators folder": Case("speculators", SLIDING),
    "sliding, bidirectional": Case("reference", SLIDING | {"is_causal": False}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_vllm_accepts_exactly_what_the_definition_accepts(tmp_path: Path, case: Case) -> None:
    """With 4 tokens to choose from, even a random drafter is right now and then, and must be so equally often."""
    (tmp_path / "target").mkdir()
    target = random_target(tmp_path / "target", vocab_size=4)
    embedding = target.get_input_embeddings().weight.detach().clone()
    spec = spec_for(target.config, mask_token_id=3, **case.changes)
    weights = random_weights(spec, spread=0.1)
    draft = tmp_path / "draft"
    draft.mkdir()
    if case.folder_format == "speculators":
        borrowed = {"embed_tokens.weight": embedding, "lm_head.weight": embedding}
        write_speculators(draft, spec, weights | borrowed, torch.float32, str(tmp_path / "target"))
    else:
        write_reference(draft, spec, weights, torch.float32)
    exact = DenseDrafter(spec, {k: v.double() for k, v in weights.items()}, embedding.double(), embedding.double())
    prompts, wanted = comparable_prompts(target.double(), exact, count=4)
    report = serve(str(tmp_path / "target"), draft, prompts)
    assert sum(wanted.accepted_per_slot) >= 8  # or the test would say little
    assert report.verify_steps == wanted.drafts
    assert [round(share * report.verify_steps) for share in report.slot_acceptance] == wanted.accepted_per_slot
    assert report.tau == 4 * (LIMIT - 1) / wanted.drafts
    assert report.tokens == 4 * LIMIT


@pytest.mark.skipif(torch.cuda.is_available(), reason="only vLLM's CPU backend samples wrongly")
def test_sampling_on_a_cpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = random_target(tmp_path / "target", vocab_size=2048)
    spec = spec_for(target.config, mask_token_id=5)
    write_reference(tmp_path, spec, random_weights(spec, spread=0.02), torch.float32)
    with pytest.raises(InputError, match="does not keep the target's distribution"):
        serve(str(tmp_path / "target"), tmp_path, random_prompts(2048), temperature=1.0)


def test_the_engines_own_words_reach_the_reader(tmp_path: Path) -> None:
    """A prompt beyond the target's 1024 positions is vLLM's to refuse."""
    (tmp_path / "target").mkdir()
    target = random_target(tmp_path / "target", vocab_size=2048)
    spec = spec_for(target.config, mask_token_id=5)
    write_reference(tmp_path, spec, random_weights(spec, spread=0.02), torch.float32)
    served = Served(str(tmp_path / "target"), None, ((1,) * 2000,), "long", None)
    with pytest.raises(RunError, match=r"vLLM ended with code 1; its last lines:(?s:.)*max_model_len"):
        evaluate_with_vllm(INTERPRETER, tmp_path, served, GREEDY)


def test_target_and_draft_reach_the_worker_unchanged() -> None:
    """The worker must not need draftline: it runs isolated, in an interpreter that does not have it."""
    with pytest.raises(RunError, match="KeyError: 'draft'"):
        run_worker(INTERPRETER, {"target": "."})
