"""Parts of a target as one kernel each, on CUDA: RMSNorms, rotary embedding, the activation of gated MLPs.

transformers runs a norm in seven passes over memory, a rotary embedding in ten, a gated MLP's activation in two. No
name of a family is looked at. What looks like such a part is tried: if the kernel gives what the part gives on random
input, that one instance's forward is replaced, otherwise it stays as it was. At last the whole decoder is tried, and
everything is taken back unless its states agree with what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from draftline.target.agreement import feature_tolerance, relative_error
from draftline.target.parts import TargetParts
from draftline.target.rebinding import reader_of, rebound

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # relative to the largest value; bf16 rounds twice
EPSILON_NAMES = ("variance_epsilon", "eps")
GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}
ROTARY = "apply_rotary_pos_emb"  # what transformers' families call it, each in its own module
TRIAL_ROWS, TRIAL_TOKENS = 2, 48


@dataclass(frozen=True)
class FastParts:
    """How many parts of the decoder run as one kernel each."""

    norms: int = 0
    mlps: int = 0
    rotations: int = 0
    taken_back: str = ""  # why all of them run as transformers wrote them after all

    @property
    def text(self) -> str:
        if self.taken_back:
            return f"none: {self.taken_back}"
        return f"{self.norms} norms, {self.mlps} gated MLPs, {self.rotations} rotary embeddings"


@torch.no_grad()
def fuse_parts(parts: TargetParts, device: torch.device) -> FastParts:
    """Replace what can be proven equal, in the decoder's own modules and nowhere else in the process.

    device: where Triton launches; parts that lie elsewhere are left alone. A CPU means Triton's interpreter.
    """
    before = trial_states(parts, device)
    modules = [module for module in parts.decoder.modules() if untouched(module)]
    norms = [module for module in modules if is_norm(module) and fuse_norm(module, device)]
    mlps = [module for module in modules if is_gated_mlp(module) and fuse_mlp(module, device)]
    proven: dict[Any, bool] = {}
    turning = [module for module in modules if fuse_rotary(module, proven, parts.embedding.weight.dtype, device)]
    wrong = disagreement(parts, before, device)
    if wrong:
        for module in (*norms, *mlps, *turning):
            del vars(module)["forward"]
        return FastParts(taken_back=wrong)
    return FastParts(len(norms), len(mlps), len(turning))


def trial_states(parts: TargetParts, device: torch.device) -> Tensor:
    """The decoder's last state on random tokens, [TRIAL_ROWS, TRIAL_TOKENS, d] float32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(parts.embedding.weight.shape[0], (TRIAL_ROWS, TRIAL_TOKENS), generator=generator)
    return parts.decoder(input_ids=ids.to(device), use_cache=False).last_hidden_state.float()


def disagreement(parts: TargetParts, before: Tensor, device: torch.device) -> str:
    """Why the decoder is not what it was; empty where it is."""
    dtype = parts.embedding.weight.dtype
    try:
        error = relative_error(dtype, trial_states(parts, device), before)
    except TypeError as fault:  # a part is called in another way than it was tried
        return str(fault)
    limit = feature_tolerance(dtype)
    return "" if error <= limit else f"together they change its states by {error:.2g}, more than {limit:g}"


def untouched(module: nn.Module) -> bool:
    """accelerate moves inputs between devices by a wrapped forward of the instance: such a module is left alone."""
    return not {"forward", "_hf_hook"} & set(vars(module))


def lies_at(weight: Tensor, device: torch.device) -> bool:
    """Whether Triton's launches reach this weight and the kernels know its dtype."""
    if weight.dtype not in TOLERANCE or weight.device.type != device.type:
        return False
    return not weight.is_cuda or weight.device.index == torch.cuda.current_device()


