"""tau of an OpenAI-compatible vLLM server that already runs, from its metrics before and after our requests."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftline.errors import InputError, RunError
from draftline.evaluate.acceptance import Acceptance, check_counts
from draftline.records import EvalReport

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "vllm:generation_tokens_total"
SETTLE_S = 5.0  # a server may answer a moment before its counters move

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+\d+)?$")
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Requests:
    """What to ask the server. thinking is handed to the chat template as enable_thinking unless it is None."""

    benchmark: str
    max_new_tokens: int
    temperature: float
    thinking: bool | None = None
    seed: int = 0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's totals, over all its engines."""

    acceptance: Acceptance
    generated: int


def evaluate_server(url: str, prompts: Sequence[Messages], requests: Requests) -> EvalReport:
    """Ask a running server every prompt, one at a time, and report its acceptance.

    url: the server's root, for example http://127.0.0.1:8000. The server must be idle otherwise.
    Raises InputError when it cannot be reached or does not speculate, RunError when other requests were mixed in.
    """
    if not prompts:
        raise InputError(f"{requests.benchmark}: no prompts to ask {url}")
    server = Server(url.rstrip("/").removesuffix("/v1"), requests.timeout_s)
    model, before = server.model(), server.counters()
    started_s = time.perf_counter()
    tokens = sum(server.ask(model, messages, requests) for messages in prompts)
    seconds = time.perf_counter() - started_s
    found = moved(server, before, tokens)
    check_counts(f"server {url}", found, tokens, len(prompts))
    return EvalReport(
        benchmark=requests.benchmark,
        engine=f"server {model}",
        tau=found.tau(tokens, len(prompts)),
        slot_acceptance=found.slot_acceptance,
        prompts=len(prompts),
        verify_steps=found.drafts,
        tokens=tokens,
        temperature=requests.temperature,
        thinking=requests.thinking,
        block_size=len(found.accepted_per_slot) + 1,
        max_new_tokens=requests.max_new_tokens,
        tokens_per_s=tokens / seconds,
    )


def moved(server: Server, before: Counters, tokens: int) -> Acceptance:
    """What the counters moved by. Raises RunError unless the server generated exactly what we received."""
    deadline_s = time.monotonic() + SETTLE_S
    after = server.counters()
    while after.generated - before.generated < tokens and time.monotonic() < deadline_s:
        time.sleep(0.1)
        after = server.counters()
    generated = after.generated - before.generated
    if generated != tokens:
        raise RunError(
            f"server {server.root}: it generated {generated} tokens while we received {tokens}: "
            "someone else's requests are mixed in, or it restarted; measure while the server is otherwise idle"
        )
    old, new = before.acceptance, after.acceptance
    slots = zip(new.accepted_per_slot, old.accepted_per_slot, strict=True)
    return Acceptance(new.drafts - old.drafts, new.accepted - old.accepted, tuple(a - b for a, b in slots))


@dataclass(frozen=True, slots=True)
class Server:
    root: str  # without a trailing slash
    timeout_s: float

    def model(self) -> str:
        """The name that the server answers to."""
        models = self.json("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(f"server {self.root}: /v1/models names no model", "is it OpenAI-compatible?") from error

    def ask(self, model: str, messages: Messages, requests: Requests) -> int:
        """Tokens of the answer to one conversation."""
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": requests.max_new_tokens,
            "temperature": requests.temperature,
            "seed": requests.seed,
        }
        if requests.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": requests.thinking}
        answer = self.json("/v1/chat/completions", body)
        try:
            return int(answer["usage"]["completion_tokens"])
        except (KeyError, TypeError) as error:
            raise RunError(f"server {self.root}: an answer without usage.completion_tokens: {answer}") from error

    def counters(self) -> Counters:
        return read_counters(self.root, self.text("/metrics"))

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        text = self.text(path, body)
        try:
            return json.loads(text)
        except ValueError as error:
            raise InputError(f"server {self.root}{path}: the answer is not JSON: {text[:200]!r}") from error

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                content: bytes = response.read()
        except urllib.error.HTTPError as error:
            reply = error.read().decode(errors="replace")[:500]
            raise RunError(f"server {self.root}{path} answered {error.code} {error.reason}: {reply}") from error
        except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors; ValueError: not a URL
            remedy = "start the server, or give its root, for example http://127.0.0.1:8000"
            raise InputError(f"server {self.root}{path} cannot be reached: {error}", remedy) from error
        return content.decode(errors="replace")


def read_counters(where: str, metrics: str) -> Counters:
    """The counters in a Prometheus exposition. Raises InputError when speculative decoding is not among them."""
    totals: dict[str, float] = {}
    slots: dict[int, float] = {}
    for line in metrics.splitlines():
        sample = SAMPLE.match(line)
        if sample is None:
            continue
        name, value = sample["name"], float(sample["value"])
        totals[name] = totals.get(name, 0.0) + value
        if name == PER_SLOT and (position := POSITION.search(sample["labels"] or "")):
            slots[int(position[1])] = slots.get(int(position[1]), 0.0) + value
    if missing := [name for name in (DRAFTS, ACCEPTED, PER_SLOT, GENERATED) if name not in totals]:
        raise InputError(
            f"server {where}: /metrics has no {', '.join(missing)}",
            "only vLLM counts drafts there, and only when it serves with --speculative-config",
        )
    per_slot = tuple(int(slots[position]) for position in sorted(slots))
    return Counters(Acceptance(int(totals[DRAFTS]), int(totals[ACCEPTED]), per_slot), int(totals[GENERATED]))
