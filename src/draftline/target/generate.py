"""The target writes answers, many prompts at a time: the source of training data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import GenerationConfig

from draftline.target.load import Target


class Generator:
    """Callable: token-id prompts -> (prompt index, answer ids, finished), in batches of like length.

    An answer that ended keeps its stop token; one that met `max_new_tokens` is not finished. Greedy at temperature 0.
    """

    def __init__(
        self, target: Target, max_new_tokens: int, batch_size: int, temperature: float = 0.0, seed: int = 0
    ) -> None:
        self.target = target
        self.batch_size = batch_size
        torch.manual_seed(seed)  # transformers samples from torch's global generator
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        self.settings = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=sorted(target.stop_ids), pad_token_id=self.filler,
            **{"do_sample": False} | sampling,
        )  # fmt: skip

    @property
    def filler(self) -> int:
        """Any token serves as padding: it is masked on the left and cut off on the right."""
        return min(self.target.stop_ids)

    def __call__(self, prompts: Sequence[list[int]]) -> Iterator[tuple[int, list[int], bool]]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            answers = self.generate([prompts[i] for i in batch])
            for index, answer in zip(batch, answers, strict=True):
                yield index, *self.cut(answer)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.filler] * (longest - len(p)) + p for p in prompts], device=self.target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.target.device)
        out = self.target.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.settings)
        return out[:, longest:].tolist()

    def cut(self, answer: list[int]) -> tuple[list[int], bool]:
        for i, token in enumerate(answer):
            if token in self.target.stop_ids:
                return answer[: i + 1], True
        return answer, False
