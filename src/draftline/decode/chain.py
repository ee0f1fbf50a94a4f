"""Chain speculative decoding (SPEC 6): greedy, and sampled without changing the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftline.decode.models import CachedDrafter, CachedTarget
from draftline.drafter.model import Drafter
from draftline.target.load import Target


@dataclass(frozen=True)
class Limits:
    """When decoding ends: after `max_new_tokens`, or with a stop token (which is kept)."""

    max_new_tokens: int
    stop_ids: frozenset[int]

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The part of newly decided tokens that is committed."""
        ids = ids[:room]
        for i, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[: i + 1]
        return ids


@dataclass
class Decoded:
    """An answer and how it came about."""

    ids: list[int]
    committed: list[int] = field(default_factory=list)  # tokens committed by each verification step, bonus included


class Sampler:
    """Chooses tokens at a temperature; 0 is greedy. A generator of its own on the target's device."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)

    def choose(self, logits: Tensor) -> list[int]:
        """One token per row of logits [n, V], rows independently."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        return self.draw(self.probabilities(logits)).tolist()

    def verify(self, drafts: list[int], draft_logits: Tensor, target_logits: Tensor) -> tuple[int, int]:
        """(accepted drafts r, next token). draft_logits [B-1, V] and target_logits [B, V], row k after k drafts.

        Greedy: longest prefix equal to the target's argmax. Sampled: draft t is accepted with min(1, p(t)/q(t)), else
        the next token comes from (p - q)+ (Leviathan et al., arXiv 2211.17192). Each draft was drawn from its own
        slot's q, independent of the other drafts, so that q is its conditional distribution too.
        """
        if self.temperature == 0:
            own = target_logits.argmax(-1).tolist()
            r = next((k for k, draft in enumerate(drafts) if draft != own[k]), len(drafts))
            return r, own[r]
        p, q = self.probabilities(target_logits), self.probabilities(draft_logits)
        uniform = torch.rand(len(drafts), dtype=p.dtype, device=p.device, generator=self.generator).tolist()
        for k, draft in enumerate(drafts):
            if uniform[k] * float(q[k, draft]) >= float(p[k, draft]):
                return k, int(self.draw((p[k] - q[k]).clamp(min=0)))
        return len(drafts), int(self.draw(p[-1]))


def decode_speculative(
    target: Target, drafter: Drafter, prompt: list[int], limits: Limits, sampler: Sampler
) -> Decoded:
    """Decode one answer with the drafter. Greedy output equals decode_plain's token for token in float32."""
    taps = drafter.spec.target_layer_ids
    verifier, proposer = CachedTarget(target, taps), CachedDrafter(drafter, target)
    logits, features = verifier.forward(prompt, logits_for=1)
    answer = Decoded(sampler.choose(logits))
    while len(answer.ids) < limits.max_new_tokens and answer.ids[-1] not in limits.stop_ids:
        assert features is not None
        draft_logits = proposer.forward(answer.ids[-1], features)
        drafts = sampler.choose(draft_logits)
        logits, features = verifier.forward([answer.ids[-1], *drafts], logits_for=len(drafts) + 1)
        accepted, following = sampler.verify(drafts, draft_logits, logits)
        verifier.drop_last(len(drafts) - accepted)
        features = features[:, : accepted + 1] if features is not None else None
        new = limits.cut([*drafts[:accepted], following], limits.max_new_tokens - len(answer.ids))
        answer.ids += new
        answer.committed.append(len(new))
    return answer


def decode_plain(target: Target, prompt: list[int], limits: Limits, sampler: Sampler) -> Decoded:
    """The target alone, one token a forward: what speculative decoding must not change."""
    verifier = CachedTarget(target)
    logits, _ = verifier.forward(prompt, logits_for=1)
    answer = Decoded(sampler.choose(logits))
    while len(answer.ids) < limits.max_new_tokens and answer.ids[-1] not in limits.stop_ids:
        logits, _ = verifier.forward(answer.ids[-1:], logits_for=1)
        answer.ids += sampler.choose(logits)
        answer.committed.append(1)
    return answer
