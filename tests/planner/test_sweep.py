"""A sweep: one structure for all rows, so that they compare."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from brim.errors import UsageError
from brim.planner.answers import Sweep
from brim.planner.sweep import read_values, sweep, verdict_of
from brim.sizes import format_bytes

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000, "num_hidden_layers": 4, "intermediate_size": 256,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_chatlm_on_two_cards_gives_the_effective_batches_and_steps_that_were_asked_for() -> None:
    found = sweep(
        "chatlm-mini-chinese", "32,48,64,80,96", freeze=("shared", "encoder"), gpu="rtx-3080-20gb*2", samples=5000, seq_len=256,
        target_len=256, precision="amp-bf16", optimizer="adafactor", accumulation=2, learning_rate=1e-4,
    )  # fmt: skip
    assert [row.effective_batch for row in found.rows] == [128, 192, 256, 320, 384]
    assert [row.steps_per_epoch for row in found.rows] == [40, 27, 20, 16, 14]
    assert [row.micro_batch for row in found.rows] == [32, 48, 64, 80, 96]
    sizes = [row.memory_bytes for row in found.rows]
    assert sizes == sorted(sizes)
    assert found.rows[1].fits
    assert found.rows[-1].verdict == "does-not-fit"
    assert found.rows[-1].memory_bytes > found.rows[-1].limit_bytes
    assert found.rows[-1].epoch_seconds is None
    assert found.rows[0].speed == 1.0
    assert found.rows[2].learning_rate == pytest.approx(1e-4 * 2**0.5)
    assert found.structure["sharding"] == "ddp"
    assert Sweep.from_json(found.to_json()) == found


def test_an_effective_batch_is_held_and_cut_exactly(llama: str) -> None:
    found = sweep(llama, [4, 6, 8], memory="4GiB", gpu="4GiB", seq_len=128, effective_batch=20, samples=50)
    assert {row.effective_batch for row in found.rows} == {20}
    assert [(row.micro_batch, row.accumulation) for row in found.rows] == [(4, 5), (5, 4), (7, 3)]
    assert {row.steps_per_epoch for row in found.rows} == {3}
    assert {row.learning_rate_factor for row in found.rows} == {1.0}


def test_drop_last_rounds_steps_down(llama: str) -> None:
    found = sweep(llama, "4,8", gpu="4GiB", seq_len=128, accumulation=2, samples=50, drop_last=True)
    assert [row.steps_per_epoch for row in found.rows] == [6, 3]


def test_lengths_need_more_memory_and_take_the_structure_of_the_first(llama: str) -> None:
    found = sweep(llama, "seq-len:128,256,512", gpu="8GiB", effective_batch=8, micro_batch=4)
    assert [row.value for row in found.rows] == ["128", "256", "512"]
    sizes = [row.memory_bytes for row in found.rows]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert all(row.micro_batch == 4 for row in found.rows)
    assert found.structure["checkpointing"] == "none"


def test_gpus_keep_their_own_half_precision_and_say_so(llama: str) -> None:
    found = sweep(llama, "gpu:t4,rtx-3090", effective_batch=8, seq_len=128)
    assert found.device == "gpu"
    assert found.structure["precision"] == "amp-fp16, amp-bf16"
    assert found.rows[1].speed is not None
    assert found.rows[1].speed > 1
    assert found.rows[0].limit_bytes < found.rows[1].limit_bytes


def test_rows_that_do_not_fit_are_shown_with_what_they_would_need(llama: str) -> None:
    found = sweep(llama, "2,4", gpu="200MiB", seq_len=128)
    assert not found.fits
    assert all(row.memory_bytes > row.limit_bytes for row in found.rows)
    assert all(row.speed is None for row in found.rows)


def test_the_reason_says_when_the_margin_is_broken(llama: str) -> None:
    free = sweep(llama, "4", gpu="8GiB", seq_len=128, checkpointing="none").rows[0].memory_bytes
    found = sweep(llama, "4", gpu="8GiB", memory=int(free * 1.03), seq_len=128, checkpointing="none")
    row = found.rows[0]
    assert row.verdict == "aggressive"
    assert not row.keeps_margin
    assert "margin" in row.reason


@pytest.mark.parametrize(
    ("share", "word"),
    [
        (0.1, "conservative"), (0.4999, "conservative"), (0.5, "balanced"), (0.7999, "balanced"), (0.8, "recommended"),
        (0.9499, "recommended"), (0.95, "aggressive"), (0.98, "limit"), (1.0, "limit"), (1.0001, "does-not-fit"),
    ],
)  # fmt: skip
def test_verdicts_go_by_the_share_of_the_card(share: float, word: str) -> None:
    assert verdict_of(share) == word


@given(st.floats(min_value=0, max_value=2), st.floats(min_value=0, max_value=2))
def test_more_of_the_card_is_never_a_milder_word(one: float, other: float) -> None:
    words = ["conservative", "balanced", "recommended", "aggressive", "limit", "does-not-fit"]
    low, high = sorted((one, other))
    assert words.index(verdict_of(low)) <= words.index(verdict_of(high))


@pytest.mark.parametrize("values", ["", "0", "a", "4,,8", "epochs:1,2", "seq-len:", "4.5", "-2"])
def test_what_is_no_value_is_refused_with_what_to_write(values: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_values(values)
    assert "--sweep 32,48,64" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ("4,8", {"micro_batch": 4}),
        ("4,8", {"effective_batch": 16, "accumulation": 2}),
        ("seq-len:128", {"seq_len": 256}),
        ("gpu:t4", {"gpu": "t4"}),
    ],
)
def test_what_is_swept_cannot_be_pinned_too(llama: str, values: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        sweep(llama, values, **{"gpu": "t4", **asked})


def test_values_are_read_as_they_are_documented() -> None:
    assert read_values("32, 48") == ("micro-batch", ["32", "48"])
    assert read_values((32, 48)) == ("micro-batch", ["32", "48"])
    assert read_values("seq-len:512") == ("seq-len", ["512"])
    assert read_values("gpu:t4*2,24GiB") == ("gpu", ["t4*2", "24GiB"])


def test_rows_are_plain(llama: str) -> None:
    found = sweep(llama, "4", gpu="8GiB", seq_len=128)
    assert found.to_dict()["rows"][0] == asdict(found.rows[0])


def test_a_sweep_on_the_cpu_is_one_process_in_float32(llama: str) -> None:
    found = sweep(llama, "2,4", device="cpu", memory="2GiB", seq_len=128)
    assert found.fits
    assert found.structure["precision"] == "fp32"
    assert found.structure["sharding"] == "none"


@pytest.mark.long
def test_a_row_that_does_not_fit_names_the_flags_that_make_it_fit(llama: str) -> None:
    asked: dict[str, Any] = {"seq_len": 512, "accumulation": 2}
    plain = sweep(llama, "8,32", gpu="8GiB", checkpointing="none", loss="standard", **asked).rows
    limit = (plain[0].memory_bytes + plain[1].memory_bytes) // 2
    found = sweep(llama, "8,32", gpu="8GiB", memory=limit, **asked)
    fits, missing = found.rows
    assert (fits.fits, fits.fits_with, missing.fits) == (True, "", False)
    words = missing.fits_with.split()
    assert words
    flags: dict[str, Any] = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    again = sweep(llama, "32", gpu="8GiB", memory=limit, **asked, **flags).rows[0]
    assert again.keeps_margin
    assert f"32: fits with {missing.fits_with}." in str(found)


def test_a_row_that_only_the_margin_refuses_says_so(llama: str) -> None:
    asked: dict[str, Any] = {"seq_len": 256, "gpu": "8GiB"}
    needed = sweep(llama, "16", checkpointing="full", loss="standard", **asked).rows[0].memory_bytes
    found = sweep(llama, "2,16", loss="standard", memory=int(needed * 1.01), **asked)
    row = found.rows[1]
    assert (row.fits, row.fits_with, row.fits_with_margin) == (False, "--checkpointing full", False)
    assert row.fits_with_bytes == needed
    assert f"16: --checkpointing full fits the card ({format_bytes(needed)}), but not the margin" in str(found)


def test_adapters_and_the_length_are_in_the_headline_of_a_sweep(llama: str) -> None:
    found = sweep(llama, "2", gpu="8GiB", seq_len=256, method="lora", lora_rank=4, lora_alpha=12)
    assert str(found).splitlines()[0].startswith(f"{llama}, lora r=4 alpha=12, 256 tokens, ")


@pytest.mark.long
def test_a_row_that_fits_nowhere_says_so(llama: str) -> None:
    found = sweep(llama, "2", gpu="200MiB", seq_len=128)
    assert found.rows[0].fits_with == ""
    assert "2: fits under no structure that may be chosen." in str(found)
