"""Training from features on disk: the same bits as with live capture, and whatever does not fit or is torn refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from builders import open_target, save_target, word_tokenizer
from command import Done, draftline_here
from draftline.channel.disk import DiskFeatures, FeatureFiles, files_of
from draftline.channel.shards import hash_ids, plan, read_index
from draftline.config import TargetSection
from draftline.data.stream import RowStream
from draftline.errors import InputError
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture
from draftline.target.frame import final_norm, load_frame
from runs import assert_same_bits, write_recipe, write_rows

LAST = "checkpoints/step-0000008"
SHARD_GIB = 2e-5  # 21,474 bytes: about 80 tokens of three 32-wide float32 states, so several shards
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A live run, and the features of its recipe in `features`."""
    home = tmp_path_factory.mktemp("offline")
    recipe = write_recipe(home)
    assert prepare(recipe, home / "features").code == 0
    assert draftline_here("train", recipe).code == 0
    return home


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Path:
    """The features again, to be harmed."""
    return Path(shutil.copytree(home / "features", tmp_path / "features"))


def prepare(recipe: Path, folder: Path, *words: str) -> Done:
    return draftline_here("prepare", recipe, "--features", folder, "--shard-gib", str(SHARD_GIB), *words)


def train(home: Path, out: Path, features: Path, *words: str) -> Done:
    return draftline_here("train", home / "recipe.yaml", f"train.out={out}", f"target.features={features}", *words)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*"))


def test_the_budget_is_printed_before_anything_is_captured(home: Path, tmp_path: Path) -> None:
    done = prepare(home / "recipe.yaml", tmp_path / "features")
    index = read_index(tmp_path / "features")
    tokens, documents, count = index.identity.tokens, index.identity.documents, len(index.shards)
    assert documents == 24 and count > 2
    needed = tokens * (3 * 32 * 4 + 4) + documents * 16 + count * 4096
    assert f"({needed:,} bytes)" in done.out and "384 bytes a token" in done.out
    assert done.out.index("GiB needed") < done.out.index("prepare ")
    assert sum(path.stat().st_size for path in shards(tmp_path / "features")) <= needed
    assert [shard.documents for shard in index.shards] == [
        len(load_file(p)["lengths"]) for p in shards(home / "features")
    ]


def test_same_bits_as_live_training(home: Path, tmp_path: Path) -> None:
    done = train(home, tmp_path / "disk", home / "features")
    assert done.code == 0 and "the target's layers are not loaded" in done.out, done.err
    assert_same_bits(tmp_path / "disk" / LAST, home / "run" / LAST)
    kept = train(home, tmp_path / "kept", home / "features", "target.keep_features_gib=1")
    assert kept.code == 0 and "GiB kept" in kept.out, kept.err
    assert_same_bits(tmp_path / "kept" / LAST, home / "run" / LAST)
    live = draftline_here("train", home / "recipe.yaml", f"train.out={tmp_path / 'once'}", "target.keep_features_gib=1")
    assert live.code == 0, live.err
    assert_same_bits(tmp_path / "once" / LAST, home / "run" / LAST)


def test_a_live_run_goes_on_from_disk(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "run" / "checkpoints" / "step-0000004", tmp_path / "run" / "checkpoints" / "step-0000004")
    done = train(home, tmp_path / "run", home / "features", "--resume")
    assert done.code == 0, done.err
    assert_same_bits(tmp_path / "run" / LAST, home / "run" / LAST)


def test_tau_is_measured_with_the_whole_target(home: Path, tmp_path: Path) -> None:
    words = (f"eval.prompts={home / 'data.jsonl'}", "eval.max_prompts=2", "eval.max_new_tokens=8")
    done = train(home, tmp_path / "run", home / "features", *words)
    assert done.code == 0 and "tau (data)" in done.out, done.err


