"""Training ends in drafts that decoding accepts (SPEC 9.9, 9.10; CASES 13)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftline.decode.chain import Limits, Sampler, decode_plain, decode_speculative
from draftline.drafter.anchors import slot_targets
from draftline.evaluate.decoding import DecodingTask, measure
from trained import CPU, NO_STOP, Trained, counting, counting_rows, overfitted, train

COUNTS = [[(start + i) % 7 for i in range(8)] for start in range(7)]


def committed(trained: Trained, prompts: list[list[int]], max_new_tokens: int) -> list[int]:
    """Tokens of every verification step."""
    steps: list[int] = []
    for prompt in prompts:
        answer = decode_speculative(
            trained.target, trained.drafter, prompt, Limits(max_new_tokens, NO_STOP), Sampler(0, 0, CPU)
        )
        plain = decode_plain(trained.target, prompt, Limits(max_new_tokens, NO_STOP), Sampler(0, 0, CPU))
        assert answer.ids == plain.ids
        steps += answer.committed
    return steps


def test_the_target_counts_modulo_seven() -> None:
    answer = decode_plain(counting().target, [5, 6], Limits(15, NO_STOP), Sampler(0, 0, CPU))
    assert answer.ids == [t % 7 for t in range(15)]


def test_counting_is_learned_and_decoded_perfectly() -> None:
    """Accuracy 1.0 in every slot, and B = 5 tokens in each of the 7 * 8 steps."""
    assert counting().slot_accuracy == [1.0] * 4
    assert committed(counting(), COUNTS, 41) == [5] * 56


def test_the_reported_tau_is_the_block_size() -> None:
    target = replace(counting().target, stop_ids=NO_STOP)
    report = measure(
        target, counting().drafter, DecodingTask("count", COUNTS, 41, 0.0, None, True), lambda _: None
    ).report
    assert (report.tau, report.slot_acceptance, report.same_text_share) == (5.0, (1.0,) * 4, 1.0)
    assert (report.verify_steps, report.tokens, report.prompts) == (56, 7 * 41, 7)


def test_labels_shifted_by_one_do_not_pass_for_learned(monkeypatch) -> None:
    """Training on x_{a+k+1} looks perfect by its own labels; decoding accepts nothing."""

    def shifted(ids, loss_mask, document, blocks, block_size):
        slots = slot_targets(ids, loss_mask, document, blocks, block_size)
        further = (slots.position + 1).clamp(max=ids.shape[1] - 1).flatten(1)
        label = ids.gather(1, further).view_as(slots.position)
        same = document.gather(1, further).view_as(slots.position) == document.gather(1, blocks.anchor)[..., None]
        return replace(slots, label=label, supervised=slots.supervised & same)

    monkeypatch.setattr("draftline.drafter.step.slot_targets", shifted)
    wrong = train(counting().target, counting_rows(), steps=120, row_length=64)
    assert min(wrong.slot_accuracy) > 0.95 and wrong.proxy_tau > 3.5
    assert committed(wrong, COUNTS, 11) == [1] * 70


def test_ten_answers_learned_by_heart() -> None:
    """Ten rich answers of 41 tokens: proxy tau and decoded tau agree, both close to B = 5."""
    sample = overfitted(300)
    assert min(len(set(answer)) for answer in sample.answers) >= 5
    assert [len(answer) for answer in sample.answers] == [41] * 10
    steps = committed(sample.trained, sample.prompts, 41)
    tau = sum(steps) / len(steps)
    assert 4.5 < tau <= 5 and 4.2 < sample.trained.proxy_tau <= 5
    assert sample.trained.proxy_tau == pytest.approx(tau, rel=0.03)


def test_a_half_learned_drafter_accepts_drafts_of_every_length() -> None:
    """Proxy tau over every anchor is decoding's own walk."""
    sample = overfitted(60)
    steps = committed(sample.trained, sample.prompts, 41)
    tau = sum(steps) / len(steps)
    assert set(steps) == {1, 2, 3, 4, 5} and 1.5 < tau < 4
    assert sample.trained.proxy_tau == pytest.approx(tau, rel=0.05)


def test_the_target_is_never_trained() -> None:
    assert all(p.grad is None and not p.requires_grad for p in counting().target.model.parameters())
    assert torch.equal(counting().target.parts.embedding.weight, torch.eye(32))
