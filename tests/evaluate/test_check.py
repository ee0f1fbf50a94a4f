"""`draftline check` with faults put in, one at a time: the gate that must notice is the gate that fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import open_target, save_target
from command import Done, draftline_here
from draftline.decode.models import CachedTarget
from draftline.drafter.model import Drafter
from draftline.errors import InputError
from draftline.evaluate.check import answered, prompt_ids, prove_decoding
from draftline.export.folder import read_drafter
from draftline.target.load import Target
from draftline.train.publishing import export_command

UNTIED = {"tie_word_embeddings": False, "vocab_size": 19}  # with this seed the greedy answers are no repetitions
OPENED = ["loads", "prompts"]
FOLDER_GATES = ["reloads", "geometry", "origin", "tensors"]
PROOFS = [
    "rows",
    "supervision", "loss mask", "template", "mask token", "stream", "taps", "features", "head", "cache", "embedding",
    "RoPE", "context", "anchor state", "own answers", "other blocks", "other documents", "labels", "decoding logits",
]  # fmt: skip
PAIR_GATES = [*OPENED, *FOLDER_GATES, *PROOFS, "decoding"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter that has learned the target's answers to check's own questions by heart."""
    home = tmp_path_factory.mktemp("check")
    target = open_target(save_target(home / "target", seed=3, **UNTIED))
    rows = []
    for conversation in answered(target, prompt_ids(target)):
        messages = [conversation.messages[0], {"role": "assistant", "content": "w0"}]
        row = {"messages": messages, "answer_ids": conversation.answer_ids, "finished": conversation.finished}
        rows.append(json.dumps(row))
    (home / "data.jsonl").write_text("\n".join(rows))
    words = ["data.sequence_length=64", "drafter.layers=1", "drafter.block_size=8", "drafter.taps=[0, 2]"]
    words += ["train.epochs=160", "train.rows_per_step=4", "train.anchors=24", "optim.lr=1.0e-2"]
    words += ["loss.kind=ce", "loss.weights=exponential"]  # learned by heart soonest
    (home / "recipe.yaml").write_text(
        f"target: {{path: {home / 'target'}}}\ndata: {{train: {home / 'data.jsonl'}}}\ntrain: {{out: {home / 'run'}}}\n"
    )
    done = draftline_here("train", home / "recipe.yaml", *words)
    assert done.code == 0, done.err
    return home


@pytest.fixture
def draft(home: Path, tmp_path: Path) -> Path:
    """A copy of the good drafter, to be spoilt."""
    return Path(shutil.copytree(home / "run" / "export", tmp_path / "draft"))


def gates_of(done: Done) -> list[tuple[str, str]]:
    return [
        (name.strip(), verdict) for verdict, name in re.findall(r"^  (ok|FAIL)  +(.{1,16})", done.out, re.MULTILINE)
    ]


def tau_of(done: Done) -> float:
    match = re.search(
        r"^  ok    decoding +tau ([0-9.]+), same text as plain decoding on 4 of 4", done.out, re.MULTILINE
    )
    assert match, done.out + done.err
    return float(match[1])


def change_config(draft: Path, **changes: object) -> None:
    tree = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(tree | changes))


def change_dflash(draft: Path, **changes: object) -> None:
    tree = json.loads((draft / "config.json").read_text())
    change_config(draft, dflash_config=tree["dflash_config"] | changes)


def change_tensor(draft: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, draft / "model.safetensors")


def test_a_good_pair_passes_every_gate_in_both_formats(home: Path, tmp_path: Path) -> None:
    done = draftline_here("check", home / "target", home / "run" / "export")
    assert done.code == 0, done.err
    assert gates_of(done) == [(name, "ok") for name in PAIR_GATES]
    assert "Qwen3ForCausalLM, 44,640 parameters, float32, cpu" in done.out
    assert "4 questions of 11, 11, 25, 8 tokens" in done.out
    assert "these weights" in done.out and "not these weights" not in done.out
    assert tau_of(done) > 5
    [checkpoint] = (home / "run" / "checkpoints").iterdir()
    export_command(checkpoint, tmp_path / "speculators", "speculators")
    other = draftline_here("check", home / "target", tmp_path / "speculators")
    assert tau_of(other) == tau_of(done)


def test_a_target_alone(home: Path) -> None:
    done = draftline_here("check", home / "target")
    assert (done.code, gates_of(done)) == (0, [(name, "ok") for name in [*OPENED, "drafter shape", *PROOFS]])


