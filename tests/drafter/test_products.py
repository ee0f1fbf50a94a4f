"""Where `train.products: fp8` is impossible it is refused before anything runs: sizes, device, recipe, plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command import draftline_here
from draftline.bench.shapes import NAMED, QWEN3_8B, SMOLLM2_135M
from draftline.config import load_recipe, parse_recipe
from draftline.drafter.products import refuse_fp8_device, refuse_fp8_sizes
from draftline.errors import InputError
from draftline.monitor.notices import Notices, stdout_console
from draftline.records import DrafterSpec
from draftline.train.job import assemble_alone
from runs import write_recipe


@pytest.mark.parametrize("name", NAMED)
def test_the_known_drafters_fit(name: str) -> None:
    refuse_fp8_sizes(NAMED[name].spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(SMOLLM2_135M, intermediate_size=1544), " intermediate_size 1544"),
        (replace(SMOLLM2_135M, num_attention_heads=7, head_dim=72), "attention_heads 7 of head_dim 72 = 504"),
        (replace(QWEN3_8B, num_key_value_heads=1, head_dim=40), "key_value_heads 1 of head_dim 40 = 40"),
        (replace(SMOLLM2_135M, hidden_size=568), "hidden_size 568"),
    ],
)
def test_a_size_that_cannot_be_aligned_is_named(spec: DrafterSpec, said: str) -> None:
    with pytest.raises(InputError) as error:
        refuse_fp8_sizes(spec)
    assert "multiples of 16" in error.value.what and "train.products=plain" in error.value.remedy
    assert error.value.what.endswith(said)


def test_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="compute capability 8.9 or later; this run is on a CPU"):
        refuse_fp8_device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"placement": {"device": "cpu"}}, "train.products fp8 needs a GPU, and placement.device is cpu"),
        ({}, "train.products fp8 gives bfloat16 results, and target.dtype is float32"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(sections: dict[str, object], said: str) -> None:
    tree = {"target": {"path": "t", "dtype": "float32"}, "data": {"train": ["d"]}, "train": {"products": "fp8"}}
    with pytest.raises(InputError, match=said):
        parse_recipe(tree | sections, "recipe.yaml")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("fp8"), target={"dtype": "auto"}, placement={"device": "auto"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have FP8 tensor cores")
@pytest.mark.parametrize("how", [[], ["--plan"]], ids=["train", "plan"])
def test_training_and_its_plan_on_a_cpu_say_so(recipe: Path, how: list[str]) -> None:
    done = draftline_here("train", recipe, "train.products=fp8", *how)
    assert done.code == 2 and "this run is on a CPU" in done.err, done.err


def test_a_plan_for_gpus_counts_what_is_fp8(recipe: Path) -> None:
    """Half of the FP8 products' time is saved; sizes are looked at too."""
    overrides = ("placement.device=cuda", "drafter.intermediate_size=64", "drafter.head_dim=16")
    plain = draftline_here("train", recipe, "--plan", *overrides)
    fp8 = draftline_here("train", recipe, "--plan", "train.products=fp8", *overrides)
    assert plain.code == fp8.code == 0, fp8.err
    assert "in FP8 at twice that rate" in fp8.out and "FP8" not in plain.out
    refused = draftline_here(
        "train", recipe, "--plan", "train.products=fp8", *overrides, "drafter.intermediate_size=70"
    )
    assert refused.code == 2 and "intermediate_size 70" in refused.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have FP8 tensor cores")
def test_bench_on_a_cpu_says_so() -> None:
    done = draftline_here("bench", "step", "--shape", "smollm2-135m", "--products", "fp8")
    assert done.code == 2 and "this run is on a CPU" in done.err


def test_a_run_remembers_its_products(recipe: Path) -> None:
    """A resumed run must share them; the export says them."""
    job = assemble_alone(load_recipe(recipe), Notices(stdout_console()))
    assert job.identity["train.products"] == job.provenance.products == job.step.products == "plain"
