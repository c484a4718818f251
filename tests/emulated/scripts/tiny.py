"""A tiny model, a tokenizer trained here, and rows of different lengths."""

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = "the cat sat on a mat and then it ran over to where we had left some milk for them".split()


def rows(count=64):
    generator = random.Random(0)
    return [" ".join(generator.choice(WORDS) for _ in range(generator.randint(5, 60))) for _ in range(count)]


def tokenizer():
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trained.train_from_iterator(rows(), trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<pad>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")


def model(**changes):
    defaults = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **changes}))


def tokenized(count=64):
    words = tokenizer()
    return Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in words(rows(count))["input_ids"]])