Spoil = Callable[[Path], None]
SPOILT: list[tuple[str, Spoil, list[str]]] = [
    (
        "RoPE",
        lambda draft: change_config(
            draft, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
        ["expected the target's RoPE", "5000.0", "found", "10000.0", "likely a default base"],
    ),
    (
        "mask token",
        lambda draft: change_dflash(draft, mask_token_id=3),
        ["mask_token_id 3 is '<|im_end|>'", "free ids: 4"],
    ),
    ("reloads", lambda draft: change_dflash(draft, mask_token_id=19), ["mask_token_id 19 must be below vocab_size 19"]),
    (
        "origin",
        lambda draft: change_dflash(draft, target_layer_ids=[1, 3]),
        ["draftline.json: expected target_layer_ids [0, 2], found [1, 3]", "config.json edited by hand"],
    ),
    ("geometry", lambda draft: change_config(draft, num_target_layers=6), ["num_target_layers: drafter 6, target 4"]),
    (
        "tensors",
        lambda draft: change_tensor(draft, "layers.0.mlp.up_proj.weight", torch.zeros_like),
        ["layers.0.mlp.up_proj.weight: expected values, found zeros only", "not loaded"],
    ),
    (
        "tensors",
        lambda draft: change_tensor(draft, "norm.weight", lambda old: old / 0),
        ["norm.weight: expected finite values, found 32 that are not"],
    ),
    (
        "reloads",
        lambda draft: change_tensor(draft, "fc.weight", lambda old: old[:, :-1].contiguous()),
        ["fc.weight has shape [32, 63], the config needs [32, 64]"],
    ),
]


@pytest.mark.parametrize(("gate", "spoil", "said"), SPOILT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_spoilt_drafter_fails_at_its_gate(home: Path, draft: Path, gate: str, spoil: Spoil, said: list[str]) -> None:
    spoil(draft)
    done = draftline_here("check", home / "target", draft)
    passed = PAIR_GATES[: PAIR_GATES.index(gate)]
    assert done.code == 2
    assert gates_of(done) == [(name, "ok") for name in passed] + [(gate, "FAIL")]
    assert f"error: gate {gate!r}: " in done.err
    assert [part for part in said if part not in done.err] == []


def test_taps_off_by_one_show_in_tau_where_nothing_is_recorded(home: Path, draft: Path) -> None:
    """Shapes fit and no gate can fail: without draftline.json only tau shows it, and check says so."""
    good = tau_of(draftline_here("check", home / "target", draft))
    change_dflash(draft, target_layer_ids=[1, 3])
    (draft / "draftline.json").unlink()
    done = draftline_here("check", home / "target", draft)
    assert "no draftline.json: taps show only in tau" in done.out
    assert good > 5 and tau_of(done) < good / 2


def test_a_drafter_of_another_target(home: Path, tmp_path: Path) -> None:
    wider = draftline_here("check", save_target(tmp_path / "wider", hidden_size=48, **UNTIED), home / "run" / "export")
    assert (wider.code, gates_of(wider)[-1]) == (2, ("geometry", "FAIL"))
    assert "was not made for target" in wider.err and "hidden_size: drafter 32, target 48" in wider.err
    same_shape = draftline_here("check", save_target(tmp_path / "other", seed=1, **UNTIED), home / "run" / "export")
    assert same_shape.code == 0
    assert "not these weights" in same_shape.out and tau_of(same_shape) < 1.5


def test_a_target_with_a_layer_that_does_nothing(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = draftline_here("check", folder)
    assert (done.code, gates_of(done)[-1]) == (2, ("taps", "FAIL"))
    assert "gate 'taps': layer 2: expected an output of its own, found that of layer 1 again" in done.err


@pytest.fixture(scope="module")
def target(home: Path) -> Target:
    return open_target(home / "target")


def test_a_target_whose_cache_takes_nothing_back(home: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = read_drafter(home / "run" / "export")
    drafter, prompts = Drafter(spec), prompt_ids(target)  # untrained: nearly every draft has to be taken back
    assert prove_decoding(target, drafter, prompts).startswith("tau ")
    monkeypatch.setattr(CachedTarget, "drop_last", lambda self, count: None)
    with pytest.raises(InputError, match="expected plain decoding's text on 4 questions, found it on"):
        prove_decoding(target, drafter, prompts)
