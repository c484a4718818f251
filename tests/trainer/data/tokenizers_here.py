"""Tokenizers that are trained here: bytes and a few merges, so that every text comes back from its tokens."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}BEGIN{% if not loop.last %}{{ m['content'].split('!')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "</s>END{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves out of earlier answers what stands before a '!', as templates do with thoughts; BEGIN and END are places for marks."""
UNMARKED = FORGETFUL.replace("BEGIN", "").replace("END", "")
MARKED = FORGETFUL.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")

THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% set thoughts = m.reasoning_content or m['content'].split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m['content'] "
    "else m.reasoning_content or '' %}"
    "{% if loop.last %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ m['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m['content'] }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes thoughts before the last answer alone, given apart or inside of it, and an empty block where there are none."""

_SPECIAL = ["<pad>", "</s>", "<s>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEXTS = ["the river finds the stone and the lamp", "你好吗？ 今天天气很好", "question and answer\n"] * 3


def tokenizer(around: str = "<s> $A", template: str | None = None) -> Any:
    """A new one. `around`: what stands about a sequence, as tokenizers write it."""
    raw = Tokenizer.from_str(_trained())
    raw.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 2), ("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    made: Any = PreTrainedTokenizerFast(tokenizer_object=raw, **names)  # type: ignore[no-untyped-call]
    made.chat_template = template
    return made


@functools.cache
def _trained() -> str:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(_TEXTS, trainer)
    return raw.to_str()
