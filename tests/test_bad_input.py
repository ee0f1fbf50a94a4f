"""Input that a person got wrong: the verb says what, where and what to do, ends with 2, and shows no traceback.

`draftline_here` lets every exception but SystemExit through, so a traceback fails the test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from builders import save_target, word_tokenizer
from command import Done, draftline_here
from draftline.config import load_recipe
from runs import write_recipe, write_rows

GOOD_ROW = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3 w4"}]}
OPEN_ROW = {"messages": [{"role": "user", "content": "w1"}]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, data, a finished run with its export; every test only reads it."""
    home = tmp_path_factory.mktemp("bad")
    done = draftline_here("train", write_recipe(home))
    assert done.code == 0, done.err
    save_target(home / "wider", hidden_size=48)
    (home / "file").write_text("no folder")
    (home / "empty").mkdir()
    return home


def refused(done: Done, *said: str, code: int = 2) -> None:
    assert done.code == code, done.out + done.err
    message = done.err[done.err.rindex("error: ") :]
    assert [part for part in said if part not in message] == [], message


def train(home: Path, *overrides: str) -> Done:
    """A new run with home's recipe; it must be refused before anything is written."""
    run = home / "refused"
    done = draftline_here("train", home / "recipe.yaml", f"train.out={run}", *overrides)
    assert not any(path.is_file() for path in run.rglob("*"))
    return done


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ["recipe.yaml: No such file or directory", "readable YAML file"]),
        (b"target: [\n", ["recipe.yaml: not valid YAML", "line 2, column 1"]),
        (b"\xff\xfe", ["recipe.yaml: not UTF-8 text"]),
        (b"", ["recipe.yaml: a recipe is a mapping of sections", "`target:` and `data:`"]),
        (b"- target\n", ["a recipe is a mapping of sections"]),
        (b"target: {path: t}\n", ["  data: must be given"]),
        (b"target: t\ndata: {train: d}\n", ["  target: a section is a mapping of keys, got 't'"]),
        (b"target: {path: t, 3: 4}\ndata: {train: d}\n", ["  target.3: a key is a word, got 3"]),
        (
            b"target: {path: t, dtpye: auto}\ndata: {train: d}\ntrian: {}\n",
            [
                "  target.dtpye: unknown key; allowed here: device_map, dtype, features, keep_features_gib, path",
                "  trian: unknown key; allowed here: data, drafter, eval, export, loss, monitor, optim, overrides",
            ],
        ),
        (
            b"target: {path: 3}\ndata: {train: []}\n",
            ["  target.path: Input should be a valid string, got 3", "  data.train"],
        ),
    ],
)
def test_recipe_file(tmp_path: Path, content: bytes | None, said: list[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    if content is not None:
        recipe.write_bytes(content)
    refused(draftline_here("train", recipe), *said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.epochs", ["override 'train.epochs' is not of the form section.key=value"]),
        ("epochs=3", ["override 'epochs=3' is not of the form section.key=value"]),
        ("train.epochs=[", ["override 'train.epochs=[': the value is not valid YAML"]),
        ("train.epochs=many", ["train.epochs: Input should be a valid integer, got 'many'"]),
        ("train.epochs=1.5", ["train.epochs: Input should be a valid integer, got 1.5"]),
        (
            "optim.lr=6e-4",
            ["optim.lr: Input should be a valid number", "'6e-4' (YAML reads 6e-4 as text: write 6.0e-4)"],
        ),
        ("optim.lr=.inf", ["optim.lr: Input should be a finite number, got inf"]),
        ("optim.betas=[2.0, 0.9]", ["optim.betas.0: Input should be less than 1, got 2.0"]),
        ("data.train=3", ["data.train: must be a list, got 3"]),
        ("data.train=[]", ["data.train: the list must not be empty"]),
        ("drafter.taps=[]", ["drafter.taps: the list must not be empty"]),
        ("drafter.taps=[3, 1]", ["taps [3, 1] must be ascending and distinct"]),
        ("drafter.taps=[0, 4]", ["drafter.taps [0, 4]: the target has layers 0..3", "0-based"]),
        ("drafter.hidden_size=64", ["drafter.hidden_size 64 differs from the target's 32", "leave hidden_size out"]),
        ("drafter.head_dim=7", ["drafter.head_dim 7: RoPE turns 7 of its dimensions, and must turn pairs"]),
        ("drafter.attention_heads=3", ["drafter.attention_heads 3 must be a multiple of drafter.key_value_heads 2"]),
        ("drafter.mask_token_id=3", ["drafter.mask_token_id 3 is '<|im_end|>'", "free ids: 19, 20"]),
        ("drafter.mask_token_id=32", ["drafter.mask_token_id 32 has no embedding row: the target has 32"]),
        ("train.rows_per_micro_batch=3", ["rows_per_step 4 must be a multiple of rows_per_micro_batch 3"]),
        ("train.rows_per_step=400", ["packed rows in 3 epochs, and one step takes train.rows_per_step 400"]),
        ("data.template_kwargs={tokenize: true}", ["data.template_kwargs sets tokenize, which draftline itself sets"]),
        ("eval.prompts=/absent.jsonl", ["/absent.jsonl: No such file or directory"]),
        ("target.revision=main", ["target.revision main", "is a folder, which has no revisions"]),
    ],
)
def test_recipe_values(home: Path, words: str, said: list[str]) -> None:
    refused(train(home, words), *said)


def test_a_block_size_without_a_published_gamma(home: Path) -> None:
    """Exponential weights need it; D-PACE weights, the default, do not."""
    said = "drafter.block_size 12 has no published gamma (4 for 8, 5 for 10, 7 for 16): set loss.gamma"
    refused(train(home, "drafter.block_size=12", "loss.weights=exponential"), said)
    assert load_recipe(home / "recipe.yaml", ["drafter.block_size=12"]).gamma is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fault is to have no CUDA device")
def test_cuda_where_there_is_none(home: Path) -> None:
    refused(train(home, "placement.device=cuda"), "placement.device is cuda, but torch sees no CUDA device")


def test_an_export_format_that_cannot_hold_the_drafter_is_refused_before_training(home: Path) -> None:
    words = ["drafter.layers=2", "drafter.sliding_window=8", "drafter.sliding_layers=[1]"]
    refused(train(home, "export.format=speculators", *words), "export.format speculators: the drafter mixes")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ["data.jsonl: No such file or directory"]),
        ("", ["data.jsonl: the file holds no rows"]),
        ("\n\n", ["data.jsonl: the file holds no rows"]),
        (
            json.dumps(GOOD_ROW) + '\n{"messages": [\n',
            ["data.jsonl:2: not valid JSON", "one complete JSON object per line"],
        ),
        ('{"text": "x"}\n', ["data.jsonl:1: a row has `messages`", "this one has text"]),
        (
            (json.dumps(OPEN_ROW) + "\n") * 3,
            ["3 of 3 conversations (100.0%) cannot be trained on", "3 unusable: no assistant turn"],
        ),
        (
            (json.dumps(GOOD_ROW) + "\n") * 3 + json.dumps(OPEN_ROW) + "\n",
            ["1 of 4 conversations (25.0%) cannot be trained on, the limit data.max_unusable_share is 20.0%"],
        ),
    ],
)
def test_data_files(home: Path, tmp_path: Path, content: str | None, said: list[str]) -> None:
    data = tmp_path / "data.jsonl"
    if content is not None:
        data.write_text(content)
    refused(train(home, f"data.train={data}"), *said)


