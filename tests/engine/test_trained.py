"""Trained drafters in the real serving engine: vLLM accepts of them what draftline's own decoding accepts.

DRAFTLINE_VLLM_PYTHON names the interpreter that has vLLM, DRAFTLINE_REAL_TARGET the folder that
`scripts/fetch_smollm2.py` wrote, DRAFTLINE_QUICKSTART the folder of a finished quickstart; without it one runs here.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_server import vllm_server

from command import Done, draftline_here
from draftline.evaluate.evaluation import EvalRequest, evaluate_here
from draftline.evaluate.vllm_engine import run_worker

INTERPRETER = os.environ.get("DRAFTLINE_VLLM_PYTHON", "")
REAL_TARGET = os.environ.get("DRAFTLINE_REAL_TARGET", "")
QUICKSTART = os.environ.get("DRAFTLINE_QUICKSTART", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),  # the first test may have to run quickstart
    pytest.mark.skipif(not INTERPRETER, reason="DRAFTLINE_VLLM_PYTHON does not name an interpreter that has vLLM"),
]
ASSETS = Path(__file__).parents[2] / "src/draftline/assets"
HELD_OUT = ASSETS / "prompts/held_out.jsonl"
# Drafts that hang on rounding fall out either way: 2 of 993 steps were seen to differ between vLLM and draftline.
SAME_TAU = 0.02


@dataclass(frozen=True)
class InVllm:
    report: dict[str, Any]
    answers: list[list[int]]


def verb(*words: str | Path) -> Done:
    done = draftline_here(*words)
    assert done.code == 0, done.err
    return done


def eval_in_vllm(request: EvalRequest) -> InVllm:
    """`draftline eval --engine vllm`, and the answers decoded with the drafter, which its report does not hold."""
    results = []

    def run_and_keep(interpreter: str, job: dict[str, Any]) -> Any:
        results.append(run_worker(interpreter, job))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftline.evaluate.vllm_engine.run_worker", run_and_keep)
        done = verb("eval", *eval_words(request), "--engine", "vllm", "--vllm-python", INTERPRETER)
    return InVllm(json.loads(done.out), results[0]["answers"])


def eval_words(request: EvalRequest) -> list[str]:
    return [
        *("--target", request.target, "--draft", str(request.draft), "--prompts", str(request.prompts)),
        *("--max-new-tokens", str(request.max_new_tokens), "--dtype", request.dtype, "--json"),
        "--compare-plain" if request.compare_plain else "--no-compare-plain",
    ]


def request_for(target: str | Path, draft: Path, prompts: Path, limit: int, compare_plain: bool = True) -> EvalRequest:
    return EvalRequest(
        str(target), draft, prompts, max_new_tokens=limit, dtype="float32", device="cpu", compare_plain=compare_plain
    )


def quickstart_request(draft: Path, compare_plain: bool = True) -> EvalRequest:
    return request_for(ASSETS / "tiny_target", draft, HELD_OUT, 160, compare_plain)


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a quickstart, with checkpoints/ and export/."""
    if QUICKSTART:
        return Path(QUICKSTART) / "run"
    out = tmp_path_factory.mktemp("quickstart")
    verb("quickstart", "--out", out)
    return out / "run"


@pytest.fixture(scope="module")
def quickstart_in_vllm(quickstart_run: Path) -> InVllm:
    return eval_in_vllm(quickstart_request(quickstart_run / "export"))


def test_vllm_decodes_the_quickstart_as_draftline_does(quickstart_run: Path, quickstart_in_vllm: InVllm) -> None:
    own = evaluate_here(quickstart_request(quickstart_run / "export"))
    report = quickstart_in_vllm.report
    assert own.report.prompts == report["prompts"] == 48
    assert own.report.same_text_share == report["same_text_share"] == 1.0
    assert quickstart_in_vllm.answers == [answer.ids for answer in own.answers]
    assert own.report.tau > 2
    assert report["tau"] == pytest.approx(own.report.tau, rel=SAME_TAU)


