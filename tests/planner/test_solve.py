"""The planner's question asked the other way round."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from brim.errors import UnknownNameError, UsageError
from brim.planner.answers import Solution
from brim.planner.command import command_of
from brim.planner.plan import plan
from brim.planner.prices import read_prices
from brim.planner.solve import largest_that, solve

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000, "num_hidden_layers": 4, "intermediate_size": 256,
    "max_position_embeddings": 16384,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_does_not(llama: str) -> None:
    found = solve(llama, "micro-batch", gpu="1GiB", seq_len=256, checkpointing="none")
    assert found.fits
    size = int(found.answers[0].value)
    assert size > 1
    asked: dict[str, Any] = {"gpu": "1GiB", "seq_len": 256, "checkpointing": "none", "attention": "sdpa", "precision": "amp-bf16"}
    assert plan(llama, micro_batch=size, **asked).fits
    assert not plan(llama, micro_batch=size + 1, **asked).fits
    assert Solution.from_json(found.to_json()) == found


def test_checkpointing_holds_larger_micro_batches_and_comes_as_the_answer(llama: str) -> None:
    found = solve(llama, "micro-batch", gpu="1GiB", seq_len=256, loss="standard")
    best, other = found.answers[0], found.others[0]
    assert (best.kind, other.kind) == ("--checkpointing full", "--checkpointing none")
    assert int(best.value) > int(other.value)
    assert f"--micro-batch {best.value} --checkpointing full" in best.command


def test_a_chunked_loss_holds_more_than_the_standard_one_and_comes_first(llama: str) -> None:
    found = solve(llama, "micro-batch", gpu="1GiB", seq_len=256, checkpointing="none")
    best, other = found.answers[0], found.others[0]
    assert (best.kind, other.kind) == ("--loss chunked", "")
    assert int(best.value) > int(other.value)
    assert best.command.endswith(f"--micro-batch {best.value} --loss chunked")


def test_more_memory_never_gives_a_smaller_micro_batch_or_a_shorter_sequence(llama: str) -> None:
    sizes = [
        int(solve(llama, "micro-batch", gpu=gpu, seq_len=128, checkpointing="none").answers[0].value) for gpu in ("1GiB", "2GiB")
    ]
    assert sizes == sorted(sizes)
    lengths = [
        int(solve(llama, "seq-len", gpu=gpu, micro_batch=2, checkpointing="none").answers[0].value)
        for gpu in ("700MiB", "1GiB", "2GiB")
    ]
    assert lengths == sorted(lengths)


@pytest.mark.long
def test_the_longest_sequence_is_a_multiple_of_128_and_the_next_does_not_fit(llama: str) -> None:
    found = solve(llama, "seq-len", gpu="1GiB", micro_batch=4, checkpointing="none")
    length = int(found.answers[0].value)
    assert length % 128 == 0
    asked: dict[str, Any] = {"gpu": "1GiB", "micro_batch": 4, "checkpointing": "none", "attention": "sdpa", "loss": "standard"}
    assert plan(llama, seq_len=length, precision="amp-bf16", **asked).fits
    assert not plan(llama, seq_len=length + 128, precision="amp-bf16", **asked).fits
    assert str(length + 128) in found.answers[0].reason


def test_positions_that_end_are_said_to_be_what_stops_it(llama: str) -> None:
    found = solve(llama, "seq-len", gpu="80GiB", checkpointing="none")
    assert found.answers[0].value == "16384"
    assert "positions" in found.answers[0].reason


@pytest.mark.slow
def test_where_nothing_fits_the_missing_bytes_are_said(llama: str) -> None:
    for what in ("micro-batch", "seq-len"):
        found = solve(llama, what, gpu="100MiB")
        assert not found.fits
        assert not found.answers
        assert "missing" in found.reasons[0]


def test_the_smallest_gpu_comes_with_larger_ones_and_with_what_they_take(llama: str) -> None:
    found = solve(llama, "gpu", seq_len=1024, effective_batch=256, micro_batch=256, checkpointing="none", samples=1000)
    best, *others = [*found.answers, *found.others]
    assert best.fits
    assert best.epoch_seconds
    fitting = [row for row in others if row.fits]
    assert all(row.limit_bytes >= best.limit_bytes for row in fitting)
    assert [row.fits for row in others[-1:]] == [False]
    assert others[-1].limit_bytes < best.limit_bytes
    assert best.command.endswith(f"--gpu {best.value}")


def test_with_prices_the_cheapest_wins_and_not_the_smallest(llama: str) -> None:
    asked: dict[str, Any] = {"seq_len": 256, "effective_batch": 64, "samples": 1000, "checkpointing": "none"}
    found = solve(llama, "gpu", price="t4=1.0,rtx-3090=1.0", **asked)
    assert found.answers[0].value == "rtx-3090"
    assert [row.value for row in found.others] == ["t4"]
    costs = [row.price_per_epoch for row in (*found.answers, *found.others)]
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)
    free = solve(llama, "gpu", price={"t4": 0, "rtx-3090": 1}, **asked)
    assert free.answers[0].value == "t4"
    assert "--price t4=0,rtx-3090=1" in free.command


@pytest.mark.slow
def test_a_model_is_found_for_the_method_that_is_named() -> None:
    found = solve(None, "model", gpu="3GiB", seq_len=128, method="full", optimizer="sgd")
    assert found.fits
    (best,) = found.answers
    assert best.kind == "full"
    assert best.memory_bytes <= best.limit_bytes
    smaller = [row for row in found.others if row.fits]
    larger = [row for row in found.others if not row.fits]
    assert smaller
    assert larger
    assert shlex.split(best.command)[:3] == ["brim", "plan", best.value]


@pytest.mark.parametrize(
    ("model", "what", "asked"),
    [
        ("gpt2", "epochs", {}),
        ("gpt2", "model", {}),
        (None, "gpu", {}),
        ("gpt2", "micro-batch", {"micro_batch": 3}),
        ("gpt2", "seq-len", {"seq_len": 512}),
        ("gpt2", "seq-len", {"price": "t4=1"}),
        ("gpt2", "gpu", {"gpu": "t4"}),
        (None, "model", {"data": "some.jsonl"}),
    ],
)
def test_questions_that_contradict_themselves_are_refused(model: str | None, what: str, asked: dict[str, Any]) -> None:
    given = asked if what == "gpu" else {"gpu": "t4", **asked}
    with pytest.raises(UsageError):
        solve(model, what, **given)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 3))
def test_the_largest_number_is_found(border: int, most: int, first: int) -> None:
    first = min(first, most)
    assert largest_that(lambda number: number <= border, most, first=first) == min(border, most)


def test_prices_are_read_from_pairs_and_from_files(tmp_path: Path) -> None:
    expected = {"t4": 0.35, "rtx-4090-24gb": 0.5}
    (tmp_path / "a.toml").write_text('[prices]\nt4 = 0.35\nrtx-4090 = "0.5"\n', encoding="utf-8")
    (tmp_path / "a.json").write_text('{"t4": 0.35, "rtx-4090": 0.5}', encoding="utf-8")
    (tmp_path / "a.yaml").write_text("t4: 0.35\nrtx-4090: 0.5\n", encoding="utf-8")
    for prices in (
        "t4=0.35, RTX 4090=0.5",
        {"t4": 0.35, "rtx-4090": 0.5},
        *(str(tmp_path / f"a.{end}") for end in ("toml", "json", "yaml")),
    ):
        assert read_prices(prices) == expected


@pytest.mark.parametrize("given", ["t4", "t4=", "t4=-1", "t4=nan", "=3", {}, 3, "missing.toml", {"t4": True}])
def test_what_is_no_price_is_refused(given: object) -> None:
    with pytest.raises(UsageError):
        read_prices(given)


def test_a_gpu_that_nobody_knows_has_no_price() -> None:
    with pytest.raises(UnknownNameError):
        read_prices("t5000=1")


def test_a_file_that_is_no_table_of_prices_is_refused(tmp_path: Path) -> None:
    for name, text in {"a.toml": "t4 = ", "b.json": "[1]", "c.yaml": "a: [", "d.json": "{"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(UsageError):
            read_prices(tmp_path / name)


def test_a_command_says_what_was_asked() -> None:
    asked = {"gpu": "t4", "freeze": ("shared", "a b"), "vary": ("method", "offload"), "padded": False, "max_grad_norm": None,
             "drop_last": True, "seq_len": None, "cache": False}  # fmt: skip
    assert command_of("gpt2", asked, micro_batch=4) == (
        "brim plan gpt2 --gpu t4 --freeze shared --freeze 'a b' --vary method,offload --unpadded --max-grad-norm 0 --drop-last "
        "--micro-batch 4"
    )
