"""Small tokenizers made on the spot, and short chat templates in the manner of well-known models."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "system", "user", "assistant", "tool", *"abcdefghijk"]  # 19, id = place
PAD, UNK, START, STOP, SYSTEM, USER, ASSISTANT, TOOL, A, B, C, D, E, F = range(14)

TINY = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER_ONLY_IN_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|begin|>{% endif %}<|head|>{{ m.role }}<|/head|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate user/assistant') }}{% endif %}"
    "<|head|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
QWEN3 = (  # reasoning is shown in the last turn only; without any, the last turn gets an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = (m.content or '').split('</think>') %}{% set said = parts[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 }}\n</think>\n\n{{ said }}"
    "{% else %}{{ said }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK = (  # the generation prompt opens the reasoning, finished turns do not show it
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n<think>\n{% endif %}"
)
TRAILING_SPACE = (  # the prompt's last token merges with the answer's first: "Assistant: " + "the" = ":" + " the"
    "{% for m in messages %}{{ 'User' if m.role == 'user' else 'Assistant' }}: {{ m.content }}"
    "{{ '<|endoftext|>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
LEADING_SPACE = TRAILING_SPACE.replace("Assistant: {% endif %}", "Assistant:{% endif %}")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]
CORPUS = [
    "the dog and the cat ran to the house. the end\n\nUser: what is the answer?\nAssistant: the answer is the dog",
    "user\nassistant\nsystem\ntool\n[INST] what is the [/INST] the dog and the cat\n\n\nthe house and the answer",
] * 4


def tiny_tokenizer(template: str | None = TINY) -> PreTrainedTokenizerFast:
    """19 words split at white space; every word of WORDS is one token, its place is its id."""
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def trained_byte_bpe(keeps_line_breaks_together: bool) -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if keeps_line_breaks_together:
        split = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return core.to_str()


def byte_bpe(template: str | None = CHATML, keeps_line_breaks_together: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the control tokens of the templates above.

    It splits as GPT-2 does: "\\n\\n" is one token at a text's end and two before a word. With
    `keeps_line_breaks_together` it splits as Llama 3 and Qwen do: one token in both places.
    """
    core = Tokenizer.from_str(trained_byte_bpe(keeps_line_breaks_together))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def control_ids(tokenizer: PreTrainedTokenizerFast, *texts: str) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[text] for text in texts)


def dummy_prefix_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Sentencepiece's habit: a space is put before every text, so "the" alone has the tokens of " the"."""
    core = Tokenizer(models.BPE(unk_token=None))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    letters = sorted(set("".join(CORPUS)) | {"▁", "\n"})
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, initial_alphabet=letters, show_progress=False))
    core.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer
