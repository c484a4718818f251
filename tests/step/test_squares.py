"""The ledger holds the squared norm of each micro-batch's own gradient, as if it had been computed alone, whatever happened on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TrainingArguments

from brim.records import LedgerEntry
from brim.step import squares
from brim.step.budget import Budget
from brim.step.ledger import ids_of_slices, read_ledger
from brim.step.loop import Steps
from brim.trainer.hf import BrimTrainer
from tests import torchrun
from tests.step import squares_program, toys
from tests.step.faults import Fault, adamw, sequences, swiftly, tiny

DATA = sequences()


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    with swiftly():
        yield


def loop_of(model: Any, optimizer: torch.optim.Optimizer | None = None, **details: Any) -> Steps:
    given: dict[str, Any] = {"effective_batch": 5, "budget": Budget.sequences(2), "counting": "next-token", "noise_scale": True}
    return Steps(DATA, model, optimizer or adamw(model), collate=toys.collate, **{**given, **details})


def alone(model: Any, ids: tuple[int, ...]) -> tuple[int, float]:
    """Supervised tokens of these sequences, and the squared norm of the gradient of their mean loss."""
    model.zero_grad()
    batch = toys.collate([DATA[place] for place in ids])
    model(**batch).loss.backward()
    square = sum(float(each.grad.double().square().sum()) for each in model.parameters() if each.grad is not None)
    return int((batch["labels"][:, 1:] != toys.IGNORED).sum()), square


def assert_as_alone(entry: LedgerEntry, before: Any, rel: float = 1e-4) -> None:
    for one, ids in ids_of_slices(entry):
        items, square = alone(before, ids)
        assert one.items == items
        assert one.gradient_square == pytest.approx(square, rel=rel)


def test_each_micro_batch_has_the_square_of_its_own_gradient() -> None:
    model = tiny()
    for step in loop_of(model):
        before = copy.deepcopy(model)
        entry = step.run()
        assert len(entry.slices) > 1
        assert_as_alone(entry, before)


def test_a_weight_that_stands_in_two_places_counts_once() -> None:
    model = toys.model(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    assert isinstance(model, LlamaForCausalLM)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for step in loop_of(model):
        before = copy.deepcopy(model)
        assert_as_alone(step.run(), before)


@pytest.mark.parametrize("where", ["forward", "backward", "clip"])
def test_out_of_memory_leaves_no_trace_in_them(where: Any) -> None:
    model = tiny()
    optimizer = adamw(model)
    fault = Fault(where, step=2, at=1 if where == "clip" else 5)
    ran = []
    with fault.around(model, optimizer):
        for step in loop_of(model, optimizer, budget=Budget.sequences(4)):
            before = tiny()
            before.load_state_dict(model.state_dict())
            ran.append((step.run(), before))
    assert fault.raised == 1
    for entry, before in ran:
        assert_as_alone(entry, before)


def test_a_loss_scale_is_divided_out() -> None:
    model = tiny()
    for step in loop_of(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        before = copy.deepcopy(model)
        assert_as_alone(step.run(), before)


def test_gradients_in_bfloat16_are_summed_in_float32() -> None:
    model = tiny().to(torch.bfloat16)
    for step in loop_of(model, noise_scale=True):
        before = copy.deepcopy(model)
        assert_as_alone(step.run(), before, rel=0.1)


@pytest.mark.slow
def test_two_ranks_tell_the_squares_of_both(tmp_path: Path) -> None:
    torchrun.on_two_ranks(squares_program.__name__, str(tmp_path), seconds=120)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert {one.rank for entry in ledger.steps for one in entry.slices} == {0, 1}
    for entry in ledger.steps:
        assert_as_alone(entry, tiny())


def test_a_trainer_tells_them_too(tmp_path: Path) -> None:
    model = tiny()
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=0.0, weight_decay=0.0,
        num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    BrimTrainer(model, args, train_dataset=DATA, data_collator=toys.collate, noise_scale=True).train()
    for entry in read_ledger(tmp_path / "ledger.jsonl").steps:
        assert_as_alone(entry, tiny())


def test_training_is_the_same_bit_for_bit_with_them_and_without() -> None:
    weights = []
    for noise_scale in (True, False):
        model = tiny(dropout=0.1)
        torch.manual_seed(5)
        entries = [step.run() for step in loop_of(model, noise_scale=noise_scale)]
        assert all((one.gradient_square is not None) == noise_scale for entry in entries for one in entry.slices)
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*weights)


def test_the_first_gradient_is_taken_over_and_not_copied() -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    watcher = squares.GradientSquares([weight])
    seen: list[int] = []
    weight.register_hook(lambda gradient: seen.append(gradient.data_ptr()))  # type: ignore[no-untyped-call]
    with watcher.watching():
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        assert watcher.take() is not None
    assert weight.grad is not None
    assert weight.grad.data_ptr() == seen[0]


def test_nothing_stays_on_the_model() -> None:
    model = tiny()
    for step in loop_of(model):
        step.run()
    assert not any(each._backward_hooks for each in model.parameters())


def test_a_gradient_that_comes_in_parts_is_not_told() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    watcher = squares.GradientSquares([weight])
    with watcher.watching():
        for _part in range(2):
            weight.sum().backward()  # type: ignore[no-untyped-call]
        assert watcher.take() is None
        watcher.begin()
        weight.sum().backward()  # type: ignore[no-untyped-call]
        found = watcher.take()
    assert found is not None
    assert found.item() == pytest.approx(3.0)


def test_an_overflow_is_not_told() -> None:
    watcher = squares.GradientSquares([])
    assert watcher.unscaled([torch.tensor(float("inf")), None, torch.tensor(8.0)], [1.0, 1.0, 2.0]) == [None, None, 2.0]


def test_a_scale_that_was_halved_to_zero_is_no_error() -> None:
    watcher = squares.GradientSquares([], scale=lambda: 0.0)
    assert watcher.unscaled([torch.tensor(0.0), torch.tensor(8.0)], [1.0, 0.5]) == [None, None]


@pytest.mark.parametrize(
    ("asked", "small_bytes", "told"),
    [(None, 1 << 20, {1, 5}), (None, 100, set()), (True, 100, {1, 2, 3, 4, 5, 6}), (False, 1 << 20, set())],
)
def test_by_default_every_fourth_step_of_a_small_model_is_told(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, small_bytes: int, told: set[int]
) -> None:
    monkeypatch.setattr(squares, "SMALL_BYTES", small_bytes)
    entries = [step.run() for step in loop_of(tiny(), noise_scale=asked, epochs=2)]
    assert {entry.step for entry in entries if all(one.gradient_square is not None for one in entry.slices)} == told
    assert {entry.step for entry in entries if any(one.gradient_square is not None for one in entry.slices)} == told
    assert all(one.items for entry in entries for one in entry.slices)
