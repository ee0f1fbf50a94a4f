"""A target without its layers: the same pieces as the whole one has, and no layer's bytes in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from builders import open_target, qwen3_config, save_target, word_tokenizer
from draftline.config import TargetSection
from draftline.target.frame import final_norm, load_frame
from draftline.target.load import load_target

CPU = torch.device("cpu")


def test_frame_reads_no_layer_and_any_use_of_one_fails(tmp_path: Path) -> None:
    whole, frame = open_target(save_target(tmp_path)), load_frame(TargetSection(path=str(tmp_path)), CPU)
    assert torch.equal(frame.parts.embedding.weight, whole.parts.embedding.weight)
    assert torch.equal(frame.parts.head.weight, whole.parts.head.weight)
    assert torch.equal(final_norm(frame.parts).weight, whole.model.model.norm.weight)
    assert (len(frame.parts.layers), frame.identity, frame.stop_ids) == (4, whole.identity, whole.stop_ids)
    names = {name for name, _ in frame.model.named_parameters()}
    assert names == {"model.embed_tokens.weight", "model.norm.weight"}  # the head is tied
    with pytest.raises(RuntimeError, match="loaded without its layers"):
        frame.model(input_ids=torch.tensor([[5, 6]]))


SMALL = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 3, "pad_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "untied Qwen3": qwen3_config(tie_word_embeddings=False),
    "Llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "Gemma 3, scaled embedding": Gemma3TextConfig(**SMALL, sliding_window=8),
    "Qwen3-MoE": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_embedding_norm_and_logits(tmp_path: Path, family: str) -> None:
    """head(norm(state before the norm)) of the frame are the whole model's own logits."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    section = TargetSection(path=str(tmp_path))
    whole, frame = load_target(section, CPU), load_frame(section, CPU)
    ids = torch.tensor([[5, 9, 7, 12]])
    assert torch.equal(frame.embed(ids), whole.embed(ids))
    seen: list[torch.Tensor] = []
    final_norm(whole.parts).register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    logits = whole.model(input_ids=ids).logits
    assert torch.equal(final_norm(frame.parts)(seen[0]) @ frame.parts.head.weight.T, logits)
    assert frame.parts.config.to_dict() == whole.parts.config.to_dict()
    assert len(frame.parts.layers) == 4 and sum(1 for _ in frame.parts.layers.parameters()) == 0


GROWTH = """
import sys
from pathlib import Path
import torch
from draftline.config import TargetSection
from draftline.target.frame import load_frame
from draftline.target.load import load_target

def memory_kib(name):
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1])

for load in (load_frame, load_frame, load_target):  # the first call imports what transformers needs
    Path("/proc/self/clear_refs").write_text("5")  # the highest value starts over
    before = memory_kib("VmRSS")
    loaded = load(TargetSection(path=sys.argv[1], dtype="bfloat16"), torch.device("cpu"))
    print(memory_kib("VmHWM") - before)
"""


def test_memory_of_a_frame_is_that_of_its_embedding(tmp_path: Path) -> None:
    """By the process's memory at the worst moment of loading. The files are float32, so nothing stays a mere mapping;
    in bfloat16 the layers have 31 MiB, the embedding has 32 KiB."""
    save_target(tmp_path, hidden_size=512, intermediate_size=2560, num_hidden_layers=4)
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, frame_kib, whole_kib = map(int, done.stdout.split())
    assert frame_kib < 4 << 10 and whole_kib > 30 << 10, done.stdout
