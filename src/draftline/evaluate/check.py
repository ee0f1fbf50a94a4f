"""`draftline check`: the gates of a target and of a drafter for it, on the target's own answers to a few questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from draftline.config import DrafterSection, TargetSection
from draftline.data.chat import ChatRenderer
from draftline.data.excerpt import excerpt
from draftline.data.proofs import Example
from draftline.data.rendering import render_conversations
from draftline.data.stream import RowStream
from draftline.data.template import Unusable
from draftline.drafter.losses import LossKind
from draftline.drafter.model import Drafter, untrained
from draftline.drafter.step import DrafterStep
from draftline.environment.device import choose_device
from draftline.errors import InputError
from draftline.evaluate.decoding import DecodingTask, measure
from draftline.evaluate.evaluation import check_fit, load_drafter
from draftline.evaluate.gates import Gate, Gates
from draftline.evaluate.proofs import prove_origin, prove_tensors
from draftline.evaluate.subject import Subject, data_gates, drafter_gates, target_gates
from draftline.export.folder import detect_format, read_drafter
from draftline.monitor.notices import Notices, stdout_console
from draftline.records import Conversation, DrafterSpec
from draftline.target.capture import FeatureCapture
from draftline.target.derive import derive_spec
from draftline.target.generate import Generator
from draftline.target.load import Target, load_target

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "A train leaves at nine and arrives at eleven thirty. How long does the journey take? Explain step by step.",
    "Name three colours.",
)
ANSWER_TOKENS = 32
LEAST_ANSWER_TOKENS = 6
ANCHORS = 16  # blocks in a row
LOSS = LossKind("kl", "dpace", None, 0.5)  # one that needs the teacher's logits, so that they are proven too


def check(target: str, draft: Path | None) -> None:
    """Pass every gate of a target, in float32, and of a drafter for it: the folder's, or one with random weights.

    Raises InputError at the first gate that fails.
    """
    notices = Notices(stdout_console())
    gates = Gates(notices)
    notices.section(f"target {target}")
    section = TargetSection(path=target, dtype="float32")
    loaded = gates.through(Gate("loads", lambda: load_target(section, choose_device("auto")), target_figure))
    prompts = gates.through(Gate("prompts", lambda: prompt_ids(loaded), prompts_figure))
    if draft is None:
        spec = gates.through(Gate("drafter shape", lambda: derive_spec(DrafterSection(), loaded), shape_figure))
        drafter = untrained(spec, seed=0).eval().requires_grad_(False).to(loaded.device)
    else:
        notices.section(f"drafter {draft}")
        drafter = open_drafter(draft, loaded, gates)
    notices.section("proofs on the target's own answers" + ("" if draft else ", with an untrained drafter"))
    conversations = answered(loaded, prompts)
    stream = gates.through(Gate("rows", lambda: render(loaded, conversations), rows_figure))
    examples = [Example(conversation, number) for number, conversation in enumerate(conversations)]
    gates.all(data_gates(loaded, stream, examples))
    subject = subject_of(loaded, drafter, stream)
    gates.all(target_gates(subject))
    gates.all(drafter_gates(subject))
    if draft is not None:
        gates.through(Gate("decoding", lambda: prove_decoding(loaded, drafter, prompts)))
    notices.say(f"  {len(gates.figures)} gates passed in {gates.seconds:.1f} s")


def open_drafter(draft: Path, target: Target, gates: Gates) -> Drafter:
    spec, tensors = gates.through(Gate("reloads", lambda: read_drafter(draft), lambda _: detect_format(draft)))
    gates.all(folder_gates(draft, spec, target))
    gates.through(Gate("tensors", lambda: prove_tensors(tensors), "{} finite, none zero".format))
    return load_drafter(spec, tensors).to(target.device)


def folder_gates(draft: Path, spec: DrafterSpec, target: Target) -> Iterator[Gate[str]]:
    """What a drafter's folder says, before any of its numbers is used."""
    yield Gate("geometry", lambda: check_fit(draft, spec, target))
    yield Gate("origin", lambda: prove_origin(draft, spec, target))


