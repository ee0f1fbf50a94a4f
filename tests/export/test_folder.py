import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_samples import MIXED, PROVENANCE, SPEC, make_export, random_tensors
from torch import Tensor

from draftline.errors import InputError, RunError
from draftline.export import layout
from draftline.export.folder import detect_format, publish, read_drafter, read_spec, record_tau
from draftline.records import DrafterSpec, EvalReport


def largest_difference(wanted: dict[str, Tensor]) -> Any:
    """Stands for the logit difference: a callable of the same form over the tensors themselves."""

    def compare(spec: DrafterSpec, tensors: dict[str, Tensor]) -> float:
        return max(float((tensors[name].float() - wanted[name]).abs().max()) for name in wanted)

    return compare


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("folder_format", ["reference", "speculators"])
def test_an_export_holds_four_files_and_reads_back(tmp_path: Path, folder_format: Any) -> None:
    export = make_export(format=folder_format)
    publish(tmp_path / "runs" / "drafter", export, largest_difference(export.tensors))
    folder = tmp_path / "runs" / "drafter"
    assert names(folder) == ["README.md", "config.json", "draftline.json", "model.safetensors"]
    assert names(folder.parent) == ["drafter"]
    assert detect_format(folder) == folder_format
    assert read_drafter(folder)[0] == read_spec(folder) == replace(SPEC, is_causal=False)


def test_provenance_is_written_beside(tmp_path: Path) -> None:
    export = make_export(MIXED)
    publish(tmp_path / "d", export, largest_difference(export.tensors))
    tree = json.loads((tmp_path / "d" / "draftline.json").read_text())
    assert tree.pop("versions").keys() == {"draftline", "python", "safetensors", "torch", "transformers"}
    assert tree == {
        "producer": "draftline",
        "format": "reference",
        "target_name": "org/target",
        "target_revision": "abc123",
        "label_source": "ce",
        "template_hash": "t-hash",
        "thinking": False,
        "data_hash": "d-hash",
        "products": "plain",
        "block_size": 8,
        "target_layer_ids": [1, 3, 5],
        "tap_convention": "0-based outputs of decoder layers, before the final norm",
        "window_rule": "context p < a, in sliding layers also p > a + j - 32; "
        "inside the block causal in sliding layers, bidirectional in full layers",
        "tau": [],
        "engine_notes": [],
    }


@pytest.mark.parametrize("difference", [1e-9, float("nan")])
def test_a_drafter_that_reads_back_differently_leaves_nothing(tmp_path: Path, difference: float) -> None:
    with pytest.raises(RunError, match="logits differ from the live one's"):
        publish(tmp_path / "d", make_export(), lambda spec, tensors: difference)
    assert names(tmp_path) == []


def test_the_comparison_sees_what_was_written(tmp_path: Path) -> None:
    export = make_export(dtype=torch.bfloat16)
    compare = largest_difference(export.tensors)
    with pytest.raises(RunError, match="allowed 0"):
        publish(tmp_path / "d", export, compare)
    publish(tmp_path / "d", export, compare, tolerance=1e-3)
    assert read_drafter(tmp_path / "d")[1]["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_bit_that_reads_back_otherwise_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str
) -> None:
    """Also of a zero, whose sign no logit shows."""
    export = make_export(dtype=dtype)
    export.tensors[name].view(-1)[0] = 0.0
    right = layout.save_file

    def save(tensors: dict[str, Tensor], *rest: Any, **named: Any) -> None:
        right(tensors | {name: torch.where(tensors[name] == 0, -tensors[name], tensors[name])}, *rest, **named)

    monkeypatch.setattr(layout, "save_file", save)
    with pytest.raises(RunError, match=f"the exported {name} reads back with other bits"):
        publish(tmp_path / "d", export, lambda spec, tensors: 0.0)
    assert names(tmp_path) == []


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    for seed in (0, 1):
        export = make_export(seed=seed)
        publish(tmp_path / "d", export, largest_difference(export.tensors))
    assert names(tmp_path) == ["d"]
    assert torch.equal(read_drafter(tmp_path / "d")[1]["fc.weight"], random_tensors(SPEC, seed=1)["fc.weight"])


