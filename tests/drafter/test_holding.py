"""A drafter made around tensors that exist already is the drafter that they were loaded into, without the copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafter_samples import GEOMETRIES, make_spec, random_drafter
from draftline.drafter.model import Drafter, holding
from draftline.evaluate.evaluation import load_drafter

YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SPECS: dict[str, dict[str, Any]] = {
    "full": {},
    "half rope": GEOMETRIES["half rope"],
    "biases": GEOMETRIES["biases"],
    "yarn": {"rope_parameters": YARN},
}


@pytest.mark.parametrize("changes", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_holds_the_very_tensors_and_turns_by_its_own_frequencies(
    changes: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = make_spec(**changes)
    tensors = {name: value.to(dtype) for name, value in random_drafter(spec).state_dict().items()}
    held, whole = holding(spec, tensors), Drafter(spec)
    assert {n: p.data_ptr() for n, p in held.named_parameters()} == {n: t.data_ptr() for n, t in tensors.items()}
    assert all(p.dtype == dtype and not p.requires_grad for p in held.parameters())
    assert torch.equal(held.inv_freq, whole.inv_freq) and held.rope_scale == whole.rope_scale
    assert not held.training


def test_names_and_shapes_must_be_the_drafter_s() -> None:
    tensors = dict(random_drafter(make_spec()).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"norm.weight\""):
        holding(make_spec(), {name: value for name, value in tensors.items() if name != "norm.weight"})
    with pytest.raises(RuntimeError, match="size mismatch for fc.weight"):
        holding(make_spec(), tensors | {"fc.weight": tensors["fc.weight"][1:]})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"extra\""):
        holding(make_spec(), tensors | {"extra": tensors["norm.weight"]})


def test_a_loaded_drafter_is_none_of_the_file_s_memory() -> None:
    """What safetensors reads is a view of the file, which another process may replace."""
    tensors = dict(random_drafter(make_spec()).state_dict())
    loaded = load_drafter(make_spec(), tensors)
    assert all(not {p.data_ptr()} & {t.data_ptr() for t in tensors.values()} for p in loaded.parameters())
    assert all(torch.equal(p, tensors[name]) for name, p in loaded.named_parameters())