def subject_of(target: Target, drafter: Drafter, stream: RowStream) -> Subject:
    """The plain, uncompiled step: nothing is trained here."""
    parts = target.parts
    step = DrafterStep(drafter, target.embed, parts.head, LOSS, ANCHORS, seed=0)
    capture = FeatureCapture(target, drafter.spec.target_layer_ids, want_final=True)
    return Subject(target, step, capture, excerpt(stream))


def prompt_ids(target: Target) -> list[list[int]]:
    try:
        return [renderer(target).prompt_ids([user(question)]) for question in QUESTIONS]
    except Unusable as unusable:
        raise InputError(
            f"expected a prompt for one user turn, found {unusable.reason}", "likely a broken chat template"
        ) from unusable


def answered(target: Target, prompts: list[list[int]]) -> list[Conversation]:
    """The questions with the target's own greedy answers; one too short to prove anything, or of ids that the
    tokenizer does not know (a target with random weights), is stood in for by the question's own tokens."""
    generate = Generator(target, ANSWER_TOKENS, batch_size=len(prompts))
    answers = {index: (ids, finished) for index, ids, finished in generate(prompts)}
    conversations = []
    for number, question in enumerate(QUESTIONS):
        ids, finished = answers[number]
        if len(ids) < LEAST_ANSWER_TOKENS or max(ids) >= len(target.tokenizer):
            ids, finished = prompts[number][-ANSWER_TOKENS:], False
        said = {"role": "assistant", "content": str(target.tokenizer.decode(ids, skip_special_tokens=True))}
        where = f"question {number + 1}"
        conversations.append(Conversation((user(question), said), where, answer_ids=tuple(ids), finished=finished))
    return conversations


def render(target: Target, conversations: list[Conversation]) -> RowStream:
    """Rows as training makes them. An answer of no words ("" to a random target) is given one, its ids are used
    anyway."""
    spoken = [
        conversation
        if conversation.messages[-1]["content"].strip()
        else replace(conversation, messages=(conversation.messages[0], {"role": "assistant", "content": "?"}))
        for conversation in conversations
    ]
    rendered = render_conversations(spoken, renderer(target), max_unusable_share=1.0)
    return RowStream(rendered.rows, max(len(row.ids) for row in rendered.rows), 1, seed=0, epochs=1)


def renderer(target: Target) -> ChatRenderer:
    return ChatRenderer(target.tokenizer, target.stop_ids, {}, int(target.parts.config.max_position_embeddings))


def user(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def prove_decoding(target: Target, drafter: Drafter, prompts: list[list[int]]) -> str:
    """tau on the built-in questions, where the text must be that of plain decoding, token for token."""
    task = DecodingTask("check", prompts, ANSWER_TOKENS, temperature=0.0, thinking=None, compare_plain=True)
    report = measure(target, drafter, task, lambda _answer: None).report
    if report.same_text_share != 1.0:
        raise InputError(
            f"expected plain decoding's text on {report.prompts} questions, found it on {report.same_text_share:.0%}",
            "likely the target's cache cannot take tokens back (recurrent states): decoding would change its text",
        )
    return f"tau {report.tau:.3f}, same text as plain decoding on {report.prompts} of {report.prompts} questions"


def target_figure(target: Target) -> str:
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    dtype = str(target.dtype).removeprefix("torch.")
    return f"{type(target.model).__name__}, {parameters:,} parameters, {dtype}, {target.device}"


def prompts_figure(prompts: list[list[int]]) -> str:
    return f"{len(prompts)} questions of {', '.join(str(len(ids)) for ids in prompts)} tokens"


def rows_figure(stream: RowStream) -> str:
    return f"{len(stream.lengths)} of {', '.join(map(str, stream.lengths))} tokens, by the target's chat template"


def shape_figure(spec: DrafterSpec) -> str:
    return f"taps {list(spec.target_layer_ids)} of {spec.num_target_layers} layers, hidden {spec.hidden_size}"
