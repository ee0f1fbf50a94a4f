"""The shipped recipes parse and plan; the templates are well formed and name verbs and recipes that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from draftline.config import load_recipe
from draftline.train.plan import World, make_plan
from source_tree import ROOT

WORLDS = {"one_gpu": (1, 1), "two_gpus": (2, 2), "eight_gpus": (8, 8), "two_hosts": (16, 8)}


def test_every_recipe_has_a_world_here() -> None:
    assert {path.stem for path in (ROOT / "recipes").iterdir()} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_a_recipe_plans_its_world(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    ranks, per_host = WORLDS[name]
    plan = make_plan(recipe.placement, World(ranks, per_host, "cuda"))
    assert len(plan.roles) == ranks
    micro_batches = recipe.train.rows_per_step // recipe.train.rows_per_micro_batch
    assert micro_batches % plan.drafters == 0


def test_the_slurm_template_is_valid_shell() -> None:
    script = ROOT / "deploy" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "-m draftline train" in script.read_text()


def test_the_kubernetes_job_starts_as_many_ranks_as_its_recipe_plans() -> None:
    service, job = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    assert container["args"][container["args"].index("-m") :][:3] == ["-m", "draftline", "train"]


def test_the_image_copies_what_exists() -> None:
    copied = [
        word
        for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY")
        for word in line.split()[1:-1]
    ]
    assert copied and [word for word in copied if not Path(ROOT / word).exists()] == []
