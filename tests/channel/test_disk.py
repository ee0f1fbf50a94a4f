"""Training from features on disk: the same bits as with live capture; whatever does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders import open_target, save_target, word_tokenizer
from command import draftline_here
from draftline.channel.disk import DiskFeatures, FeatureFiles, files_of
from draftline.channel.shards import differences, read_index
from draftline.data.stream import RowStream
from draftline.errors import InputError
from draftline.records import TokenRow
from draftline.target.capture import FeatureCapture
from offline import LAST, flipped, prepare, shards, train
from runs import assert_same_bits, write_rows

CPU = torch.device("cpu")


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


def test_revisions_are_compared_where_both_sides_name_one(home: Path) -> None:
    one = read_index(home / "features").identity
    main, other = (one.model_copy(update={"target_revision": name}) for name in ("main", "v2"))
    assert differences(one, main) == differences(main, one) == differences(main, main) == []
    assert differences(main, other) == ["target revision: prepared main, now v2"]


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
