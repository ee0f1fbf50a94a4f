"""From a checkpoint to an export, read strictly, to an independent drafter's logits (SPEC 9.8, CASES 9)."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from builders import open_target, packed, save_target, spec_for
from drafter_samples import CE, GEOMETRIES, blocks_at, hidden, random_drafter
from draftline.drafter.step import DrafterStep
from draftline.errors import InputError
from draftline.export.folder import read_drafter
from draftline.export.provenance import Provenance
from draftline.target.capture import FeatureCapture
from draftline.train.checkpoint import open_checkpoint, write_checkpoint
from draftline.train.publishing import export_checkpoint
from reference import block_states

EXPORTED = {
    name: GEOMETRIES[name]
    for name in ("full", "mixed", "causal everywhere", "another rope base", "half rope", "biases")
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_target(save_target(tmp_path_factory.mktemp("target")))


def exported(target, spec, drafter, root, format: str):
    provenance = Provenance("t", "r", "ce", "h", None, "d", "plain")
    state = {
        "step": 3,
        "spec": asdict(spec),
        "provenance": asdict(provenance),
        "tokens": 0,
        "identity": {},
        "recipe": {},
    }
    folder = write_checkpoint(root / "checkpoints", drafter.state_dict(), {}, state, keep=1)
    export_checkpoint(open_checkpoint(folder), root / "export", format, target)
    return root / "export"


@pytest.mark.parametrize("format", ["reference", "speculators"])
@pytest.mark.parametrize("name", EXPORTED)
def test_the_exported_drafter_has_the_trained_logits(target, name: str, format: str, tmp_path) -> None:
    spec = spec_for(target, **EXPORTED[name])
    if (name, format) == ("mixed", "speculators"):  # a format with one switch for all layers
        with pytest.raises(InputError, match="mixes causal sliding-window layers"):
            exported(target, spec, random_drafter(spec), tmp_path, format)
        return
    drafter = random_drafter(spec)
    read_spec, tensors = read_drafter(exported(target, spec, drafter, tmp_path, format))
    assert read_spec.target_layer_ids == (0, 2, 3) and read_spec.rope_parameters == spec.rope_parameters

    head, table = target.parts.head.weight, target.parts.embedding.weight
    text = np.random.default_rng(1).integers(5, 32, 24).tolist()
    batch = FeatureCapture(target, spec.target_layer_ids, want_final=False)(packed([[(text, [1] * 24)]], 24))
    step = DrafterStep(drafter, target.embed, target.parts.head, CE, 8, 0)
    anchors = [5, 11, 20]
    live = hidden(step, batch, blocks_at(batch, [anchors]))[0] @ head.T
    for n, anchor in enumerate(anchors):
        ids = [text[anchor]] + [read_spec.mask_token_id] * (read_spec.block_size - 1)
        states = block_states(tensors, read_spec, batch.taps[0, :anchor], table[ids])
        torch.testing.assert_close(states @ head.double().T, live[n].double(), rtol=1e-4, atol=2e-4)


def test_every_tensor_of_the_export_matters(target, tmp_path) -> None:
    """So that a tensor which an engine would silently skip could not go unnoticed here."""
    spec = spec_for(target)
    read_spec, tensors = read_drafter(exported(target, spec, random_drafter(spec), tmp_path, "reference"))
    taps = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    embeds = target.parts.embedding.weight[[9, 4, 4, 4, 4]]
    before = block_states(tensors, read_spec, taps, embeds)
    for name in tensors:
        after = block_states(tensors | {name: tensors[name] * 1.1 + 0.01}, read_spec, taps, embeds)
        assert (after - before).abs().max() > 1e-4, name


def test_an_export_with_a_tensor_too_many_or_too_few_is_refused(target, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    spec = spec_for(target)
    folder = exported(target, spec, random_drafter(spec), tmp_path, "reference")
    tensors = load_file(folder / "model.safetensors")
    save_file({k.replace("hidden_norm", "hidden_norms"): v for k, v in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"(?s)missing: hidden_norm.weight.*unknown: hidden_norms.weight"):
        read_drafter(folder)


def test_the_rope_base_is_written_in_both_spellings(tmp_path) -> None:
    """CASES 9: the target has it inside rope_parameters only."""
    target = open_target(save_target(tmp_path / "t", rope_parameters={"rope_type": "default", "rope_theta": 12345.0}))
    assert "rope_theta" not in target.parts.config.to_dict()
    spec = spec_for(target)
    folder = exported(target, spec, random_drafter(spec), tmp_path, "reference")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 12345.0 and config["rope_parameters"]["rope_theta"] == 12345.0
