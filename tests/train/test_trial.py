"""The trial step: what it takes back, and where it keeps that meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import save_target
from draftline.config import load_recipe
from draftline.monitor.notices import Notices, stdout_console
from draftline.train import footprint
from draftline.train.job import Job, assemble_alone
from draftline.train.trial import kept_bytes, prove_trial, taken_back
from runs import write_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    home = tmp_path_factory.mktemp("trial")
    save_target(home / "target")
    return assemble_alone(load_recipe(write_recipe(home)), Notices(stdout_console()))


def state_of(job: Job) -> dict[str, torch.Tensor]:
    weights = {name: p.detach().clone() for name, p in job.drafter.named_parameters()}
    gradients = {f"{name} grad": p.grad.clone() for name, p in job.drafter.named_parameters() if p.grad is not None}
    return weights | gradients | {name: value.clone() for name, value in job.optimizer.state_tensors().items()}


@pytest.mark.parametrize("steps", [0, 2])
def test_weights_gradients_moments_and_steps_come_back(job: Job, steps: int) -> None:
    """Of a new optimizer, and of one in the middle of a run with a gradient half made."""
    batch = job.features.get(0)
    with taken_back(job.drafter, job.optimizer, CPU):
        for _ in range(steps):
            job.optimizer.finish(job.step.forward_backward(batch).weight_sum)
        if steps:
            job.step.forward_backward(batch)
        before = state_of(job)
        parameters = len(list(job.drafter.parameters()))
        assert len(before) == (parameters if not steps else parameters * (1 + 1 + 3))  # AdamW: two moments and a count
        sizes = [value.nbytes for value in before.values()]
        assert kept_bytes(job.drafter, job.optimizer) == sum(sizes)
        said = prove_trial(job.step, job.optimizer, batch, CPU)
        assert said.endswith("every tensor moves; taken back")
        after = state_of(job)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert job.optimizer.steps_done == steps
    assert job.optimizer.steps_done == 0 and not job.optimizer.state_tensors()


def test_copies_stay_on_the_device_only_where_they_fit_beside_the_peak(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    there = replace(job, setting=replace(job.setting, target=replace(job.target, device=gpu)))
    need = footprint.predict(there).peak + sum(p.nbytes for p in job.drafter.parameters())
    for free, where in ((need, gpu), (need - 1, CPU)):
        monkeypatch.setattr(footprint, "free_memory_bytes", lambda device, free=free: free)
        assert footprint.copies_on(there) == where
