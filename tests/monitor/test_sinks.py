"""Sinks that really receive: TensorBoard's files read back, Prometheus scraped over HTTP, wandb and trackio where they
are installed."""

from __future__ import annotations

import importlib.util
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from draftline.config import MonitorSection
from draftline.errors import InputError
from draftline.monitor.events import Alarm, EventLog, LoggedEvent, Phases, Step
from draftline.monitor.prometheus import PrometheusSink, metric
from draftline.monitor.sinks import Sinks, require, scalars
from draftline.records import StepReport

STEP = StepReport(7, 1.5, 2.25, (0.5, 0.25), 64, 4096, 2048, 0.75, 6e-4, 0.5)
TIMES = Phases(7, "drafter", 0.5, {"get": 0.125, "forward": 0.25}, 4096, 0, 0, 3)


def test_the_numbers_of_a_step() -> None:
    assert scalars(LoggedEvent(1.0, 0, Step(STEP))) == {
        "loss": 1.5, "proxy_tau": 2.25, "grad_norm": 0.75, "lr": 6e-4, "tokens_per_s": 8192.0, "step_seconds": 0.5,
        "slot_accuracy/1": 0.5, "slot_accuracy/2": 0.25,
    }  # fmt: skip


def test_tensorboard_reads_back_what_the_log_was_given(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks(MonitorSection(sinks=("tensorboard",)), tmp_path, {})
    with EventLog(tmp_path / "events.jsonl", listeners=(sinks,)) as log:
        log.write(Step(STEP))
        log.write(TIMES)
    sinks(LoggedEvent(time.time(), 3, TIMES))
    sinks.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {"loss", "proxy_tau", "phase_seconds/get", "rank3/phase_seconds/get"} <= set(read.Tags()["scalars"])
    [loss] = read.Scalars("loss")
    assert (loss.step, loss.value) == (7, 1.5)
    [get] = read.Scalars("rank3/phase_seconds/get")
    assert (get.step, get.value) == (7, 0.125)


def test_prometheus_serves_the_newest_values_of_all_ranks(tmp_path: Path) -> None:
    sinks = Sinks(MonitorSection(sinks=("prometheus",), prometheus_port=0), tmp_path, {})
    for rank, event in [(0, Step(STEP)), (0, TIMES), (3, TIMES), (0, Alarm("a", "b", "c")), (0, Alarm("a", "b", "c"))]:
        sinks(LoggedEvent(1.0, rank, event))
    [url] = sinks.places().values()
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = reply.read().decode().splitlines()
    assert 'draftline_loss{rank="0"} 1.5' in lines
    assert 'draftline_phase_seconds{rank="3",part="get"} 0.125' in lines
    assert 'draftline_alarms_total{rank="0"} 2' in lines
    assert lines.count("# TYPE draftline_phase_seconds gauge") == 1
    assert "# TYPE draftline_alarms_total counter" in lines
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.replace("metrics", "other"))
    sinks.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


def test_a_label_is_escaped() -> None:
    assert metric('tau/my "set"', 0) == ("draftline_tau", 'rank="0",part="my \\"set\\""')


def test_a_port_in_use_is_bad_input() -> None:
    first = PrometheusSink(0, scalars)
    port = int(first.url.split(":")[2].split("/")[0])
    with pytest.raises(InputError, match=f"monitor.prometheus_port {port}: Address already in use"):
        PrometheusSink(port, scalars)
    first.close()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_sink_that_is_not_installed_is_refused_before_anything_starts(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(InputError) as caught:
        require((name,))
    assert caught.value.remedy == f"pip install 'draftline[{name}]', or take it out"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed (an optional extra)")
def test_wandb_offline_keeps_the_run_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = Sinks(MonitorSection(sinks=("wandb",)), tmp_path, {"train": {"seed": 0}})
    sinks(LoggedEvent(1.0, 0, Step(STEP)))
    sinks.close()
    [kept] = tmp_path.rglob("*.wandb")
    assert b"proxy_tau" in kept.read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed (an optional extra)")
def test_trackio_keeps_the_run_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    sinks = Sinks(MonitorSection(sinks=("trackio",)), tmp_path, {"train": {"seed": 0}})
    sinks(LoggedEvent(1.0, 0, Step(STEP)))
    sinks.close()
    assert any((tmp_path / "trackio").rglob("*"))


def test_the_recipe_names_its_sinks() -> None:
    assert MonitorSection.model_validate({"sinks": ["tensorboard"]}).sinks == ("tensorboard",)
    assert json.loads(MonitorSection().model_dump_json())["sinks"] == []
