"""A plan counts the tokens that are trained: `brim plan` and `brim train` agree on every length, for odd rows and odd tokenizers too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brim.errors import UsageError
from brim.trainer.loading import load_tokenizer
from brim.workload.lengths import measure_lengths
from tests.trainer.data.test_prepare import CHAT, jsonl, prepared, sequences
from tests.trainer.data.tokenizers_here import CHATML, tokenizer

OPEN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
"""A template that writes nothing behind an answer."""


@pytest.mark.parametrize("around", ["<s> $A </s>", "<s> $A", "$A </s>", "$A"])
@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize(
    ("task", "template", "rows"),
    [
        ("causal-lm", None, [{"prompt": "the river", "response": "a stone " * count} for count in range(1, 9)]),
        ("causal-lm", None, [{"text": "the river and " * count} for count in range(1, 9)]),
        ("causal-lm", None, [{"prompt": "", "response": "a lamp"}]),
        *(
            ("causal-lm", template, [{"messages": CHAT[: 2 * count + 1]} for count in (1, 2)])
            for template in (None, CHATML, OPEN)
        ),
        ("seq2seq", None, [{"source": "the river " * count, "target": "a stone"} for count in range(1, 9)]),
        ("classification", None, [{"text": "the river " * count, "label": count % 2} for count in range(1, 9)]),
    ],
    ids=["answers", "texts", "no question", "chats", "chats by template", "chats without an end", "seq2seq", "classification"],
)
def test_a_plan_counts_the_tokens_that_are_trained(
    tmp_path: Path, around: str, has_end: bool, task: Any, template: str | None, rows: list[Any]
) -> None:
    words = tokenizer(around)
    words.chat_template = template
    if not has_end:
        words.eos_token = None
    words.save_pretrained(tmp_path / "words")
    agree(jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "words", task)
    if template is None:
        agree(tmp_path / "a.jsonl", tmp_path / "words" / "tokenizer.json", task)


def agree(data: Path, name: Path, task: Any = "causal-lm") -> None:
    """Counting for a plan, and the tokens of a training, by the tokenizer of this name."""
    trained = sequences(prepared(data, load_tokenizer(str(name)), task=task))
    counted = measure_lengths(data, tokenizer=str(name), task=task)
    assert counted.tokens.tolist() == [len(row["input_ids"]) for row in trained]
    if task == "seq2seq":
        assert counted.target_tokens.tolist() == [len(row["labels"]) for row in trained]


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("causal-lm", [{"text": "the river</s>"}, {"text": "the river"}]),
        ("causal-lm", [{"prompt": "the river", "response": "a stone</s>"}]),
        ("seq2seq", [{"source": "the river</s>", "target": "a stone</s>"}]),
        ("causal-lm", [{"messages": CHAT[:4]}]),
        ("seq2seq", [{"messages": CHAT[:4]}]),
        ("causal-lm", [{"messages": [*CHAT[:2], {"role": "assistant", "content": "<think>hm</think>a stone"}]}]),
        ("causal-lm", [{"messages": [*CHAT[:2], {"role": "assistant", "content": "a stone</s>"}]}]),
        ("classification", [{"prompt": "a", "response": "b", "text": "the river", "label": number} for number in range(2)]),
    ],
)
@pytest.mark.parametrize("template", [None, OPEN])
def test_and_does_so_for_odd_rows(tmp_path: Path, task: Any, rows: list[Any], template: str | None) -> None:
    words = tokenizer("$A")
    words.chat_template = template
    words.save_pretrained(tmp_path / "words")
    agree(jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "words", task)


@pytest.mark.parametrize("odd", ["class", "map", "broken", "list", "deep", "none", "unknown end", "no end", "flag"])
def test_and_for_tokenizers_whose_file_does_not_say_all(tmp_path: Path, odd: str) -> None:
    words = tokenizer("<s> $A")
    words.save_pretrained(tmp_path / "words")
    beside = tmp_path / "words" / "tokenizer_config.json"
    config = json.loads(beside.read_text())
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "the river", "response": "a stone"}, {"prompt": "the", "response": "lamp"})
    agree(data, tmp_path / "words")
    if odd == "class":
        config = {"tokenizer_class": "GPT2TokenizerFast"}
    elif odd == "map":
        del config["eos_token"]
        (tmp_path / "words" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    elif odd == "unknown end":
        config["eos_token"] = "<no such word>"
    elif odd == "no end":
        config["eos_token"] = None
    elif odd == "flag":
        config |= {"add_eos_token": True}
    texts = {"broken": "{", "list": "[]", "deep": "[" * 100_000}
    beside.write_text(texts.get(odd, json.dumps(config)))
    if odd == "none":
        beside.unlink()
    try:
        load_tokenizer(str(tmp_path / "words"))
    except UsageError:
        with pytest.raises(UsageError, match="cannot be loaded"):
            measure_lengths(data, tokenizer=str(tmp_path / "words"))
    else:
        agree(data, tmp_path / "words")