def test_a_failed_replacement_keeps_the_earlier_export(tmp_path: Path) -> None:
    publish(tmp_path / "d", make_export(), lambda spec, tensors: 0.0)
    with pytest.raises(RunError):
        publish(tmp_path / "d", make_export(seed=1), lambda spec, tensors: 1.0)
    assert names(tmp_path) == ["d"]
    assert torch.equal(read_drafter(tmp_path / "d")[1]["fc.weight"], random_tensors(SPEC)["fc.weight"])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"exists and is not an earlier draftline export \(no draftline\.json\)"):
        publish(tmp_path, make_export(), lambda spec, tensors: 0.0)
    assert names(tmp_path) == ["notes.txt"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    publish(tmp_path / "d", make_export(), lambda spec, tensors: 0.0)
    assert names(tmp_path) == ["d"]


FULL_DISK = """
import resource
from pathlib import Path
from export_samples import make_export
from draftline.errors import RunError
from draftline.export.folder import publish
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    publish(Path(sys.argv[1]), make_export(), lambda spec, tensors: 0.0)
except RunError as error:
    print(error)
"""


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """A file-size limit of 8 KiB lets config.json through and stops the weights, as a full disk would."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}\n{FULL_DISK}", str(tmp_path / "d")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"export to {tmp_path / 'd'} failed, nothing there was changed" in done.stdout
    assert names(tmp_path) == []


def report(tau: float) -> EvalReport:
    return EvalReport(
        benchmark="gsm8k",
        engine="vllm 0.1",
        tau=tau,
        slot_acceptance=(0.5,) * 7,
        prompts=3,
        verify_steps=10,
        tokens=30,
        temperature=0.0,
        thinking=False,
        block_size=8,
        max_new_tokens=64,
        tokens_per_s=30.0,
        plain_tokens_per_s=20.0,
    )


def test_measured_tau_is_recorded_in_json_and_card(tmp_path: Path) -> None:
    publish(tmp_path / "d", make_export(), lambda spec, tensors: 0.0)
    assert "Not measured yet." in (tmp_path / "d" / "README.md").read_text()
    record_tau(tmp_path / "d", [report(2.25), report(3.5)])
    record_tau(tmp_path / "d", [report(2.264)])
    tree = json.loads((tmp_path / "d" / "draftline.json").read_text())
    assert [entry["tau"] for entry in tree["tau"]] == [2.264]
    card = (tmp_path / "d" / "README.md").read_text()
    assert "| gsm8k | vllm 0.1 | 0 | off | 3 | 64 | 2.26 | 1.50x |" in card
    assert "Not measured yet." not in card
    assert names(tmp_path / "d") == ["README.md", "config.json", "draftline.json", "model.safetensors"]


def test_the_card_gives_both_engines_their_own_count(tmp_path: Path) -> None:
    """vLLM counts drafted tokens (B-1), SGLang the block (B)."""
    export = make_export(provenance=replace(PROVENANCE, target_name="my target"))
    publish(tmp_path / "d", export, lambda spec, tensors: 0.0)
    card = (tmp_path / "d" / "README.md").read_text()
    assert "vllm serve 'my target' --speculative-config" in card
    assert '"num_speculative_tokens": 7' in card
    assert "--model-path 'my target'" in card
    assert "--speculative-num-draft-tokens 8" in card


def test_tau_is_recorded_only_in_an_export(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"draftline\.json: No such file"):
        record_tau(tmp_path, [report(2.0)])


def test_another_model_is_no_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(InputError, match=r"not a DFlash drafter: architectures is \['Qwen3ForCausalLM'\]"):
        read_drafter(tmp_path)