def random_input(size: int, like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(64, size, generator=generator, device=like.device, dtype=like.dtype)


def alike(found: Tensor, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return bool((found - expected).abs().max() <= TOLERANCE[found.dtype] * expected.abs().max())


def is_norm(module: Any) -> bool:
    """One weight vector, nothing else: an RMSNorm, or something that the trial will tell from one."""
    if len(signature(module.forward).parameters) != 1:  # a gated norm takes its gate too
        return False
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and module.weight.dim() == 1 and epsilon(module) is not None


def epsilon(module: Any) -> float | None:
    return next((float(vars(module)[name]) for name in EPSILON_NAMES if name in vars(module)), None)


def fuse_norm(module: Any, device: torch.device) -> bool:
    weight, eps = module.weight, epsilon(module)
    if eps is None or not lies_at(weight, device):
        return False
    x = random_input(len(weight), weight)
    expected = module(x)
    for offset in (0.0, 1.0):  # some families store the weight less one
        if alike(norm_forward(weight, eps, offset, x), expected):
            module.forward = partial(norm_forward, weight, eps, offset)
            return True
    return False


def norm_forward(weight: Tensor, eps: float, offset: float, hidden_states: Tensor) -> Tensor:
    from draftline.kernels.pointwise import rms_norm  # needs Triton, which only CUDA builds of torch bring

    return rms_norm(hidden_states.contiguous(), weight, eps, offset)


def is_gated_mlp(module: nn.Module) -> bool:
    """down(act(gate(x)) up(x)) by its parts' names, each a plain linear layer without a bias."""
    parts = dict(module.named_children())
    if set(parts) != GATED_MLP or len(signature(module.forward).parameters) != 1:
        return False
    linears: list[Any] = [part for name, part in parts.items() if name != "act_fn"]
    return all(is_plain_linear(part) and untouched(part) for part in linears)


def is_plain_linear(part: Any) -> bool:
    return type(part) is nn.Linear and part.bias is None


def fuse_mlp(module: Any, device: torch.device) -> bool:
    weight = module.gate_proj.weight
    activation = activation_of(module.act_fn, weight.device)
    if activation is None or not all(lies_at(parameter, device) for parameter in module.parameters()):
        return False
    x = random_input(weight.shape[1], weight)
    if not alike(mlp_forward(module, activation, x), module(x)):
        return False
    module.forward = partial(mlp_forward, module, activation)
    return True


def activation_of(act_fn: nn.Module, device: torch.device) -> str | None:
    """Told by its values in float32, where the two kinds of GELU are 5e-4 apart."""
    x = torch.linspace(-9, 9, 1001, device=device)
    found = act_fn(x.clone())
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(found, known(x), 1e-5, 1e-6)), None)


def mlp_forward(module: Any, activation: str, x: Tensor) -> Tensor:
    from draftline.kernels.inference import gated  # needs Triton, see norm_forward

    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation))


def fuse_rotary(module: nn.Module, proven: dict[Any, bool], dtype: torch.dtype, device: torch.device) -> bool:
    """Let a module that calls its family's rotary function call the kernel instead. proven: what was tried already."""
    forward: Any = type(module).forward
    reader = reader_of(forward, ROTARY)
    first = next(module.parameters(), None)
    if reader is None or first is None or not lies_at(first, device):
        return False
    family = reader.__globals__[ROTARY]
    if family not in proven:
        proven[family] = all(rotates_alike(family, kind, first.device) for kind in {torch.float32, dtype})
    changed = rebound(forward, reader, ROTARY, Rotation(family)) if proven[family] else None
    if not isinstance(changed, FunctionType):
        return False
    vars(module)["forward"] = MethodType(changed, module)
    return True


@dataclass(frozen=True)
class Rotation:
    """Stands in for a family's rotary function, and calls it wherever it is called in a way that was not tried."""

    family: Callable[..., Any]

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        if others or named or not self.was_tried(q, k, cos, sin):
            return self.family(q, k, cos, sin, *others, **named)
        from draftline.kernels.inference import rotate  # needs Triton, see norm_forward

        return rotate(q, k, cos, sin)

    @staticmethod
    def was_tried(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        if {x.dtype for x in (k, cos, sin)} != {q.dtype} or q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
            return False
        if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
            return False
        fits = cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[2] and cos.shape[2] <= q.shape[3]
        return fits and all(x.stride(-1) == 1 for x in (q, k, cos, sin))


def rotates_alike(family: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> bool:
    """The whole head turned, and half of it where the family can: values of cos and sin that are no angle's, so that
    each dimension must be turned by its own."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    for rotary in (64, 32):
        q, k = normal(2, 5, 4, 64).transpose(1, 2), normal(2, 5, 2, 64).transpose(1, 2)
        cos, sin = normal(2, 5, rotary), normal(2, 5, rotary)
        try:
            expected = family(q, k, cos, sin)
        except (RuntimeError, TypeError):
            if rotary == 64:
                return False
            continue  # a family that turns whole heads, or cuts them itself
        found = Rotation(family)(q, k, cos, sin)
        if len(expected) != 2 or not all(alike(mine, own) for mine, own in zip(found, expected, strict=True)):
            return False
    return True
