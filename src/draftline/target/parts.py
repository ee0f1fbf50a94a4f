"""Finding a target's parts through its own accessors (SPEC 1); `proofs.py` proves what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.errors import InputError
from draftline.records import Head

LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest logit
PLAIN_SCALE = 1e-3  # a measured embedding scale this close to 1 is 1: none is meant to be, and rounding stays below
# How configs spell what follows the head's matrix product. What they do not spell, `proofs.prove_head` notices.
SOFT_CAP_KEYS = ("final_logit_softcapping", "logits_soft_cap")
SCALE_KEYS = ("logit_scale", "lm_head_multiplier")
DIVISOR_KEYS = ("logits_scaling",)


@dataclass(frozen=True)
class TargetParts:
    """embed: ids -> first layer's input; decoder: ids -> final-normed states; head: those states -> logits."""

    config: Any  # the text model's config
    embedding: nn.Embedding
    embedding_scale: float  # what the decoder multiplies its embedding with; 1 where the embedding scales itself
    decoder: nn.Module
    layers: nn.ModuleList
    head: Head  # on the device where features go, wherever the layers lie

    @property
    def hidden_size(self) -> int:
        return self.head.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, as many as the head's: padded, so they may exceed the tokenizer's count."""
        return self.embedding.weight.shape[0]

    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer receives for token ids [...]: [..., d]."""
        embedded = self.embedding(ids.to(self.embedding.weight.device)).to(ids.device)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale


def find_parts(model: Any, device: torch.device) -> TargetParts:
    """The parts of a causal language model, or of the language model inside a wrapper of several kinds of input.

    device: where features go; a target spread over several has layers elsewhere. Raises InputError naming the part not
    found.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    embedding = found(name, "input embedding", model.get_input_embeddings)
    output = found(name, "language-model head", model.get_output_embeddings)
    decoder, layers = find_layers(name, found(name, "decoder", model.get_decoder), config)
    shapes = [list(module.weight.shape) for module in (embedding, output)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"target class {name}: embedding {shapes[0]} and head {shapes[1]} differ in shape",
            "a drafter borrows both: a target with a vocabulary or width of its own for its head is not supported",
        )
    head = find_head(name, config, output).to(device)
    scale = measured_scale(decoder, layers, embedding)
    return TargetParts(config, embedding, scale, decoder, layers, head)


def found(name: str, part: str, accessor: Callable[[], Any]) -> Any:
    """What one of the model's own accessors returns; transformers raises where it has none."""
    try:
        module = accessor()
    except (NotImplementedError, AttributeError) as error:
        raise InputError(f"target class {name}: its accessor of the {part} fails: {error}", not_supported()) from error
    if not isinstance(module, nn.Module) or (part != "decoder" and not hasattr(module, "weight")):
        raise InputError(f"target class {name} has no {part} with a weight, found {module!r}", not_supported())
    return module


def not_supported() -> str:
    return "draftline needs decoder-only language models whose parts transformers' accessors name"


def find_head(name: str, config: Any, output: Any) -> Head:
    """The head's weights, and what the config says of a scale and a soft-cap on its logits."""
    if output.weight.dtype not in LOGIT_TOLERANCE:
        raise InputError(
            f"target class {name}: the head's weights are {output.weight.dtype}, not float32 or bfloat16",
            "a quantised head cannot be borrowed: use the unquantised model, or one whose lm_head was left alone",
        )
    stated = config.to_dict()
    scale = 1.0
    for key in SCALE_KEYS:
        scale *= stated.get(key) or 1.0
    for key in DIVISOR_KEYS:
        scale /= stated.get(key) or 1.0
    caps = [float(stated[key]) for key in SOFT_CAP_KEYS if stated.get(key)]
    bias = output.bias.detach() if isinstance(output, nn.Linear) and output.bias is not None else None
    return Head(output.weight.detach(), bias, scale, caps[0] if caps else None)


