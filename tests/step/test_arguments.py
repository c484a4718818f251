"""What is given wrongly to the step is refused where it is given, before anything is written, with what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brim.errors import UsageError
from brim.records import LedgerEntry
from brim.step import arguments
from brim.step.budget import Budget
from brim.step.ledger import read_ledger
from brim.step.loop import Steps
from tests.step import toys
from tests.step.faults import EFFECTIVE_BATCH, SEQUENCES, STEPS, adamw, sequences, swiftly, tiny


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


def steps(**changes: Any) -> Steps:
    """A loop of three steps; what is changed may be wrong."""
    given: dict[str, Any] = {
        "data": sequences(), "model": tiny(), "effective_batch": EFFECTIVE_BATCH, "budget": Budget.sequences(3),
        "collate": toys.collate, "counting": "next-token",
    } | changes  # fmt: skip
    optimizer = given.pop("optimizer", None) or adamw(given["model"])
    return Steps(optimizer=optimizer, **given)


def run_one(loop: Steps) -> LedgerEntry:
    """The first step, then leave."""
    for step in loop:
        return step.run()
    raise AssertionError("there is no step")


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


WRONG: list[tuple[str, Any, str]] = [
    ("effective_batch", 16.0, "effective_batch is 16.0, and must be a whole number."),
    ("effective_batch", "64", "effective_batch is '64', and must be a whole number."),
    ("effective_batch", True, "effective_batch is True, and must be a whole number."),
    ("effective_batch", 0, "effective_batch must be at least 1, and is 0."),
    ("epochs", 1.5, "epochs is 1.5, and must be a whole number."),
    ("epochs", 0, "epochs must be at least 1, and is 0."),
    ("seed", "3", "seed is '3', and must be a whole number."),
    ("seed", -1, "seed must be at least 0, and is -1."),
    ("budget", 4096, "budget is 4096, and a number alone does not say of what."),
    ("budget", 0, "budget is 0, and a number alone does not say of what."),
    ("budget", "8GB", "budget is '8GB', and a number alone does not say of what."),
    ("counting", "tokens", "counting is 'tokens'; 'next-token', 'token', 'sequence' are known."),
    ("on_broken", "raise", "on_broken is 'raise'; 'stop', 'warn' are known."),
    ("collate", None, "collate is None, and must be a function."),
    ("collate", {"pad": 0}, "collate is {'pad': 0}, and must be a function."),
    ("max_norm", 0, "max_norm is 0, and must be above 0."),
    ("max_norm", -1.0, "max_norm is -1.0, and must be above 0."),
    ("max_norm", float("nan"), "max_norm is nan, and must be above 0."),
    ("max_norm", "1.0", "max_norm is '1.0', and must be above 0."),
    ("lengths", [4, 5, 6], f"There are 3 lengths for {SEQUENCES} sequences."),
    ("lengths", 7, "lengths is 7, and must be a list of numbers."),
    ("ledger", True, "ledger is True, and must be a file, a folder or False."),
    ("ledger", 7, "ledger is 7, and must be a file, a folder or False."),
    ("resume", True, "resume is True, and must be what state() gave."),
    ("resume", "checkpoint-4", "resume is 'checkpoint-4', and must be what state() gave."),
    ("resume", {"step": 3}, "resume is {'step': 3}, and must be what state() gave."),
]


@pytest.mark.parametrize(("name", "value", "told"), WRONG, ids=[f"{name}={value!r}" for name, value, _told in WRONG])
def test_a_loop_says_what_was_given_and_what_would_be_right(
    name: str, value: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        steps(**{"ledger": tmp_path / "run", name: value})
    assert caught.value.message == told
    assert not list(tmp_path.iterdir())
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("budget", 4096, "Give brim.Budget.tokens(8192), brim.Budget.sequences(8), or brim.budget(model, gpu=...)."),
        ("max_norm", 0, "Give None to clip nothing."),
        ("resume", {}, "Save loop.state() beside the weights, and give it back."),
    ],
    ids=["budget", "max_norm", "resume"],
)
def test_what_is_less_plain_has_a_hint(name: str, value: Any, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        steps(**{name: value})
    assert caught.value.hint == hint


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    assert type(arguments.whole("epochs", np.int64(3))) is int
    assert len(steps(effective_batch=np.int64(EFFECTIVE_BATCH), epochs=np.int32(2))) == 2 * STEPS


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
def test_lengths_may_be_any_row_of_numbers(kind: Any) -> None:
    lengths = [len(one["input_ids"]) for one in sequences()]
    assert steps(lengths=kind(lengths)).plan.fingerprint() == steps().plan.fingerprint()


def test_gradients_need_not_be_clipped() -> None:
    assert run_one(steps(max_norm=None)).grad_norm


@pytest.mark.parametrize(
    ("ledger", "found"),
    [("run", "run/ledger.jsonl"), ("a/b", "a/b/ledger.jsonl"), ("new/steps.jsonl", "new/steps.jsonl")],
    ids=["a-folder", "folders-that-are-missing", "a-file-in-a-folder-that-is-missing"],
)
@pytest.mark.parametrize("kind", [Path, str])
def test_a_ledger_is_given_as_a_file_or_as_a_folder(tmp_path: Path, ledger: str, found: str, kind: Any) -> None:
    for step in steps(ledger=kind(tmp_path / ledger)):
        step.run()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == [found]
    assert len(read_ledger(tmp_path / found).steps) == STEPS


def test_where_no_ledger_is_wanted_there_is_none(tmp_path: Path) -> None:
    assert arguments.ledger_file(None, tmp_path) is None
    assert arguments.ledger_file(False, tmp_path) is None
    assert arguments.ledger_file(True, tmp_path) == tmp_path / "ledger.jsonl"


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="optimizer holds none of the model's parameters") as caught:
        steps(optimizer=adamw(tiny()))
    assert "after the model has its final shape" in str(caught.value.hint)


def test_an_optimizer_of_some_parameters_is_enough() -> None:
    model = tiny()
    before = model.lm_head.weight.detach().clone()
    run_one(steps(model=model, optimizer=adamw(model.lm_head)))
    assert not torch.equal(model.lm_head.weight, before)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter that trains"):
        steps(model=tiny().requires_grad_(False))


@pytest.mark.parametrize("counting", [None, "next-token"], ids=["asked", "told"])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda model, batch: loss_of(model, batch).item(), "float"),
        (lambda model, batch: loss_of(model, batch).expand(3), "Tensor"),
        (lambda model, batch: model(**batch), "CausalLMOutputWithPast"),
        (lambda _model, _batch: None, "NoneType"),
    ],
    ids=["item", "one-for-each-row", "the-whole-output", "nothing"],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, kind: str, counting: Any) -> None:
    """Before the first step if the loss is asked what it counts, in the first step if it was told."""
    with pytest.raises(UsageError, match=f"^The loss is {kind}, and must be one number, as a tensor.") as caught:
        run_one(steps(loss=loss, counting=counting))
    assert "loss.mean(), not loss.item()" in str(caught.value.hint)


def test_a_batch_without_labels_gives_no_loss_and_that_is_said() -> None:
    def without_labels(features: Any) -> Any:
        return {key: value for key, value in toys.collate(features).items() if key != "labels"}

    for counting in (None, "sequence"):
        with pytest.raises(UsageError, match="^The model returned no loss.") as caught:
            run_one(steps(collate=without_labels, counting=counting))
        assert "Give labels in the batch" in str(caught.value.hint)


def test_a_loop_that_was_left_is_not_gone_on_with_but_a_new_one_is() -> None:
    model = tiny()
    left = steps(model=model, optimizer=(optimizer := adamw(model)))
    run_one(left)
    with pytest.raises(UsageError, match="This loop has ended, after step 1.") as caught:
        next(iter(left))
    assert str(caught.value.hint).startswith("Make a new one with resume=loop.state() to go on.")
    again = steps(model=model, optimizer=optimizer, resume=left.state())
    assert [step.run().step for step in again] == [2, 3]
    with pytest.raises(UsageError, match="after step 3"):
        next(iter(again))


def test_a_step_whose_loop_was_left_is_not_run(tmp_path: Path) -> None:
    model = tiny()
    before = model.lm_head.weight.detach().clone()
    loop = iter(steps(model=model, ledger=tmp_path))
    step = next(loop)
    del loop
    with pytest.raises(UsageError, match="This loop has ended, after step 0.") as caught:
        step.run()
    assert "Keep the iterator as long as you run its steps." in str(caught.value.hint)
    assert torch.equal(model.lm_head.weight, before)
    assert not read_ledger(tmp_path / "ledger.jsonl").steps


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": sequences(longest=20)}, "the lengths of the sequences are others"),
        ({"data": sequences(SEQUENCES - 1)}, "sequences 14 -> 13"),
        ({"seed": 5}, "seed 0 -> 5"),
        ({"effective_batch": 4, "drop_last": True}, "effective_batch 5 -> 4, drop_last False -> True"),
    ],
    ids=["other-lengths", "fewer", "seed", "two-at-once"],
)
def test_a_run_that_cannot_go_on_says_what_is_another(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        steps(resume=steps().state(), **changes)
    assert caught.value.message == f"This run cannot go on as promised: {told}."
