"""AdamW on fp32 masters with warm-up and cosine; gradients arrive as undivided sums (SPEC 5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config import OptimSection


def learning_rate(step: int, total_steps: int, section: OptimSection) -> float:
    """Rate of 0-based `step`: linear warm-up over warmup_share of all steps, then a cosine to 0."""
    warmup = max(1, round(section.warmup_share * total_steps))
    if step < warmup:
        return section.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return section.lr * 0.5 * (1 + math.cos(math.pi * progress))


TotalNorm = Callable[[list[Tensor]], Tensor]


class Optimizer:
    """Divides summed gradients by the summed weights, clips by global norm, steps. No host synchronisation.

    model holds the fp32 masters, or this rank's shards of them; total_norm gives the norm over all shards.
    """

    def __init__(
        self,
        model: nn.Module,
        section: OptimSection,
        total_steps: int,
        total_norm: TotalNorm = nn.utils.get_total_norm,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.section = section
        self.total_steps = total_steps
        self.total_norm = total_norm
        self.steps_done = 0
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=section.lr, betas=section.betas, weight_decay=section.weight_decay, fused=True
        )

    @property
    def lr(self) -> float:
        return learning_rate(self.steps_done, self.total_steps, self.section)

    @torch.no_grad()
    def finish(self, weight_sum: Tensor) -> Tensor:
        """One step from gradients of the undivided loss sum; returns the gradient norm before clipping.

        A step whose norm is not finite, or that has no supervised slot at all, leaves parameters and moments as they
        were (the fused kernel's own found_inf); the caller sees it in the norm and the weight sum.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(gradients, weight_sum.clamp(min=torch.finfo(torch.float32).tiny))
        norm = self.total_norm(gradients)
        torch._foreach_mul_(gradients, (self.section.clip_norm / norm).clamp(max=1.0))
        skip = ~torch.isfinite(norm) | (weight_sum == 0)
        self.adamw.found_inf = skip.float()  # type: ignore[attr-defined]  # read by step, declared nowhere
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        # The fused kernel changes tensors behind autograd's back, and the CUDA step tells by a tensor's version whether
        # its working copy is stale: without this line a run trained on its first weights for ever.
        torch.autograd.graph.increment_version(self.parameters)
        self.adamw.zero_grad(set_to_none=True)
        self.steps_done += 1
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts as flat named tensors, for a checkpoint."""
        return {
            f"{index}.{name}": value
            for index, state in self.adamw.state_dict()["state"].items()
            for name, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], steps_done: int) -> None:
        state: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.adamw.load_state_dict({"state": state, "param_groups": self.adamw.state_dict()["param_groups"]})
        self.steps_done = steps_done