MISMATCHES: dict[str, tuple[Callable[[Path], tuple[str, ...]], str]] = {
    "taps": (lambda _: ("drafter.taps=[0,3]",), "taps: prepared [0, 2], now [0, 3]"),
    "count of taps": (lambda _: ("drafter.taps=[0]",), "taps: prepared [0, 2], now [0]"),
    "dtype": (lambda _: ("target.dtype=bfloat16",), "target dtype: prepared float32, now bfloat16"),
    "weights": (lambda tmp: (f"target.path={save_target(tmp / 't', seed=1)}",), "target weights: prepared "),
    "data": (lambda tmp: (f"data.train={write_rows(tmp / 'd.jsonl', shift=1)}",), "token ids: prepared "),
    "fewer rows": (lambda tmp: (f"data.train={write_rows(tmp / 'd.jsonl', 20)}",), "documents: prepared 24, now 20"),
    "template": (lambda tmp: (f"target.path={other_template(tmp / 't')}",), "chat template: prepared "),
}


def other_template(folder: Path) -> Path:
    """The same weights; the template says the same in other words."""
    save_target(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{# again #}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MISMATCHES)
def test_other_features_are_refused_by_name_with_both_values(home: Path, tmp_path: Path, name: str) -> None:
    change, said = MISMATCHES[name]
    done = train(home, tmp_path / "run", home / "features", *change(tmp_path))
    assert done.code == 2 and said in done.err and ", now " in done.err, done.err
    assert done.err.count(": prepared ") == len([line for line in done.err.splitlines() if ", now " in line])


def test_a_final_state_is_refused_where_missing_and_passed_over_where_not_wanted(home: Path, tmp_path: Path) -> None:
    bare = prepare(home / "recipe.yaml", tmp_path / "bare", "loss.kind=ce")
    assert bare.code == 0 and "256 bytes a token" in bare.out, bare.err
    done = train(home, tmp_path / "run", tmp_path / "bare")
    assert done.code == 2 and "has final: prepared False, now True" in done.err, done.err
    for name, folder in (("with", home / "features"), ("without", tmp_path / "bare")):
        done = train(home, tmp_path / name, folder, "loss.kind=ce")
        assert done.code == 0, done.err
    assert_same_bits(tmp_path / "with" / LAST, tmp_path / "without" / LAST)


def test_schema_revision_and_unfinished_folders(home: Path, copy: Path, tmp_path: Path) -> None:
    index = json.loads((copy / "index.json").read_text())

    def refused(change: dict[str, object]) -> str:
        (copy / "index.json").write_text(json.dumps(index | change))
        done = train(home, tmp_path / "run", copy)
        assert done.code == 2, done.out
        return done.err

    assert "schema_version: Input should be 1" in refused({"schema_version": 2})
    assert "1 of " in refused({"shards": index["shards"][:-1]}) and "goes on where it stopped" in refused(
        {"shards": index["shards"][:-1]}
    )
    assert "is torn or damaged: identity" in refused({"identity": index["identity"] | {"target_revision": "main"}})
    (copy / "index.json").write_text("{")
    assert "index.json: the file: Invalid JSON" in train(home, tmp_path / "run", copy).err
    done = train(home, tmp_path / "run", tmp_path / "nowhere")
    assert done.code == 2 and "nowhere: no such folder" in done.err


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    """One bit of the last document's features."""
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    place = json.loads(path.read_bytes()[8:header])["features"]["data_offsets"]
    whole = bytearray(path.read_bytes())
    whole[header + place[1] - 1] ^= 1
    path.write_bytes(whole)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def replaced(path: Path) -> None:
    """Another shard in its place."""
    shutil.copy(shards(path.parent)[0], path)


HARMS = (truncated, flipped, emptied, replaced, Path.unlink)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_harmed_shard_is_named_and_written_again(
    home: Path, copy: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = shards(copy)[1]
    before = path.read_bytes()
    harm(path)
    done = train(home, tmp_path / "run", copy)
    assert done.code == 2 and f"{path} is torn or damaged" in done.err, done.err
    again = prepare(home / "recipe.yaml", copy)
    assert again.code == 0 and f"{path} is torn or damaged" in again.out and "it is written again" in again.out
    assert path.read_bytes() == before


def test_an_interrupted_prepare_goes_on(home: Path, copy: Path, tmp_path: Path) -> None:
    """Killed between a shard's name and the index, after the second shard."""
    killed = f"""
import os, signal, sys
from draftline.cli import main
from draftline.channel import shards
publish = shards.publish
def kill_after(partial, path):
    publish(partial, path)
    if path.name == "shard-00002.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
shards.publish = kill_after
sys.argv = ["draftline", "prepare", {str(home / "recipe.yaml")!r}, "--features", {str(tmp_path / "f")!r},
            "--shard-gib", "{SHARD_GIB}"]
main()
"""
    done = subprocess.run([sys.executable, "-c", killed], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    index = read_index(tmp_path / "f")
    assert [shard.file for shard in index.shards] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    kept = [(path, path.stat().st_ino) for path in shards(tmp_path / "f")[:2]]
    refused = train(home, tmp_path / "run", tmp_path / "f")
    assert refused.code == 2 and "shards are not written yet" in refused.err
    again = prepare(home / "recipe.yaml", tmp_path / "f")
    assert again.code == 0 and ", 2 whole" in again.out, again.err
    assert [(path, path.stat().st_ino) for path in shards(tmp_path / "f")[:2]] == kept
    for mine, theirs in zip(shards(tmp_path / "f"), shards(home / "features"), strict=True):
        assert mine.read_bytes() == theirs.read_bytes()
    assert (tmp_path / "f/index.json").read_text() == (home / "features/index.json").read_text()


def test_other_contents_of_the_folder_are_refused(home: Path, copy: Path, tmp_path: Path) -> None:
    other = draftline_here("prepare", home / "recipe.yaml", "--features", copy)
    assert other.code == 2 and "were cut at 2.00002e-05 GiB, now 1" in other.err, other.err
    taps = prepare(home / "recipe.yaml", copy, "drafter.taps=[1,2]")
    assert taps.code == 2 and "taps: prepared [0, 2], now [1, 2]" in taps.err
    strange = prepare(home / "recipe.yaml", home)
    assert strange.code == 2 and "already holds other files" in strange.err
    itself = prepare(home / "recipe.yaml", tmp_path / "f", f"target.features={copy}")
    assert itself.code == 2 and "prepare runs the target itself" in itself.err


def test_a_full_disk(home: Path, tmp_path: Path) -> None:
    """No file may grow past 16 KiB: the first shard cannot be written; nothing half stays, and the next call goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    try:
        done = prepare(home / "recipe.yaml", tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.code == 1 and "shard-00000.safetensors could not be written" in done.err, done.err
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["index.json"]
    assert prepare(home / "recipe.yaml", tmp_path / "f").code == 0
    assert shards(tmp_path / "f")[0].read_bytes() == shards(home / "features")[0].read_bytes()


def test_a_disk_too_small_is_refused_before_capture(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    done = prepare(home / "recipe.yaml", tmp_path / "f")
    assert done.code == 2 and "and its disk has 50,000 free" in done.err
    assert "GiB needed" in done.out and not (tmp_path / "f").exists()


def test_plan_keeps_documents_whole_and_shards_bounded() -> None:
    lengths = np.array([3, 3, 5, 20, 1, 1])
    assert plan(lengths, 10, 60) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert plan(lengths, 10, 10**9) == [range(0, 6)]


def test_frame_reads_no_layer_and_any_use_of_one_fails(home: Path) -> None:
    whole, frame = open_target(home / "target"), load_frame(TargetSection(path=str(home / "target")), CPU)
    assert torch.equal(frame.parts.embedding.weight, whole.parts.embedding.weight)
    assert torch.equal(frame.parts.head.weight, whole.parts.head.weight)
    assert torch.equal(final_norm(frame.parts).weight, whole.model.model.norm.weight)
    assert (len(frame.parts.layers), frame.identity, frame.stop_ids) == (4, whole.identity, whole.stop_ids)
    names = {name for name, _ in frame.model.named_parameters()}
    assert names == {"model.embed_tokens.weight", "model.norm.weight"}  # the head is tied
    with pytest.raises(RuntimeError, match="loaded without its layers"):
        frame.model(input_ids=torch.tensor([[5, 6]]))


def disk_of(home: Path, **bounds: int) -> tuple[DiskFeatures, RowStream]:
    """The prepared features over a stream of their own documents, 60 epochs long."""
    index, held = read_index(home / "features"), [load_file(path) for path in shards(home / "features")]
    lengths = torch.cat([shard["lengths"] for shard in held]).tolist()
    ids = torch.cat([shard["token_ids"] for shard in held]).split(lengths)
    rows = [TokenRow(part.numpy(), np.ones(len(part), dtype=bool), "made") for part in ids]
    stream = RowStream(rows, row_length=40, rows_per_batch=3, seed=3, epochs=60)
    files = files_of(home / "features", index, stream.lengths, stream.ids)
    return DiskFeatures(files, stream.batch, len(stream), CPU, torch.float32, **bounds), stream


def test_batches_equal_capture_in_any_order(home: Path) -> None:
    disk, stream = disk_of(home)
    capture = FeatureCapture(open_target(home / "target"), (0, 2), want_final=True)
    for index in (0, 1, 2, 9, 10, 3, 4, 4, len(stream) - 1):
        found, expected = disk(stream.batch(index)), capture(stream.batch(index))
        assert found.final is not None and expected.final is not None
        assert torch.equal(found.taps, expected.taps) and torch.equal(found.final, expected.final)
        assert found.taps.is_contiguous() and found.packed.index == index


def test_memory_is_bounded_and_documents_are_read_front_to_back(home: Path) -> None:
    """Two batches may wait beside the one in use; each document is one run of bytes, in the order of the disk."""
    batch_bytes = 3 * 40 * 96 * 4
    disk, stream = disk_of(home, ahead_bytes=2 * batch_bytes)
    live: list[int] = []
    most, reads, read = 0, [], FeatureFiles.read

    def watched(files: FeatureFiles, document: int, part: memoryview) -> None:
        reads.append((len(part), files.tokens[document] * files.bytes_per_token))
        read(files, document, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureFiles, "read", watched)
        for index in range(len(stream)):
            disk(stream.batch(index))
            live.append(len(disk.ahead))
            most = max(most, sum(waiting.result().nbytes for _, waiting in disk.ahead))
    assert max(live) == 2 and most == 2 * batch_bytes
    assert all(got == whole for got, whole in reads)
    assert len(reads) == 60 * 24  # every document once an epoch: nothing is read twice or for nothing


def test_a_fault_in_a_reading_thread_reaches_training(home: Path, copy: Path) -> None:
    disk, stream = disk_of(home)
    files = disk.files
    flipped(shards(copy)[0])
    harmed = FeatureFiles(
        tuple(copy / path.name for path in files.paths), files.file, files.offset_bytes, files.tokens, files.checksum,
        files.dtype, files.tap_columns, files.final_columns,
    )  # fmt: skip
    disk = DiskFeatures(harmed, stream.batch, len(stream), CPU, torch.float32)
    with pytest.raises(InputError, match=r"shard-00000.safetensors is torn or damaged: document \d+ has checksum"):
        for index in range(len(stream)):
            disk(stream.batch(index))


def test_hash_of_ids_tells_documents_apart() -> None:
    ids = np.array([5, 6, 7, 8], dtype=np.int32)
    one = hash_ids(np.array([2, 2]), ids)
    assert one != hash_ids(np.array([1, 3]), ids) and one != hash_ids(np.array([2, 2]), ids[::-1])


SAMPLE_WORDS = ("drafter.taps=[0, 2]",)


def write_samples(home: Path, folder: Path, own_masks: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """The recipe's documents as vLLM's connector would write them: outputs of layers 0 and 2 and of the last one,
    before its norm, by transformers' own hidden states; nothing of draftline's capture."""
    target = open_target(home / "target")
    folder.mkdir()
    tokenizer, model = target.tokenizer, target.model
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0]))
    for number, line in enumerate((home / "data.jsonl").read_text().splitlines()):
        messages = json.loads(line)["messages"]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        layers = torch.stack([states[1][0], states[3][0], last.pop()[0]], dim=1).to(dtype)  # ids 1, 3 and 4 there
        tensors = {"token_ids": torch.tensor(ids), "hidden_states": layers.contiguous()}
        if own_masks:
            start = len(
                tokenizer(f"<|im_start|> user {messages[0]['content']} <|im_end|> <|im_start|> assistant")["input_ids"]
            )
            tensors["loss_mask"] = (torch.arange(len(ids)) >= start).long()
        save_file(tensors, folder / f"hs_{number}.safetensors")
    return folder


@pytest.mark.parametrize("own_masks", [False, True])
def test_samples_of_another_tool_train_the_same_bits(home: Path, tmp_path: Path, own_masks: bool) -> None:
    folder = write_samples(home, tmp_path / "hidden_states", own_masks)
    done = train(home, tmp_path / "run", folder)
    assert done.code == 0, done.err
    assert "taken on trust" in done.out and "ids [1, 3] there" in done.out
    assert f"loss masks from {'the files' if own_masks else 'data.train'}" in done.out
    assert_same_bits(tmp_path / "run" / LAST, home / "run" / LAST)


def test_samples_in_bfloat16_and_a_sample_no_conversation_renders_to(home: Path, tmp_path: Path) -> None:
    folder = write_samples(home, tmp_path / "h", dtype=torch.bfloat16)
    tensors = load_file(folder / "hs_3.safetensors")
    save_file(tensors | {"token_ids": tensors["token_ids"].flip(0)}, folder / "hs_3.safetensors")
    done = train(home, tmp_path / "run", folder)
    assert done.code == 0 and "1 sample that no conversation of data.train renders to" in done.out, done.err
    assert "rows of data.train without a sample" in done.out
    strict = train(home, tmp_path / "strict", folder, "data.max_unusable_share=0.01")
    assert strict.code == 2 and "sample that no conversation" in strict.err


def test_samples_that_do_not_fit_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    folder = write_samples(home, tmp_path / "h")
    three = train(home, tmp_path / "run", folder, "drafter.taps=[0, 1, 2]")
    assert three.code == 2 and "hs_0.safetensors: hidden_states of 3 layers" in three.err
    narrow = load_file(folder / "hs_5.safetensors")
    save_file(narrow | {"hidden_states": narrow["hidden_states"][..., :16].contiguous()}, folder / "hs_5.safetensors")
    done = train(home, tmp_path / "run", folder)
    assert done.code == 2 and "hs_5.safetensors: hidden_states are 16 wide, the target's 32" in done.err
    truncated(folder / "hs_4.safetensors")
    done = train(home, tmp_path / "run", folder)
    assert done.code == 2 and "hs_4.safetensors is torn or damaged" in done.err
    save_file(
        narrow | {"hidden_states": narrow["hidden_states"].transpose(0, 1).contiguous()}, folder / "hs_4.safetensors"
    )
    done = train(home, tmp_path / "run", folder)
    assert done.code == 2 and "are not [T] and [T, L, d]" in done.err
    (tmp_path / "pt").mkdir()
    torch.save({}, tmp_path / "pt" / "data_0.pt")
    done = train(home, tmp_path / "run", tmp_path / "pt")
    assert done.code == 2 and "draftline never unpickles" in done.err


def test_recipe_is_untouched(home: Path) -> None:
    """What the tests above rely on: the recipe itself names no features."""
    assert "features" not in yaml.safe_load((home / "recipe.yaml").read_text())["target"]
