"""Who says what was asked for."""

from __future__ import annotations

import pytest

from brim.audit.observing.configured import Clues, configured, flags
from brim.records.observations import BatchInForce


def clues(*arguments: str, settings: tuple[dict[str, object], ...] = (), ranks: int = 1) -> Clues:
    return Clues(("python", "train.py", *arguments), settings, ranks)


def seen(micro_batch: int, accumulation: int, ranks: int = 1) -> BatchInForce:
    product = micro_batch * accumulation * ranks
    return BatchInForce(
        micro_batch=micro_batch, accumulation=accumulation, ranks=ranks, sequences=product, least_sequences=product, most_sequences=product, usual_steps=1
    )  # fmt: skip


ARGUMENTS = {
    "kind": "fact",
    "of": "transformers.TrainingArguments",
    "where": "a.py:1",
    "micro_batch": 2,
    "accumulation": 3,
    "gpus": 0,
}
ACCELERATOR = {"kind": "fact", "of": "accelerate.Accelerator", "where": "a.py:1", "accumulation": 4}
LOADER = {"kind": "loader", "loader": 0, "batch_size": 5}


@pytest.mark.parametrize(
    ("given", "effective"),
    [
        (clues(), None),
        (clues("--batch-size", "64"), 64),
        (clues("--batch_size=64", "--grad-accum", "2"), 128),
        (clues("train.batch_size=8", "train.accumulate_grad_batches=4"), 32),
        (clues("--global-batch-size", "256", "--batch-size", "4"), 256),
        (clues("--per_device_train_batch_size", "8", ranks=2), 16),
        (clues("--batch-size", "many"), None),
        (clues("--eval.batch_size=64", "--train.batch_size=8"), 8),
        (clues("--val-batch-size", "64", "--test.batch_size", "3"), None),
        (clues("train.batch_size=8", "model.batch_size=64"), 8),
        (clues("--batch-size", "9", settings=({**ACCELERATOR, "is_split": True},), ranks=2), 36),
        (clues("--batch-size"), None),
        (clues("--batch-size", "0"), None),
        (clues("--batch-size", "9", settings=(ARGUMENTS,), ranks=2), 12),
        (clues("--batch-size", "9", settings=(ACCELERATOR,)), 36),
        (clues(settings=(ACCELERATOR, LOADER, {"kind": "trains", "loader": 0})), 20),
        (clues(settings=(ACCELERATOR, LOADER)), None),
        (
            clues(
                settings=(
                    {"kind": "fact", "of": "deepspeed.initialize", "effective_batch": 48, "micro_batch": 2, "accumulation": 6},
                )
            ),
            48,
        ),
    ],
    ids=str,
)
def test_frameworks_come_before_flags_and_a_whole_before_its_parts(given: Clues, effective: int | None) -> None:
    found = configured(given, None, None)
    assert (None if found is None else found.effective_batch) == effective


def test_what_the_user_tells_brim_comes_first() -> None:
    found = configured(clues("--batch-size", "9", settings=(ARGUMENTS,)), None, 7)
    assert found is not None
    assert (found.effective_batch, found.source) == (7, "--effective-batch")


def test_an_accumulation_that_nobody_names_is_not_held_against_the_script() -> None:
    as_asked = configured(clues("--batch-size", "8"), seen(8, 4), None)
    clamped = configured(clues("--batch-size", "8"), seen(2, 16), None)
    assert as_asked is not None
    assert clamped is not None
    assert (as_asked.effective_batch, clamped.effective_batch) == (32, 8)


def test_a_total_that_the_script_divides_among_its_ranks_is_met() -> None:
    found = configured(clues("--batch-size", "64", ranks=2), seen(32, 1, ranks=2), None)
    assert found is not None
    assert found.effective_batch == 64


def test_a_clamp_whose_accumulation_makes_the_same_product_is_still_one() -> None:
    found = configured(clues("--batch-size", "32"), seen(2, 16), None)
    assert found is not None
    assert (found.micro_batch, found.accumulation) == (32, None)


def test_flags_keep_how_they_were_typed() -> None:
    assert flags(["x.py", "--batch-size", "64", "-b=3", "model.bs=2"]) == {
        "batch_size": (64, "--batch-size 64"), "b": (3, "-b=3"), "bs": (2, "model.bs=2"),
    }  # fmt: skip