def test_a_folder_as_data(home: Path) -> None:
    refused(train(home, f"data.train={home}"), f"{home}: Is a directory")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without(pattern: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return remove


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def untied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def other_family(folder: Path) -> None:
    shutil.rmtree(folder)
    shape = {"vocab_size": 32, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=3, eos_token_id=3)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shutil.rmtree, ["target: no such folder", "hub id org/name"]),
        (without("config.json"), ["holds no config.json"]),
        (only_pickles, ["holds no safetensors weights, and draftline never unpickles", "save_pretrained"]),
        (truncate, ["target.path", "incomplete metadata, file not fully covered", "is the folder complete"]),
        (write("config.json", "{"), ["target.path", "is not a valid JSON file"]),
        (
            write("config.json", '{"model_type": "absent"}'),
            ["model type `absent`", "known to the installed transformers"],
        ),
        (other_family, ["target family gpt2: its config has no rope_parameters", "without them is not supported"]),
        (
            change_tensors(lambda tensors: tensors.pop(UP)),
            [f"1 tensors of the model are not in its safetensors files: {UP}"],
        ),
        (
            change_tensors(lambda tensors: tensors.update({UP: torch.ones(3, 3)})),
            [f"{UP} (shape [3, 3], not [48, 32])"],
        ),
        (untied, ["lm_head.weight (missing)"]),
        (without("token*"), ["its tokenizer has no vocabulary", "tokenizer.json"]),
        (without("chat_template.jinja"), ["has no chat template", "chat_template.jinja"]),
        (write("chat_template.jinja", "{{ raise_exception('never') }}"), ["24 unusable: template refused: never"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_target_folders(home: Path, tmp_path: Path, spoil: Callable[[Path], None], said: list[str]) -> None:
    folder = Path(shutil.copytree(home / "target", tmp_path / "target"))
    spoil(folder)
    refused(train(home, f"target.path={folder}"), *said)


def test_a_file_as_target(home: Path) -> None:
    refused(train(home, f"target.path={home / 'file'}"), "file: is a file, not a folder")


def test_a_hub_id_without_a_hub(home: Path) -> None:
    """In a process of its own: the variable is read when the hub's library is imported."""
    command = [sys.executable, "-m", "draftline", "train", str(home / "recipe.yaml"), f"train.out={home / 'hub'}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = ["target.path=draftline-nobody/nothing"]
    done = subprocess.run(command + words, capture_output=True, text=True, check=False, env=environment)
    refused(
        Done(done.returncode, done.stdout, done.stderr),
        "target.path draftline-nobody/nothing: no such folder, and as a hub id: ",
        "a hub id needs a reachable hub",
    )
    assert "Traceback" not in done.stderr


def test_run_folders(home: Path) -> None:
    recipe = home / "recipe.yaml"
    refused(draftline_here("train", recipe), "run already holds files", "go on with --resume, or name another folder")
    fresh = draftline_here("train", recipe, f"train.out={home / 'fresh'}", "--resume")
    refused(fresh, "fresh holds no checkpoints to resume from", "start the run without --resume")
    assert not (home / "fresh").exists()
    refused(draftline_here("train", recipe, f"train.out={home / 'file'}"), "file is a file", "name a folder")
    below = draftline_here("train", recipe, f"train.out={home / 'file' / 'run'}")
    refused(below, "train.out", "file/run: Not a directory", "writable disk")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_folder_without_the_right_to_write(home: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = draftline_here("train", home / "recipe.yaml", f"train.out={tmp_path / 'run'}")
    refused(done, "run: Permission denied", "name a folder on a writable disk")


def test_a_refused_run_leaves_its_folder_free(home: Path) -> None:
    out = f"train.out={home / 'second'}"
    refused(draftline_here("train", home / "recipe.yaml", out, "drafter.taps=[0, 9]"), "drafter.taps")
    assert draftline_here("train", home / "recipe.yaml", out, "train.max_steps=1").code == 0


def test_checkpoints_to_export(home: Path, tmp_path: Path) -> None:
    checkpoint, out = home / "run" / "checkpoints" / "step-0000008", tmp_path / "out"
    refused(draftline_here("export", home / "target", out), "target: state.json is missing", "RUN/checkpoints/step-")
    refused(draftline_here("export", tmp_path / "absent", out), "absent: state.json is missing")
    spoilt = Path(shutil.copytree(checkpoint, tmp_path / "spoilt"))
    (spoilt / "state.json").write_text("{}")
    refused(draftline_here("export", spoilt, out), "state.json lacks step, spec")
    (spoilt / "state.json").write_text("{")
    refused(draftline_here("export", spoilt, out), "state.json is not valid JSON")
    assert not out.exists()


def test_export_never_overwrites_what_is_not_its_own(home: Path, tmp_path: Path) -> None:
    checkpoint = home / "run" / "checkpoints" / "step-0000008"
    foreign = Path(shutil.copytree(home / "target", tmp_path / "foreign"))
    before = {path.name: path.read_bytes() for path in foreign.iterdir()}
    refused(draftline_here("export", checkpoint, foreign), "exists and is not an earlier draftline export")
    assert {path.name: path.read_bytes() for path in foreign.iterdir()} == before
    refused(draftline_here("export", checkpoint, home / "file"), "file exists and is not an earlier draftline export")


def evaluate(home: Path, **changes: str | Path) -> Done:
    options = {"target": home / "target", "draft": home / "run" / "export", "prompts": home / "data.jsonl"}
    words = [word for name, value in (options | changes).items() for word in (f"--{name.replace('_', '-')}", value)]
    return draftline_here("eval", *words, "--max-prompts", "1", "--max-new-tokens", "4")


def test_what_eval_is_given(home: Path, tmp_path: Path) -> None:
    refused(evaluate(home, target=home / "wider"), "was not made for target", "hidden_size: drafter 32, target 48")
    refused(evaluate(home, draft=home / "target"), "not a DFlash drafter: architectures is ['Qwen3ForCausalLM']")
    refused(evaluate(home, draft=home / "empty"), "config.json: No such file or directory", "exported drafter")
    refused(evaluate(home, prompts=tmp_path / "absent.jsonl"), "absent.jsonl: No such file or directory")
    refused(evaluate(home, server="http://127.0.0.1:9"), "server http://127.0.0.1:9", "cannot be reached")
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "assistant", "content": "w1"}]}\n')
    refused(evaluate(home, prompts=tmp_path / "prompts.jsonl"), "prompts.jsonl:1: no user or tool turn to be answered")


def test_eval_in_an_interpreter_without_vllm(home: Path) -> None:
    refused(evaluate(home, engine="vllm", target=home / "wider", vllm_python=sys.executable), "was not made for target")
    refused(
        evaluate(home, engine="vllm", vllm_python="/absent/python"), "vLLM interpreter /absent/python: No such file"
    )
    bare = evaluate(home, engine="vllm", vllm_python=sys.executable)
    refused(bare, f"vLLM interpreter {sys.executable}: vllm does not import there", "setup_vllm_cpu.sh")


def test_a_prompt_that_the_template_refuses_names_its_line(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "target", tmp_path / "target"))
    template = folder / "chat_template.jinja"
    rule = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    template.write_text(rule + template.read_text())
    prompts = write_rows(tmp_path / "prompts.jsonl", count=1)
    with prompts.open("a") as file:
        turns = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
        file.write(json.dumps({"messages": turns}) + "\n")
    options = ["--target", folder, "--draft", home / "run" / "export", "--prompts", prompts, "--max-new-tokens", "4"]
    refused(draftline_here("eval", *options), "prompts.jsonl:2: template refused: one turn only")
