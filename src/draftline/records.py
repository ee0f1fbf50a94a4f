"""What crosses a border between stages. Plain frozen records; torch is imported for type checking only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as read from a file, before any template is applied."""

    messages: tuple[dict[str, Any], ...]
    where: str  # "train.jsonl:12", for messages to people
    answer_ids: tuple[int, ...] | None = None  # the last answer's tokens exactly as the target generated them
    finished: bool = True  # False: the answer was cut at a limit, so it has no end of turn
    source: str | None = None  # the input's own name for where the row comes from, carried through regeneration


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One document: the tokens of a rendered conversation and which of them carry loss."""

    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True on the target's own answer tokens
    where: str


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """R rows of S tokens, each row holding whole documents one after the other, padded at its end.

    `document` numbers the documents of a row from 0 and is -1 on padding. `position` restarts at 0 in each document.
    """

    index: int  # number of this micro-batch since the start of training
    ids: np.ndarray  # int64 [R, S]
    loss_mask: np.ndarray  # bool [R, S]
    document: np.ndarray  # int64 [R, S]
    position: np.ndarray  # int64 [R, S]
    token: np.ndarray  # int64 [R, S] number of the token in the whole data set, -1 on padding

    @property
    def tokens(self) -> int:
        """Target tokens in this batch, padding not counted."""
        return int((self.document >= 0).sum())


@dataclass(frozen=True, slots=True)
class FeatureBatch:
    """What the target says about a PackedBatch (SPEC 1): its taps and, for some losses, its own next-token state."""

    packed: PackedBatch
    taps: Tensor  # [R, S, K*d] residual-stream outputs of the tapped layers, ascending
    final: Tensor | None  # [R, S, d] final-normed last state; head(final[p]) are the target's logits after token p


@dataclass(frozen=True, slots=True)
class Head:
    """The target's frozen head, borrowed by its drafter: logits = cap(scale * (W h + bias)), cap(x) = c tanh(x / c).

    `target.parts` finds what applies and proves it on the target's own logits.
    """

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of final-normed states [..., d], as one plain matrix product.

        On three dimensions torch calls a batched kernel: 146 ms instead of 12 for Qwen3-8B's head on an H200.
        """
        return self.shaped(self.product(states.flatten(0, -2))).unflatten(0, states.shape[:-1])

    def product(self, states: Tensor) -> Tensor:
        """W h + bias [n, V] of states [n, d]."""
        product = states @ self.weight.T
        return product if self.bias is None else product + self.bias

    def shaped(self, product: Tensor) -> Tensor:
        """Logits of products W h + bias, of any shape."""
        if self.scale != 1.0:
            product = product * self.scale
        return product if self.soft_cap is None else (product / self.soft_cap).tanh() * self.soft_cap

    def product_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Gradient with respect to the products, from that with respect to logits y: cap' = 1 - (y / c)^2."""
        if self.soft_cap is not None:
            gradient = gradient * (1 - (logits / self.soft_cap).square())
        return gradient if self.scale == 1.0 else gradient * self.scale

    def to(self, *where: Any) -> Head:
        """The same head on another device or in another dtype, as torch.Tensor.to."""
        bias = None if self.bias is None else self.bias.to(*where)
        return replace(self, weight=self.weight.to(*where), bias=bias)


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter's geometry: everything its weights do not say. Written to config.json, read back from there."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based decoder layers whose outputs are tapped, ascending
    num_target_layers: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # rope_type, rope_theta and whatever that type needs
    max_position_embeddings: int
    layer_types: tuple[str, ...]  # "full_attention" | "sliding_attention" per layer
    sliding_window: int | None = None
    is_causal: bool | None = None  # None: causal in sliding layers, bidirectional in full ones (SPEC 3)
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None where it sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether a slot sees only itself and earlier slots of its block."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step, summed over its micro-batches."""

    step: int
    loss: float  # sum of weighted slot losses / sum of weights
    proxy_tau: float  # tokens per verification step over the sampled anchors, see drafter.step.walk
    slot_accuracy: tuple[float, ...]  # [B-1] share of supervised slots whose argmax is the label
    blocks: int
    tokens: int  # target tokens consumed, padding not counted
    supervised_tokens: int
    grad_norm: float
    lr: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Acceptance on one set of prompts by real decoding (SPEC 7)."""

    benchmark: str
    engine: str
    tau: float  # tokens committed per verification step, bonus token included
    slot_acceptance: tuple[float, ...]  # [B-1] share of steps in which draft slot k was accepted; an engine's own
    # counters include what lies past an answer's end, draftline's decoding does not
    prompts: int
    verify_steps: int
    tokens: int
    temperature: float
    thinking: bool | None
    block_size: int
    max_new_tokens: int
    tokens_per_s: float
    plain_tokens_per_s: float | None = None
    same_text_share: float | None = None  # share of prompts whose text equals plain decoding's
    environment: dict[str, Any] = field(default_factory=dict)
    trained_steps: int | None = None  # steps done when a run in training was decoded with; None: an export

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Severity = Literal["ok", "note", "warning", "severe"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is so about a run's health: its name, the numbers that show it, and what to do."""

    name: str
    severity: Severity  # ok and note ask for nothing; a severe one may stop the run (train.on_alarm)
    evidence: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()  # the ranks it is about; empty: the whole run
