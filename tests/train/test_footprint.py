"""Predicted memory and disk against what a run really takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from builders import save_target
from drafter_samples import make_spec, random_drafter
from draftline.config import load_recipe
from draftline.errors import InputError
from draftline.monitor.notices import Notices, stdout_console
from draftline.train.footprint import disk_bytes, predict, prove_memory
from draftline.train.job import Job, assemble_alone
from draftline.train.prediction import count, memory_bytes, read_target_shape
from draftline.train.step_memory import Footprint, Sizes, footprint, weights_bytes
from runs import write_recipe

FACTOR = 2.0  # the prediction may be so many times off, either way


def job_of(home: Path, **train: object) -> Job:
    save_target(home / "target", hidden_size=128, intermediate_size=256, max_position_embeddings=512)
    sizes = {"layers": 2, "block_size": 8, "taps": [0, 2]}
    values = {"rows_per_step": 4, "rows_per_micro_batch": 4, "anchors": 96, "epochs": 60, "max_steps": 3}
    recipe = write_recipe(home, train=values | train, drafter=sizes, data={"sequence_length": 384})
    return assemble_alone(load_recipe(recipe), Notices(stdout_console()))


def resident_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read and reset through /proc")
def test_the_predicted_peak_is_near_the_measured_one(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = resident_bytes("VmRSS")
    for step in range(2):
        micro = job.step.forward_backward(job.features.get(step))
        job.optimizer.finish(micro.weight_sum)
    measured, predicted = resident_bytes("VmHWM") - before, predict(job).peak
    assert measured > 150e6
    assert measured / FACTOR < predicted < measured * FACTOR, (measured / 1e6, predicted / 1e6, predict(job))


def test_masters_gradients_and_moments_are_counted_exactly(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    need = predict(job)
    micro = job.step.forward_backward(job.features.get(0))
    assert need.gradients == sum(p.grad.nbytes for p in job.drafter.parameters())
    job.optimizer.finish(micro.weight_sum)
    moments = [value for name, value in job.optimizer.state_tensors().items() if not name.endswith("step")]
    assert need.moments == sum(value.nbytes for value in moments)
    batch = job.features.get(0)
    assert need.features == 2 * (batch.taps.nbytes + batch.final.nbytes)


def test_the_plan_and_the_preflight_predict_the_same(tmp_path: Path) -> None:
    """One from the target's folder and the recipe, the other from the loaded job."""
    job = job_of(tmp_path)
    shape = read_target_shape(job.recipe.target.path)
    assert shape is not None
    plan = job.ranks.plan
    parts = memory_bytes(plan.roles[0], plan, count(job.recipe, shape, "cpu"))
    need, masters = predict(job), sum(p.nbytes for p in job.drafter.parameters())
    target = sum(p.nbytes for p in job.target.model.parameters())
    assert parts["drafter"] == masters + need.gradients + need.moments
    assert sum(parts.values()) - parts["target"] == masters + need.peak
    assert target <= parts["target"] < target + 20_000  # the file's header


@pytest.mark.parametrize("bias", [False, True])
def test_a_spread_drafter_takes_a_part_of_12_bytes_and_6(bias: bool) -> None:
    spec = make_spec(attention_bias=bias)
    drafter = random_drafter(spec)
    matrices = sum(p.numel() for p in drafter.parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in drafter.parameters() if p.dim() == 1)

    def held(item_bytes: int, on_cuda: bool, spread: int) -> int:
        sizes = Sizes(spec, 1, 8, 2, item_bytes, on_cuda, True, 48, spread)
        need = footprint(sizes)
        return weights_bytes(sizes) + need.gradients + need.moments

    assert held(2, True, 1) == 18 * matrices + 16 * vectors
    assert held(2, True, 4) == (12 + 4) * matrices // 4 + (4 + 2) * matrices + 16 * vectors
    assert held(4, False, 1) == 16 * (matrices + vectors)
    assert held(4, False, 4) == (8 + 4) * matrices // 4 + (4 + 4) * matrices + 16 * vectors


def test_capture_and_step_are_never_alive_at_once() -> None:
    assert Footprint(1, 2, 4, 100, 50, 120).peak == 1 + 2 + 4 + 150
    assert Footprint(1, 2, 4, 100, 50, 170).peak == 1 + 2 + 4 + 170


def test_disk_need_is_what_checkpoints_and_export_take(tmp_path: Path) -> None:
    from command import draftline_here

    recipe = write_recipe(tmp_path, train={"keep_checkpoints": 1})
    assert draftline_here("train", recipe).code == 0
    run = tmp_path / "run"
    taken = 2 * sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    taken += 2 * sum(file.stat().st_size for file in (run / "export").iterdir())
    need = disk_bytes(assemble_alone(load_recipe(recipe), Notices(stdout_console())))
    assert taken < need < taken + 5 * 2**20  # 1 MiB of room for each of the JSON files and headers


def test_a_run_that_does_not_fit_is_refused_with_its_parts(tmp_path: Path) -> None:
    job = job_of(tmp_path, anchors=10**8)
    with pytest.raises(InputError, match="expected [0-9.]+ GiB of memory beside what is loaded .*, found [0-9.]+ GiB"):
        prove_memory(job)