def find_layers(name: str, decoder: nn.Module, config: Any) -> tuple[nn.Module, nn.ModuleList]:
    """(decoder, layers): the outermost module that holds one ModuleList as long as the model is deep."""
    if not hasattr(config, "num_hidden_layers"):
        raise InputError(f"target class {name}: its config has no num_hidden_layers", not_supported())
    depth = int(config.num_hidden_layers)
    for module in decoder.modules():  # most accessors name it at once, some (Llama 4's) name the whole model
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
        if len(lists) == 1:
            return module, lists[0]
    raise InputError(f"target class {name}: expected a list of {depth} decoder layers, found none", not_supported())


@dataclass(frozen=True)
class Passage:
    """What passed between the parts in one forward, [R, S, d] each, all on one device."""

    inputs: list[Tensor]  # what each layer received
    outputs: list[Tensor]  # what it gave
    around: list[tuple[Tensor, Tensor]]  # (received, given) of the decoder's other modules
    final: Tensor  # the decoder's last state


@torch.no_grad()
def watch(model: nn.Module, decoder: nn.Module, layers: nn.ModuleList, ids: Tensor) -> tuple[Passage, Any]:
    """One forward of `model`, the decoder itself or what contains it, over ids [R, S]; and what that forward gave.

    Raises InputError where decoder and layers do not run once each, from one tensor to another.
    """
    received, given, ends = list[Any](), list[Any](), list[Any]()
    around: list[tuple[Tensor, Tensor]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.extend((args or tuple(kwargs.values()))[:1])

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        given.append(layer_state(module, output))

    def beside(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            around.append((args[0].to(ids.device), output.to(ids.device)))

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    handles += [child.register_forward_hook(beside) for child in decoder.children() if child is not layers]
    handles.append(decoder.register_forward_hook(lambda _module, _args, output: ends.append(output)))
    try:
        output = model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(ends) != 1 or len(received) != len(layers) or not all(isinstance(state, Tensor) for state in received):
        raise InputError(
            f"target class {type(decoder).__name__}: expected each of {len(layers)} layers to run once, on one tensor, "
            f"found {len(received)} runs of them and {len(ends)} of the decoder",
            not_supported(),
        )
    final = ends[0].last_hidden_state.to(ids.device)
    inputs, outputs = ([state.to(ids.device) for state in side] for side in (received, given))
    return Passage(inputs, outputs, around, final), output


def layer_state(layer: nn.Module, output: Any) -> Tensor:
    """The residual stream in what a layer gives: the tensor itself, or the first of a tuple."""
    state = output[0] if isinstance(output, tuple) else output
    if not isinstance(state, Tensor):
        raise InputError(
            f"target layer class {type(layer).__name__}: expected a tensor from it, found {type(state).__name__}",
            "a family whose layers give something else than the residual stream is not supported",
        )
    return state


@torch.no_grad()
def measured_scale(decoder: nn.Module, layers: nn.ModuleList, embedding: Any) -> float:
    """The factor between the embedding and what the first layer receives, by least squares over a few tokens.

    Granite's decoder multiplies, Gemma's embedding does so itself, most do not. `proofs.prove_embedding` proves that
    nothing else happens in between.
    """
    ids = torch.arange(min(16, embedding.weight.shape[0]), device=embedding.weight.device)[None]
    passage, _ = watch(decoder, decoder, layers, ids)
    # a frame (frame.py) has no layers: its final norm receives what the first of them would
    first = passage.inputs or [given for given, out in passage.around if torch.equal(out, passage.final)]
    if not first:
        raise InputError(
            f"target class {type(decoder).__name__}: neither a layer nor a final norm runs", not_supported()
        )
    received, embedded = first[0].double(), embedding(ids).double()
    if received.shape != embedded.shape:
        raise InputError(
            f"target class {type(decoder).__name__}: its first layer receives {list(received.shape)} for embeddings "
            f"{list(embedded.shape)}",
            "likely several residual streams side by side; such a target is not supported",
        )
    scale = float((received * embedded).sum() / embedded.square().sum())
    return 1.0 if abs(scale - 1) < PLAIN_SCALE else scale