def test_a_speculators_folder_is_the_same_drafter(
    quickstart_run: Path, quickstart_in_vllm: InVllm, tmp_path: Path
) -> None:
    newest = max((quickstart_run / "checkpoints").iterdir())
    verb("export", newest, tmp_path / "draft", "--format", "speculators")
    found = eval_in_vllm(quickstart_request(tmp_path / "draft", compare_plain=False))
    assert found.answers == quickstart_in_vllm.answers
    assert found.report["tau"] == quickstart_in_vllm.report["tau"]
    assert found.report["slot_acceptance"] == quickstart_in_vllm.report["slot_acceptance"]


def test_a_server_shows_the_same_tau(quickstart_run: Path, quickstart_in_vllm: InVllm, tmp_path: Path) -> None:
    """The server renders the conversations itself and stops by the target's own generation config."""
    draft = quickstart_run / "export"
    with vllm_server(INTERPRETER, server_words(draft), tmp_path / "log.txt") as url:
        done = verb("eval", *eval_words(quickstart_request(draft)), "--server", url)
    served, wanted = json.loads(done.out), quickstart_in_vllm.report
    assert (served["prompts"], served["tokens"], served["block_size"]) == (48, wanted["tokens"], 8)
    assert served["tau"] == pytest.approx(wanted["tau"], rel=SAME_TAU)


def server_words(draft: Path) -> list[str]:
    """512 positions hold the longest prompt, its answer and two blocks of room: vLLM stops drafting near the limit."""
    speculative = {"method": "dflash", "model": str(draft.resolve()), "num_speculative_tokens": 7}
    return [
        *("--model", str(ASSETS / "tiny_target"), "--dtype", "float32", "--max-model-len", "512"),
        *("--max-num-seqs", "1", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps(speculative)),
    ]


# Four of the six answers follow a pattern, which a drafter of one layer learns within a minute.
QUESTIONS = (
    "Count from 1 to 20.",
    "List the even numbers up to 40.",
    "Write the word hello twenty times.",
    "Name the twelve months of the year.",
    "How do I boil an egg?",
    "What is the capital of France?",
)
ANSWER_LIMIT = 48


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> EvalRequest:
    """A drafter that learned the real target's answers to a few questions by heart, and those questions."""
    home = tmp_path_factory.mktemp("overfitted")
    prompts, answers = home / "questions.jsonl", home / "answers.jsonl"
    conversations = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    prompts.write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations))
    asked = ("--target", REAL_TARGET, "--prompts", prompts, "--out", answers)
    verb("regenerate", *asked, "--max-new-tokens", str(ANSWER_LIMIT), "--device", "cpu")
    verb("train", write_recipe(home, answers))
    return request_for(REAL_TARGET, home / "run/export", prompts, ANSWER_LIMIT, compare_plain=False)


def write_recipe(home: Path, answers: Path) -> Path:
    """Few anchors: the loss over a vocabulary of 49,152 is most of a step's cost."""
    tree = {
        "target": {"path": REAL_TARGET, "keep_features_gib": 1.0},
        "data": {"train": str(answers), "sequence_length": 256},
        "drafter": {"layers": 1, "block_size": 8, "tap_count": 3},
        "optim": {"lr": 4.0e-3},
        "train": {
            "out": str(home / "run"), "epochs": 1000, "max_steps": 200, "rows_per_step": 1, "anchors": 28,
        },
        "placement": {"device": "cpu"},
    }  # fmt: skip
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.skipif(not REAL_TARGET, reason="DRAFTLINE_REAL_TARGET does not name a trained target")
def test_vllm_decodes_a_real_target_as_draftline_does(overfitted: EvalRequest) -> None:
    own = evaluate_here(EvalRequest(**vars(overfitted) | {"compare_plain": True}))
    found = eval_in_vllm(overfitted)
    assert own.report.same_text_share == 1.0
    assert found.answers == [answer.ids for answer in own.answers]  # plain decoding's, by the line above
    assert own.report.tau > 1.5
    assert found.report["tau"] == pytest.approx(own.report.tau, rel=SAME_TAU)
