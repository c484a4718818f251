"""Accumulated gradients are those of one large batch: whatever the windows hold, and whatever the plain recipe makes of them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from brim.errors import UnsupportedError, UsageError
from brim.step.accumulate import GradientAccumulator
from tests.step.ranks_program import (
    Gradients,
    Rows,
    agreement,
    big_batch_gradient,
    equal_rows,
    is_exact,
    items_in,
    kept,
    llama,
    mean_loss,
    ragged_rows,
    run_windows,
    single,
)


def small() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def some_loss(model: nn.Linear, size: int = 2) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(size, 3)).mean()
    return loss


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
def test_equal_micro_batches_equal_one_batch_with_counts_and_without(counted: bool) -> None:
    found = run_windows(llama(), single(equal_rows(6)), 6, counted=counted, max_norm=None)
    wanted, loss = big_batch_gradient(llama(), equal_rows(6))
    assert is_exact(found["gradients"][0], wanted)
    assert [updated for updated, _loss in found["answers"]] == [False] * 5 + [True, False]
    assert found["answers"][5][1] == pytest.approx(loss, rel=1e-5)
    assert found["answers"][6] == (False, 0.0)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
def test_a_short_last_window_is_a_batch_like_any_other(counted: bool) -> None:
    rows = equal_rows(8)
    found = run_windows(llama(), single(rows), 5, counted=counted, max_norm=None)
    assert [updated for updated, _loss in found["answers"]] == [False] * 4 + [True] + [False] * 3 + [True]
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, _loss = big_batch_gradient(model, rows[:5])
    assert is_exact(found["gradients"][0], first)
    optimizer.step()
    optimizer.zero_grad()
    last, loss = big_batch_gradient(model, rows[5:])
    assert is_exact(found["gradients"][1], last)
    assert found["answers"][-1] == (True, pytest.approx(loss, rel=1e-4))


def test_ragged_micro_batches_equal_one_batch_where_the_plain_recipe_does_not() -> None:
    rows = ragged_rows(12)
    micro_batches = [rows[0:1], rows[1:6], rows[6:8], rows[8:12]]
    assert len({int(items_in(micro_batch)) for micro_batch in micro_batches}) == 4
    wanted, loss = big_batch_gradient(llama(), rows)
    found = run_windows(llama(), micro_batches, 4, max_norm=None)
    assert is_exact(found["gradients"][0], wanted)
    assert found["answers"][3] == (True, pytest.approx(loss, rel=1e-5))

    model = llama()
    for micro_batch in micro_batches:
        (mean_loss(model, micro_batch) / 4).backward()  # type: ignore[no-untyped-call]
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not is_exact(plain, wanted)
    assert agreement(plain, wanted)[0] < 0.95


def test_float16_with_a_loss_scale_equals_one_float16_batch() -> None:
    rows = ragged_rows(8)

    def train(micro_batches: list[Rows], steps: int) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            found = run_windows(llama(), micro_batches, steps, max_norm=1.0, scaler=scaler)
        assert scaler.get_scale() == 2.0**16
        return found

    whole, sliced = train([rows], 1), train(single(rows), 8)
    assert is_exact(sliced["gradients"][0], whole["gradients"][0])
    assert sliced["norm"] == pytest.approx(whole["norm"], rel=1e-3)
    single_precision = run_windows(llama(), [rows], 1)
    assert agreement(sliced["gradients"][0], single_precision["gradients"][0])[0] > 0.999


def test_a_step_that_the_scaler_skips_is_not_an_update_and_the_next_is() -> None:
    model, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    accumulator = GradientAccumulator(model, optimizer, 1, scaler=scaler)
    before = copy.deepcopy(model.state_dict())
    assert not accumulator.step(some_loss(model) * 1e38)[0]
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert accumulator.step(some_loss(model))[0]
    assert not torch.equal(before["weight"], model.weight)


def test_several_steps_leave_the_weights_and_the_optimizer_as_single_batches_do() -> None:
    batches = [ragged_rows(6, seed) for seed in range(4)]

    def train(micro_batches: list[Rows], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        accumulator = GradientAccumulator(model, optimizer, steps)
        assert sum(accumulator.step(mean_loss(model, rows), items_in(rows))[0] for rows in micro_batches) == 4
        return model, optimizer

    model, optimizer = train([[row] for rows in batches for row in rows], 6)
    whole, wanted = train(batches, 1)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-4 * float(theirs.detach().abs().max()))
        found, state = optimizer.state[ours], wanted.state[theirs]
        assert found["step"] == state["step"] == 4
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(found[name], state[name], rtol=0, atol=1e-4 * float(state[name].abs().max())), name


@pytest.mark.parametrize("max_norm", [0.05, 1.0, 1e6])
def test_clipping_is_that_of_the_large_batch(max_norm: float) -> None:
    rows = ragged_rows(6)
    found = run_windows(llama(), single(rows), 6, max_norm=max_norm)
    wanted, _loss = big_batch_gradient(llama(), rows, max_norm)
    assert is_exact(found["gradients"][0], wanted)
    model = llama()
    mean_loss(model, rows).backward()  # type: ignore[no-untyped-call]
    assert found["norm"] == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)), rel=1e-4)


def test_the_norm_is_told_where_nothing_is_clipped() -> None:
    found = run_windows(llama(), single(ragged_rows(6)), 6, max_norm=None)
    squares = [float(gradient.double().square().sum()) for gradient in found["gradients"][0].values()]
    assert found["norm"] == pytest.approx(sum(squares) ** 0.5)


def test_tied_weights_are_rescaled_once_and_frozen_ones_stay_as_they_are() -> None:
    def model() -> nn.Module:
        built = llama(tied=True)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_("layers.0" not in name)
        return built

    rows = ragged_rows(6)
    found = run_windows(model(), single(rows), 6, max_norm=None)
    wanted, _loss = big_batch_gradient(model(), rows)
    assert is_exact(found["gradients"][0], wanted)
    frozen = {name: parameter for name, parameter in model().named_parameters() if not parameter.requires_grad}
    assert frozen
    for name, parameter in frozen.items():
        assert found["gradients"][0][name] is None
        assert torch.equal(found["weights"][name], parameter)


def test_a_layer_that_is_unfrozen_later_joins_in() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    accumulator = GradientAccumulator(model, optimizer, 2, max_norm=None)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    gradients = kept(optimizer, model)
    inputs = torch.randn(6, 3)
    named = dict(model.named_parameters())
    wanted: Gradients = dict(zip(named, torch.autograd.grad(model(inputs).mean(), list(named.values())), strict=True))
    accumulator.step(model(inputs[:5]).mean(), num_items=5)
    accumulator.step(model(inputs[5:]).mean(), num_items=1)
    assert is_exact(gradients[0], wanted)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6), st.integers(1, 7), st.integers(0, 99))
def test_every_window_of_any_sizes_is_one_batch(micro_batches: list[list[int]], steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)
    gradients: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_arguments: gradients.append(model.weight.grad.clone()))  # type: ignore[union-attr]
    accumulator = GradientAccumulator(model, optimizer, steps, max_norm=None)

    def loss(rows: list[int]) -> torch.Tensor:
        mean: torch.Tensor = model(inputs[rows]).square().mean()
        return mean

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in micro_batches:
            accumulator.step(loss(rows), num_items=len(rows))
        accumulator.finalize()
    windows = [micro_batches[start : start + steps] for start in range(0, len(micro_batches), steps)]
    wanted = [
        torch.autograd.grad(loss([row for rows in window for row in rows]), model.weight)[0] for window in windows if any(window)
    ]
    assert len(gradients) == len(wanted)
    assert all(torch.allclose(found, one, rtol=1e-12, atol=1e-12) for found, one in zip(gradients, wanted, strict=True))


def test_the_past_of_a_run_shows_in_no_bit_of_a_gradient() -> None:
    rows = ragged_rows(5)

    def last_gradient(model: nn.Module, *earlier: int) -> Gradients:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gradients = kept(optimizer, model)
        accumulator = GradientAccumulator(model, optimizer, 5, max_norm=None)
        for items in earlier:
            for row in single(rows):
                accumulator.step(mean_loss(model, row), items)
        for row in single(rows):
            accumulator.step(mean_loss(model, row), items_in(row))
        return gradients[-1]

    fresh, old = last_gradient(llama()), last_gradient(llama(), 3, 4000)
    for name, gradient in fresh.items():
        assert gradient is not None
        assert torch.equal(gradient, old[name]), name  # type: ignore[arg-type]


def test_a_micro_batch_without_items_counts_in_the_window_and_nothing_of_it_enters() -> None:
    model, optimizer = small()
    accumulator = GradientAccumulator(model, optimizer, 2, max_norm=None)
    gradients = kept(optimizer, model)
    assert accumulator.step(some_loss(model) * float("nan"), num_items=0) == (False, 0.0)
    assert accumulator.window == 1
    assert model.weight.grad is None
    loss = some_loss(model)
    assert accumulator.step(loss, num_items=torch.tensor(7)) == (True, loss.item())
    assert torch.allclose(gradients[0]["weight"], torch.ones(1, 3))  # type: ignore[arg-type]


def test_a_window_without_items_takes_no_step_and_says_so() -> None:
    model, optimizer = small()
    accumulator = GradientAccumulator(model, optimizer, 2)
    before = model.weight.detach().clone()
    accumulator.step(some_loss(model), num_items=0)
    with pytest.warns(RuntimeWarning, match="No micro-batch of this window has an item") as caught:
        assert accumulator.step(some_loss(model), num_items=0) == (False, 0.0)
    assert caught[0].filename == __file__
    assert torch.equal(model.weight, before)
    assert accumulator.window == 0
    accumulator.step(some_loss(model), num_items=0)
    with pytest.warns(RuntimeWarning, match="no optimizer step is taken"):
        assert accumulator.finalize() == (False, 0.0)


def test_the_average_is_weighted_by_items_and_starts_anew_with_each_window() -> None:
    model, optimizer = small()
    accumulator = GradientAccumulator(model, optimizer, 3)
    losses_and_items = [(1.0, 1), (5.0, 3), (2.0, 4), (9.0, 2)]
    answers = [accumulator.step(some_loss(model) * 0 + loss, items) for loss, items in losses_and_items]
    assert answers == [(False, 1.0), (False, 4.0), (True, 3.0), (False, 9.0)]
    assert accumulator.window == 1


def test_gradients_from_before_do_not_enter_and_none_are_left_behind() -> None:
    model, optimizer = small()
    some_loss(model).backward()  # type: ignore[no-untyped-call]
    gradients = kept(optimizer, model)
    accumulator = GradientAccumulator(model, optimizer, 1, max_norm=None)
    accumulator.step(some_loss(model))
    assert torch.allclose(gradients[0]["weight"], torch.ones(1, 3))  # type: ignore[arg-type]
    assert model.weight.grad is None


def test_a_discarded_window_can_be_run_again() -> None:
    model, optimizer = small()
    gradients = kept(optimizer, model)
    accumulator = GradientAccumulator(model, optimizer, 2, max_norm=None)
    accumulator.step(some_loss(model) * 100, num_items=50)
    accumulator.discard()
    assert accumulator.window == 0
    # Nothing is left of it, not even that items were counted.
    accumulator.step(some_loss(model))
    assert accumulator.step(some_loss(model))[0]
    assert torch.allclose(gradients[0]["weight"], torch.ones(1, 3))  # type: ignore[arg-type]


def test_counts_in_some_calls_of_a_window_only_are_refused_and_windows_may_differ() -> None:
    model, optimizer = small()
    accumulator = GradientAccumulator(model, optimizer, 2)
    accumulator.step(some_loss(model), num_items=2)
    with pytest.raises(UsageError, match="with num_items and without"):
        accumulator.step(some_loss(model))
    assert accumulator.window == 1
    assert accumulator.step(some_loss(model), num_items=2)[0]
    accumulator.step(some_loss(model))
    assert accumulator.step(some_loss(model))[0]


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "4", None], ids=repr)
def test_steps_that_are_no_number_of_micro_batches_are_refused(steps: Any) -> None:
    is_whole = type(steps) is int
    told = f"must be at least 1, and is {steps}" if is_whole else f"is {steps!r}, and must be a whole number"
    with pytest.raises(UsageError, match=f"^accumulation_steps {told}.$"):
        GradientAccumulator(*small(), steps)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1.0"], ids=repr)
def test_a_norm_that_would_stop_training_is_refused(max_norm: Any) -> None:
    with pytest.raises(UsageError, match="max_norm is") as caught:
        GradientAccumulator(*small(), 2, max_norm=max_norm)
    assert caught.value.hint == "Give None to clip nothing."


def test_a_loss_that_cannot_be_learnt_from_is_refused_with_what_to_do() -> None:
    model, optimizer = small()
    accumulator = GradientAccumulator(model, optimizer, 2)
    wrong: list[tuple[Any, str, str]] = [
        (model(torch.ones(2, 3)), r"shape \[2, 1\]", "mean over"),
        (some_loss(model).detach(), "needs no gradient", "no detach"),
        (some_loss(model).item(), "of type float", "not loss.item()"),
    ]
    for loss, message, hint in wrong:
        with pytest.raises(UsageError, match=message) as caught:
            accumulator.step(loss)
        assert hint in str(caught.value.hint)
    assert accumulator.window == 0


@pytest.mark.parametrize(
    "num_items", [-1, float("nan"), float("inf"), torch.tensor([3, 4])], ids=["negative", "nan", "inf", "two"]
)
def test_a_count_that_is_none_is_refused(num_items: Any) -> None:
    model, optimizer = small()
    with pytest.raises(UsageError, match="num_items (is|has shape)"):
        GradientAccumulator(model, optimizer, 2).step(some_loss(model), num_items)


def test_a_model_whose_wrapper_reduces_by_itself_is_refused() -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    model = FullyShardedDataParallel(3, 1)
    with pytest.raises(UnsupportedError, match="wrapped in FullyShardedDataParallel"):
        GradientAccumulator(model, torch.optim.SGD(model.parameters()), 2)
