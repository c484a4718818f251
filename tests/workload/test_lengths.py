"""Columns are recognised, and the lengths of sequences are counted by a tokenizer or guessed from characters by script."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.errors import UsageError
from brim.workload.columns import Example, Layout
from brim.workload.lengths import MOST_BARS, Lengths, fixed_lengths, measure_lengths
from brim.workload.reading import read_rows
from tests.clock import by_the_clock

SFT = Path(__file__).parents[2] / "../shared/data/sft"
needs_data = pytest.mark.skipif(not SFT.is_dir(), reason="the instruction data of ../shared/data/sft are not here")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
]


@pytest.mark.parametrize(
    ("row", "source", "target"),
    [
        ({"prompt": "a", "response": "b"}, "a", "b"),
        ({"prompt": "a", "completion": "b"}, "a", "b"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}, "a", "b"),
        ({"question": "a", "answer": "b", "id": 3}, "a", "b"),
        ({"source": "a", "target": "b"}, "a", "b"),
        ({"instruction": "a", "input": "more", "output": "b"}, "a\nmore", "b"),
        ({"instruction": "a", "input": "", "output": "b"}, "a", "b"),
        ({"instruction": "a", "output": "b"}, "a", "b"),
        ({"instruction": "a", "context": None, "response": "b"}, "a", "b"),
        ({"messages": CHAT}, "Be brief.\nHello", "Hi there"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "a", "b"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]}, "what?", ""),
        ({"text": "a", "label": 3}, "a", ""),
        ({"text": "a"}, "a", ""),
    ],
)
def test_the_usual_columns_are_understood(row: dict[str, Any], source: str, target: str) -> None:
    assert Layout.of(row).parts(row) == Example(source, target)


def test_unknown_columns_are_listed_beside_those_that_are_understood() -> None:
    with pytest.raises(
        UsageError, match=r"columns a, b are none .*messages.*instruction/\[input\]/output.*prompt/response.*text"
    ):
        Layout.of({"a": 1, "b": 2})


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_row_that_is_unlike_the_first_is_named(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"})
    with pytest.raises(UsageError, match="a.jsonl, line 2: The column response is missing here"):
        measure_lengths(data)
    with pytest.raises(UsageError, match="line 1: The columns colour are none"):
        measure_lengths(jsonl(tmp_path / "b.jsonl", {"colour": "red"}))
    with pytest.raises(UsageError, match="line 1: The column text holds no text: "):
        measure_lengths(jsonl(tmp_path / "c.jsonl", {"text": {"a": 1}}))
    with pytest.raises(UsageError, match="line 1: The column messages holds no list of messages"):
        measure_lengths(jsonl(tmp_path / "d.jsonl", {"messages": "hello"}))
    with pytest.raises(UsageError, match="has neither role nor from"):
        measure_lengths(jsonl(tmp_path / "e.jsonl", {"messages": [{"content": "hello"}]}))


def test_a_decoder_reads_both_as_one_a_seq2seq_model_as_two_a_classifier_only_the_source(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"prompt": "a" * 39, "response": "b" * 80})
    one, two, source = (measure_lengths(data, task=task) for task in ("causal-lm", "seq2seq", "classification"))
    assert (one.tokens.tolist(), one.target_tokens.tolist()) == ([30], [0])
    assert (two.tokens.tolist(), two.target_tokens.tolist()) == ([10], [20])
    assert (source.tokens.tolist(), source.target_tokens.tolist()) == ([10], [0])
    with pytest.raises(UsageError, match="needs a source and a target, and there is only text"):
        measure_lengths(jsonl(tmp_path / "b.jsonl", {"text": "a"}), task="seq2seq")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a" * 40, 10),
        ("四" * 30, 20),
        ("あ" * 15 + "한" * 15, 20),
        ("д" * 50, 20),
        ("ع" * 50, 20),
        ("क" * 30, 20),
        ("四" * 20 + "1.5%" * 2 + "，。", 20),
        ("1234" + "a" * 36, 10),
        ("(12)" + "四" * 26, 20),
        ("12345678", 2),
        ("a" * 40 + "四" * 30, 30),
        ("", 1),
        ("\ud800", 1),
    ],
)
def test_the_guess_goes_by_script_and_signs_count_like_their_neighbours(tmp_path: Path, text: str, tokens: int) -> None:
    # Between others: no text may lend its letters to the next.
    rows = [{"text": "四四四"}, {"text": text}, {"text": "aaaa"}]
    found = measure_lengths(jsonl(tmp_path / "a.jsonl", *rows))
    assert found.tokens.tolist() == [2, tokens, 1]
    assert not found.exact
    assert "4 of Latin" in found.counted_by
    assert "1.5 of Chinese" in found.counted_by


def test_the_limit_takes_the_first_rows_and_long_files_are_counted_in_parts(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", *({"text": "a" * 4 * (1 + row % 100)} for row in range(3000)))
    assert measure_lengths(data).tokens.tolist() == [1 + row % 100 for row in range(3000)]
    assert measure_lengths(data, limit=7).tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]


@needs_data
@by_the_clock
def test_three_thousand_rows_are_guessed_in_a_fraction_of_a_second() -> None:
    data = SFT / "chatlm_zh_train_3k.parquet"
    measure_lengths(data, limit=1)  # imports
    started = time.perf_counter()
    assert measure_lengths(data, task="seq2seq").n == 3000
    assert time.perf_counter() - started < 0.3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-pair tokenizer that was trained here, with a token at each end of a sequence and a chat template."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["hello there, how are you? hello again"] * 3, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    # Left over from an encoder's training; it must not shorten or lengthen what is counted.
    raw.enable_truncation(8)
    raw.enable_padding(length=64)
    whole = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>")  # type: ignore[no-untyped-call]
    whole.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    whole.save_pretrained(folder)
    return folder


def test_a_tokenizer_counts_exactly_with_its_special_tokens_once_a_sequence(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(tokenizer)
    rows = [{"prompt": "hello there", "response": "how are you? " * count + "\ud800"} for count in range(20)]
    data = jsonl(tmp_path / "a.jsonl", *rows)
    texts = [row["prompt"] + "\n" + row["response"].replace("\ud800", "?") for row in rows]
    expected = [len(real(text, truncation=False, padding=False)["input_ids"]) for text in texts]
    for name in (str(tokenizer), str(tokenizer / "tokenizer.json")):
        found = measure_lengths(data, tokenizer=name)
        # A file alone does not tell which of its tokens is the end, and so none is put there.
        has_end = name == str(tokenizer)
        assert found.tokens.tolist() == [count if has_end else count - 1 for count in expected]
        assert found.exact
        assert found.counted_by == f"tokenizer {name}"
    two = measure_lengths(data, tokenizer=str(tokenizer), task="seq2seq")
    assert two.tokens.tolist() == [len(real("hello there")["input_ids"])] * 20
    assert two.target_tokens[0] == len(real("?")["input_ids"])


def test_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(tokenizer)
    shared = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi there"}]
    text = "<s>[user]Hello</s>[assistant]Hi there</s>"
    expected = len(real(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"])
    data = jsonl(tmp_path / "a.jsonl", {"conversations": shared})
    assert measure_lengths(data, tokenizer=str(tokenizer)).tokens.tolist() == [expected]
    refused = jsonl(tmp_path / "b.jsonl", {"messages": CHAT}, {"messages": [{"role": "tool", "content": "x"}]})
    with pytest.raises(UsageError, match="b.jsonl, line 2: The chat template of .* refuses the messages: no tools"):
        measure_lengths(refused, tokenizer=str(tokenizer))


def test_a_tokenizer_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name in ("nobody/nothing", "nonsense", str(tmp_path / "empty"), str(tmp_path / "tokenizer.json")):
        with pytest.raises(UsageError, match="The tokenizer .* cannot be loaded: ") as caught:
            measure_lengths(data, tokenizer=name)
        assert "\n" not in caught.value.message
        assert "guessed" in (caught.value.hint or "")


@needs_data
@pytest.mark.slow
def test_the_guess_agrees_with_a_vocabulary_trained_on_other_rows_of_the_same_data() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    names = ("alpaca_en_1k.json", "alpaca_zh_1k.json", "chatlm_zh_train_3k.parquet")
    texts = {}
    for name in names:
        rows = list(read_rows(SFT / name))
        layout = Layout.of(rows[0])
        texts[name] = [layout.parts(row).text for row in rows]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((text for name in names for text in texts[name][::2]), trainer)
    for name in names:
        guessed = measure_lengths(SFT / name).tokens[1::2]
        counted = np.array([len(found) for found in tokenizer.encode_batch_fast(texts[name][1::2])])
        assert 0.8 < guessed.sum() / counted.sum() < 1.25
        assert np.corrcoef(guessed, counted)[0, 1] > 0.9


def lengths_of(tokens: list[int], targets: list[int] | None = None) -> Lengths:
    return Lengths("", np.array(tokens), np.array(targets or [0] * len(tokens)), "", exact=True)


def test_cutting_gives_a_shorter_copy_and_leaves_what_was_measured() -> None:
    measured = lengths_of([5, 50, 500], [7, 70, 700])
    cut = measured.cut(100, 60)
    assert (cut.tokens.tolist(), cut.target_tokens.tolist()) == ([5, 50, 100], [7, 60, 60])
    assert measured.tokens.tolist() == [5, 50, 500]
    assert measured.cut(100).target_tokens.tolist() == [7, 70, 700]


def test_a_histogram_of_few_lengths_is_exact() -> None:
    bars = lengths_of([3, 5, 3, 5, 5], [1, 1, 1, 2, 2]).histogram()
    assert [(bar.tokens, bar.target_tokens, bar.sequences) for bar in bars] == [(3, 1, 2), (5, 1, 1), (5, 2, 2)]


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 3000)), min_size=1, max_size=2000))
def test_a_histogram_has_few_bars_counts_all_and_never_understates_a_length(pairs: list[tuple[int, int]]) -> None:
    lengths = lengths_of([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    bars = lengths.histogram()
    assert len(bars) <= MOST_BARS
    assert sum(bar.sequences for bar in bars) == len(pairs)
    assert max(bar.tokens for bar in bars) == lengths.tokens.max()
    assert max(bar.target_tokens for bar in bars) == lengths.target_tokens.max()
    total = sum(bar.sequences * bar.tokens for bar in bars)
    assert lengths.tokens.sum() <= total <= lengths.tokens.sum() + len(pairs) * (lengths.bar_tokens - 1)


def test_where_only_a_length_is_known_all_are_equal_and_cost_nothing() -> None:
    lengths = fixed_lengths(10_000_000, 2048, 256)
    assert lengths.n == 10_000_000
    assert lengths.are_equal
    assert lengths.has_targets
    (bar,) = lengths.histogram()
    assert (bar.tokens, bar.target_tokens, bar.sequences) == (2048, 256, 10_000_000)
    assert lengths.tokens.strides == (0,)
