"""A tokenizer trained on the fly, sentences, and a tiny model that knows its words."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.trainer.small import llama

_NOUNS = ("river", "stone", "lamp", "garden", "letter", "window")
_VERBS = ("keeps", "finds", "carries", "forgets")
TEXTS = [
    f"the {_NOUNS[place % 6]} {_VERBS[place % 4]} the {_NOUNS[(place * 5 + 1) % 6]}" + " and the road goes on" * (place % 4)
    for place in range(24)
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges; the first three words are for padding, the end and the beginning."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<s>"]
    found.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)  # type: ignore[no-untyped-call]


def model_of(words: PreTrainedTokenizerFast, **changes: Any) -> LlamaForCausalLM:
    """A Llama with as many words as the tokenizer."""
    torch.manual_seed(0)
    return llama(vocab_size=len(words), eos_token_id=1, bos_token_id=2, **changes)
