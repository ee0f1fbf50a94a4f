"""What needs no vLLM; tests/engine runs the real one."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from draftline.errors import InputError, RunError
from draftline.evaluate.acceptance import Acceptance, check_counts
from draftline.evaluate.vllm_engine import (
    Decoding,
    Served,
    evaluate_with_vllm,
    k_norm_spread,
    make_job,
    run_worker,
    same_text_share,
    warn_of_shared_k_norm,
)
from draftline.export.layout import drafter_shapes
from draftline.export.reference import write_reference
from draftline.records import DrafterSpec

GREEDY = Decoding(max_new_tokens=20, temperature=0.0, stop_token_ids=(2,), dtype="float32", seed=0, compare_plain=False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_an_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(InputError, match="vllm does not import there: No module named 'vllm'") as caught:
        run_worker(sys.executable, {"target": ".", "draft": None})
    assert sys.executable in caught.value.what
    assert "scripts/setup_vllm_cpu.sh" in caught.value.remedy


def test_a_drafter_that_vllm_on_a_cpu_misreads_is_told_from_one_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = DrafterSpec(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=32,
        block_size=8,
        mask_token_id=4,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=256,
        layer_types=("full_attention",) * 3,
    )
    for name, third in (("alike", 1.01), ("apart", 1.25)):
        tensors = {k: torch.randn(shape) * 0.02 for k, shape in drafter_shapes(spec).items()}
        for i, value in enumerate((1.0, 1.0, third)):
            tensors[f"layers.{i}.self_attn.k_norm.weight"] = torch.full((spec.head_dim,), value)
        (tmp_path / name).mkdir()
        write_reference(tmp_path / name, spec, tensors, torch.float32)
    assert k_norm_spread(tmp_path / "apart") == 0.25
    warn_of_shared_k_norm("0.32.0", tmp_path / "alike")
    assert capsys.readouterr().err == ""
    warn_of_shared_k_norm("0.32.0", tmp_path / "apart")
    assert "all layers with layer 0's k_norm; this drafter's differ by up to 0.25" in capsys.readouterr().err


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vLLM interpreter .*/nowhere/python: No such file or directory"):
        run_worker(str(tmp_path / "nowhere" / "python"), {})


def test_the_job_leaves_two_blocks_of_room_beyond_the_longest_prompt(tmp_path: Path) -> None:
    served = Served("target", "main", ((5,) * 7, (6,)), "b", None)
    job = make_job(tmp_path, 8, served, GREEDY)
    assert (job["max_model_len"], job["num_speculative_tokens"]) == (7 + 20 + 16, 7)
    assert (job["stop_token_ids"], job["revision"], job["draft"]) == ((2,), "main", str(tmp_path))


@pytest.mark.parametrize("prompts", [(), ((1, 2), ())])
def test_empty_prompts_are_refused(tmp_path: Path, prompts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError, match="b: no prompts, or an empty one"):
        evaluate_with_vllm(sys.executable, tmp_path, Served("t", None, prompts, "b", None), GREEDY)


def test_tau_counts_committed_tokens() -> None:
    found = Acceptance(drafts=8, accepted=6, accepted_per_slot=(4, 2, 0))
    assert found.tau(tokens=15, answers=2) == 13 / 8  # one accepted token lay past an end of turn
    assert found.slot_acceptance == (0.5, 0.25, 0.0)


@pytest.mark.parametrize("tokens", [10, 13, 16])
def test_counts_fit_up_to_one_block_of_overrun_an_answer(tokens: int) -> None:
    """14 tokens were committed in steps, 2 answers got one more each from prefill: 16 fit, and up to 2 * 3 fewer."""
    check_counts("x", Acceptance(8, 6, (4, 2, 0)), tokens, answers=2)


@pytest.mark.parametrize(
    ("tokens", "message"), [(17, "1 of 17 tokens were decoded without a draft"), (9, "for 9 tokens")]
)
def test_counts_beyond_that_are_refused(tokens: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        check_counts("x", Acceptance(8, 6, (4, 2, 0)), tokens, answers=2)


def test_texts_are_compared_token_for_token() -> None:
    assert same_text_share([[1, 2], [3], [4]], [[1, 2], [3, 3], (4,)]) == 2 / 3
