"""The target's chat template: a conversation as texts, one prompt and one answer for each assistant turn.

Stock templates say nothing about which part the model generated, and user text may spell out control tokens. So nothing
is searched for in the rendered text: the prompt of turn i is the template of the messages before it with its generation
prompt, P_i, and the answer is what the template of the messages through it, F_i, adds to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OURS = frozenset(
    {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
LONGEST_REASON_CHARS = 120


class Unusable(Exception):
    """A conversation, or one of its turns, that cannot be trained on. `reason` is the bucket that counts it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn as text. `answer` is everything the template writes after `prompt`, its ending included."""

    index: int  # of the message
    prompt: str
    answer: str
    unusable: str | None = None  # why `answer` is empty, if it is


class ChatTemplate:
    """A tokenizer's chat template with the recipe's `template_kwargs`.

    Raises InputError where the tokenizer has no template (also for rows of `prompt` and `completion`: they are one user
    turn and one assistant turn, because that is how a chat model is served) or a keyword is draftline's own to set.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], stop_texts: Iterable[str]
    ) -> None:
        taken = sorted(OURS & kwargs.keys())
        if taken:
            raise InputError(f"data.template_kwargs sets {', '.join(taken)}, which draftline itself sets", "remove it")
        self.source = template_source(tokenizer)
        self.kwargs = dict(kwargs)
        self.tokenizer = tokenizer
        self.stop_texts = tuple(stop_texts)
        self.control_texts = tuple(tokenizer.get_added_vocab())
        self.adds_generation_prompt = self.probe_generation_prompt()

    @property
    def has_thinking_switch(self) -> bool:
        return "enable_thinking" in self.source

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The template's text. Raises Unusable("template refused: ...") where the template refuses the messages."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self.kwargs
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            # raise_exception, an undefined name, or an operation on a content of a kind the template did not expect
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:LONGEST_REASON_CHARS]
            raise Unusable(f"template refused: {reason}") from error
        return str(text)

    def probe_generation_prompt(self) -> bool:
        """Whether add_generation_prompt changes anything; if the template refuses the probe, it is taken to."""
        probe = [{"role": "user", "content": "x"}]
        try:
            return self.render(probe, True) != self.render(probe, False)
        except Unusable:
            return True

    def turns(self, messages: Sequence[dict[str, Any]]) -> list[Turn]:
        """Every assistant turn. Raises Unusable if the template refuses the conversation or there is no such turn."""
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not indices:
            raise Unusable("no assistant turn")
        return [self.turn(messages, index) for index in indices]

    def turn(self, messages: Sequence[dict[str, Any]], index: int) -> Turn:
        if index == 0:  # a greeting: the target never speaks before it is prompted
            return Turn(index, "", "", "answer without a prompt")
        prompt = self.render(messages[:index], True)
        full = self.render(messages[: index + 1], False)
        if is_empty(messages[index]):
            return Turn(index, prompt, "", "empty answer")
        try:
            return Turn(index, prompt, self.answer(messages, index, prompt, full))
        except Unusable as unusable:
            return Turn(index, prompt, "", unusable.reason)

    def answer(self, messages: Sequence[dict[str, Any]], index: int, prompt: str, full: str) -> str:
        content = messages[index].get("content")
        if not full.startswith(prompt):
            return self.continued_answer(content, prompt, full)
        answer = full[len(prompt) :]
        # Llama-2 style templates need no generation prompt: the answer's text follows at once. Where the template
        # writes a header of control tokens first, that header would count as the target's own words.
        has_header = answer.lstrip().startswith(self.control_texts) and not str(content).startswith(self.control_texts)
        if has_header and not self.adds_generation_prompt:
            raise Unusable("the template adds no generation prompt")
        return answer

    def continued_answer(self, content: Any, prompt: str, full: str) -> str:
        """The answer where F_i does not start with P_i, from the text as it was generated.

        Templates of reasoning models open a part in the generation prompt ("<think>\\n") and drop that part from
        finished turns. What the target then generates is the turn's own text, less the opening that the prompt holds.
        """
        opening = overlap(prompt, content) if isinstance(content, str) else 0
        if not isinstance(content, str) or (not opening and "</think>" not in content):
            raise Unusable("the template's answer does not follow its generation prompt")
        ends = [(full.rfind(stop), stop) for stop in self.stop_texts if stop in full]
        return content[opening:] + (max(ends)[1] if ends else "")


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    remedy = (
        "put the model's chat_template.jinja beside its tokenizer; for a base model that is prompted with plain text, "
        f"use {PLAIN_TEMPLATE}"
    )
    if not tokenizer.chat_template:
        raise InputError(f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template", remedy)
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several named templates, none of them the default
        raise InputError(f"the tokenizer of {tokenizer.name_or_path or 'the target'}: {error}", remedy) from error


def is_empty(message: dict[str, Any]) -> bool:
    """No text, no reasoning and no tool call: nothing that the target could have generated."""
    if message.get("tool_calls"):
        return False
    texts = [message.get("content"), message.get("reasoning_content")]
    return all(not text.strip() if isinstance(text, str) else not text for text in texts)


def overlap(left: str, right: str) -> int:
    """Length of the longest end of `left` that is also a beginning of `right`."""
    longest = min(len(left), len(right))
    return next((n for n in range(longest, 0, -1) if right.startswith(left[-n:])), 0)
