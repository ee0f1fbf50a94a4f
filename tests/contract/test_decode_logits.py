"""The training forward and the decoding loop are the same drafter (SPEC 9.4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import open_target, packed, save_target, spec_for
from drafter_samples import CE, GEOMETRIES, blocks_at, hidden, random_drafter
from draftline.decode.models import CachedDrafter, CachedTarget
from draftline.drafter.step import DrafterStep
from draftline.target.capture import FeatureCapture
from draftline.target.load import Target
from reference import block_states

GEOMETRIES = {name: change for name, change in GEOMETRIES.items() if name != "one layer, one tap"}
PROMPT, ACCEPTED = 6, [2, 0, 4, 4, 1, 3, 0, 2]  # drafts accepted by each verification


def decode_by_script(target: Target, drafter, text: list[int]) -> tuple[list[int], list[Tensor]]:
    """(anchors, draft logits of their blocks). The text is what the target will have said; drafts that are not accepted
    are wrong tokens, which the target sees and takes back."""
    size = drafter.spec.block_size
    verifier, proposer = CachedTarget(target, drafter.spec.target_layer_ids), CachedDrafter(drafter, target)
    _, features = verifier.forward(text[:PROMPT], logits_for=1)
    at, anchors, logits = PROMPT, [], []
    for accepted in ACCEPTED:
        anchors.append(at)
        logits.append(proposer.forward(text[at], features))
        drafts = text[at + 1 : at + 1 + accepted] + [(t + 1) % 32 for t in text[at + 1 + accepted : at + size]]
        _, features = verifier.forward([text[at], *drafts], logits_for=size)
        verifier.drop_last(size - 1 - accepted)
        features = features[:, : accepted + 1]
        at += accepted + 1
    return anchors, logits


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_training_logits_equal_decoding_logits(geometry, tmp_path) -> None:
    target = open_target(save_target(tmp_path / "t"))
    drafter = random_drafter(spec_for(target, **geometry))
    text = np.random.default_rng(1).integers(5, 32, 40).tolist()
    anchors, decoded = decode_by_script(target, drafter, text)
    assert anchors == [6, 9, 10, 15, 20, 22, 26, 27]
    head = target.parts.head.weight
    step = DrafterStep(drafter, target.embed, target.parts.head, CE, 8, 0)
    batch = FeatureCapture(target, drafter.spec.target_layer_ids, want_final=False)(packed([[(text, [1] * 40)]], 40))
    trained = hidden(step, batch, blocks_at(batch, [anchors]))[0, :, 1:] @ head.T
    for n, logits in enumerate(decoded):
        torch.testing.assert_close(trained[n], logits, rtol=1e-4, atol=1e-4)
        ids = [text[anchors[n]]] + [drafter.spec.mask_token_id] * (drafter.spec.block_size - 1)
        states = block_states(
            drafter.state_dict(), drafter.spec, batch.taps[0, : anchors[n]], target.parts.embedding.weight[ids]
        )
        torch.testing.assert_close(states[1:] @ head.double().T, logits.double(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("window", [None, 4, 7])
def test_the_target_takes_rejected_tokens_back(window: int | None, tmp_path) -> None:
    """Logits and taps after roll-backs equal those of one forward over the text, also past a target's own window."""
    kinds = ["full_attention", "sliding_attention"] * 2
    sliding = {} if window is None else {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}
    target = open_target(save_target(tmp_path / "t", **sliding))
    taps, text = (0, 2, 3), np.random.default_rng(1).integers(5, 32, 40).tolist()
    batch = FeatureCapture(target, taps, want_final=True)(packed([[(text, [1] * 40)]], 40))
    expected = batch.final[0] @ target.parts.head.weight.T
    verifier, at = CachedTarget(target, taps), PROMPT
    verifier.forward(text[:PROMPT], logits_for=1)
    for accepted in ACCEPTED:
        wrong = [(t + 1) % 32 for t in text[at + 1 + accepted : at + 5]]
        logits, features = verifier.forward(text[at : at + 1 + accepted] + wrong, logits_for=5)
        verifier.drop_last(len(wrong))
        good = slice(at, at + 1 + accepted)
        torch.testing.assert_close(logits[: accepted + 1], expected[good], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features[0, : accepted + 1], batch.taps[0, good], rtol=1e-4, atol=1e-4)
        at += accepted + 1
