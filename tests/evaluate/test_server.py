import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftline.errors import InputError, RunError
from draftline.evaluate.server import Requests, evaluate_server

BLOCK = 4
REQUESTS = Requests(benchmark="chat", max_new_tokens=10, temperature=0.0, thinking=False)
PROMPTS = [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]


@dataclass
class Engine:
    """What the little server pretends to be: each answer takes `steps` (accepted tokens per verification step)."""

    steps: tuple[int, ...] = (3, 0, 1)
    cut: int = 0  # tokens of the last step that lie beyond the limit
    foreign_tokens: int = 0  # what another client gets meanwhile
    speculative: bool = True
    status: int = 200
    lag: int = 0  # metrics reads that still show the old counters
    drafts: int = 100
    accepted: int = 40
    per_slot: list[int] = field(default_factory=lambda: [25, 10, 5])
    generated: int = 1000
    bodies: list[dict[str, Any]] = field(default_factory=list)
    shown: str = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        tokens = 1 + len(self.steps) + sum(self.steps) - self.cut
        self.drafts += len(self.steps)
        self.accepted += sum(self.steps)
        for step in self.steps:
            for slot in range(step):
                self.per_slot[slot] += 1
        self.generated += tokens + self.foreign_tokens
        return {"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": tokens}}

    def metrics(self) -> str:
        if self.shown and self.bodies and self.lag > 0:
            self.lag -= 1
            return self.shown
        lines = [
            "# HELP vllm:generation_tokens_total Tokens.",
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated}.0',
        ]
        if self.speculative:
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {self.drafts}.0',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {self.accepted}.0',
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{engine="0",position="{i}"}} {n}.0' for i, n in enumerate(self.per_slot)]
            lines += [f'{name}{{engine="1",position="{i}"}} 0.0' for i in range(len(self.per_slot))]
        self.shown = "\n".join(lines) + "\n"
        return self.shown


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "served-name"}]}))
        else:
            self.reply(self.engine.metrics())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(json.dumps(self.engine.answer(body)), self.engine.status)

    def reply(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    handler = type("BoundHandler", (Handler,), {"engine": engine})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_acceptance_comes_from_what_the_counters_moved_by(engine: Engine, url: str) -> None:
    report = evaluate_server(url, PROMPTS, REQUESTS)
    assert report.tau == (16 - 2) / 6
    assert report.slot_acceptance == (4 / 6, 2 / 6, 2 / 6)
    assert (report.prompts, report.verify_steps, report.tokens, report.block_size) == (2, 6, 16, BLOCK)
    assert (report.engine, report.benchmark, report.max_new_tokens) == ("server served-name", "chat", 10)
    assert report.tokens_per_s > 0


def test_the_server_is_asked_as_told(engine: Engine, url: str) -> None:
    evaluate_server(url + "/v1/", PROMPTS, replace(REQUESTS, temperature=0.7, seed=3))
    assert engine.bodies[1] == {
        "model": "served-name",
        "messages": [{"role": "user", "content": "two"}],
        "max_tokens": 10,
        "temperature": 0.7,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    evaluate_server(url, PROMPTS, replace(REQUESTS, thinking=None))
    assert "chat_template_kwargs" not in engine.bodies[-1]


def test_a_last_step_cut_by_the_limit_counts_what_it_committed(engine: Engine, url: str) -> None:
    engine.steps, engine.cut = (0, 3), 3
    report = evaluate_server(url, PROMPTS, REQUESTS)
    assert (report.tau, report.tokens) == ((6 - 2) / 4, 6)


def test_counters_that_move_late_are_waited_for(engine: Engine, url: str) -> None:
    engine.lag = 3
    assert evaluate_server(url, PROMPTS, REQUESTS).verify_steps == 6


def test_foreign_traffic_is_refused(engine: Engine, url: str) -> None:
    engine.foreign_tokens = 5
    with pytest.raises(RunError, match="generated 26 tokens while we received 16: someone else's requests"):
        evaluate_server(url, PROMPTS, REQUESTS)


def test_more_drafted_than_our_tokens_explain_is_refused(engine: Engine, url: str) -> None:
    engine.steps, engine.cut = (3, 3, 3), 4
    with pytest.raises(RunError, match="moved by 24 tokens for 18 tokens of ours"):
        evaluate_server(url, PROMPTS, REQUESTS)


def test_steps_without_a_draft_are_refused(engine: Engine, url: str) -> None:
    engine.cut = -2
    with pytest.raises(RunError, match="4 of 20 tokens were decoded without a draft"):
        evaluate_server(url, PROMPTS, REQUESTS)


def test_answers_of_one_token_measure_nothing(engine: Engine, url: str) -> None:
    engine.steps = ()
    with pytest.raises(RunError, match="no verification step had a draft"):
        evaluate_server(url, PROMPTS, REQUESTS)


def test_a_server_without_a_drafter_is_refused(engine: Engine, url: str) -> None:
    engine.speculative = False
    with pytest.raises(InputError, match="/metrics has no vllm:spec_decode_num_drafts_total") as caught:
        evaluate_server(url, PROMPTS, REQUESTS)
    assert "--speculative-config" in caught.value.remedy
    assert engine.bodies == []


def test_a_refused_request_shows_the_servers_words(engine: Engine, url: str) -> None:
    engine.status = 400
    with pytest.raises(RunError, match=r"/v1/chat/completions answered 400 Bad Request: .*completion_tokens"):
        evaluate_server(url, PROMPTS, REQUESTS)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "127.0.0.1:8000", "no url"])
def test_an_unreachable_server_is_named(address: str) -> None:
    with pytest.raises(InputError, match="cannot be reached") as caught:
        evaluate_server(address, PROMPTS, REQUESTS)
    assert f"server {address}/v1/models" in caught.value.what


def test_no_prompts_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="chat: no prompts"):
        evaluate_server(url, [], REQUESTS)
