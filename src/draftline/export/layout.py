"""What tensors a drafter has, and the one way they reach and leave a safetensors file (SPEC 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftline.errors import InputError
from draftline.records import DrafterSpec

WEIGHTS_NAME = "model.safetensors"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
BITS = {2: torch.int16, 4: torch.int32}  # of each element size that an export may have
NAMES_SHOWN = 8

Shape = tuple[int, ...]


def drafter_shapes(spec: DrafterSpec) -> dict[str, Shape]:
    """Name and shape of every trained tensor, in the order of SPEC 8. The target's embedding and head are not there."""
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(spec.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(spec.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(spec).items()}
    return shapes


def layer_shapes(spec: DrafterSpec) -> dict[str, Shape]:
    """The tensors of one draft layer, without its `layers.{i}.` prefix."""
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_attention_heads * head, spec.num_key_value_heads * head
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.attention_bias:
        rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
        shapes |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
    return shapes


def check_shapes(where: Path, found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse any tensor that is missing, unknown or of the wrong shape.

    Engines skip names they do not know without a word, so this is the only place where a misnamed tensor shows.
    Raises InputError naming the tensors.
    """
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {listed(missing)}")
    if unknown := [name for name in found if name not in expected]:
        problems.append(f"unknown: {listed(unknown)}")
    problems += [
        f"{name} has shape {list(found[name])}, the config needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ][:NAMES_SHOWN]
    if problems:
        raise InputError(
            f"{where}: the tensors do not fit config.json\n  " + "\n  ".join(problems),
            "a drafter folder holds exactly the tensors its config describes: export it again from its checkpoint",
        )


def listed(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], dtype: torch.dtype) -> None:
    """Write the expected tensors, cast to `dtype`, in their declared order. Raises InputError when they do not fit."""
    check_shapes(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    cast = {name: tensors[name].detach().to(dtype).cpu() for name in expected}
    save_file(each_in_its_memory(cast), path, metadata={"format": "pt"})


def each_in_its_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, cloned where they are a part of their memory or share it: save_file refuses such views."""
    ready, taken = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        whole = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes and memory.data_ptr() not in taken
        ready[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        taken.add(memory.data_ptr())
    return ready


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one device have the same dtype, shape and bits: -0 is not 0, and a NaN is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().view(BITS[tensor.itemsize]) for tensor in (one, other)))


def read_tensors(path: Path, expected: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Read the expected tensors as stored, on the CPU. Names and shapes are checked before any data is read."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file",
            "a drafter's weights are read from one safetensors file only; pickles are never opened",
        )
    try:
        with safe_open(path, framework="pt") as file:
            check_shapes(path, {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, expected)  # noqa: SIM118
            return {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file ({error})", "copy or export it again") from error
