"""Samples in the layout of the speculators project: written here by transformers alone, trained on, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import open_target
from offline import LAST, train, truncated
from runs import assert_same_bits, write_rows


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
    """With masks of their own, the samples need no conversation: here other ones are given."""
    folder = write_samples(home, tmp_path / "hidden_states", own_masks)
    other = write_rows(tmp_path / "other.jsonl", shift=1)
    done = train(home, tmp_path / "run", folder, *([f"data.train={other}"] if own_masks else []))
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
    done = train(home, tmp_path / "run", folder, "drafter.taps=null")
    assert done.code == 2 and "do not say which layers they hold" in done.err
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
