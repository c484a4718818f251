"""The noise scale is right whatever the sizes of the micro-batches, says how sure it is, and says when it cannot be told."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from brim.audit.run.noise import FEWEST_FOR_INTERVAL, FEWEST_STEPS, noise_scale, of_entry, of_step
from tests.audit.run.ledgers import step_of

NOISE, SIGNAL, DIMENSIONS = 2000.0, 1.0, 64
Floats = npt.NDArray[np.float64]


def simulated(random: np.random.Generator, items: Floats, signal: float = SIGNAL) -> tuple[Floats, float]:
    """Squared norms of micro-batch gradients, and of their token-weighted mean: truth is a vector, each token adds noise to it."""
    truth = np.full(DIMENSIONS, np.sqrt(signal / DIMENSIONS))
    spread = np.sqrt(NOISE / DIMENSIONS / items)[:, None]
    gradients = truth + spread * random.normal(size=(len(items), DIMENSIONS))
    whole = items @ gradients / items.sum()
    return (gradients**2).sum(axis=1), float(whole @ whole)


def ragged(random: np.random.Generator, count: int) -> Floats:
    return np.ceil(random.lognormal(6.0, 1.0, count))


def equal_size_formula(items: Floats, squares: Floats, whole_square: float) -> tuple[float, float]:
    """What is usually done: the two batch sizes are the mean micro-batch and the whole."""
    small, large = items.mean(), items.sum()
    signal = (large * whole_square - small * squares.mean()) / (large - small)
    return (squares.mean() - whole_square) / (1 / small - 1 / large), signal


@pytest.mark.parametrize("count", [2, 4, 16])
def test_it_is_unbiased_with_ragged_tokens_where_the_equal_size_formula_is_not(count: int) -> None:
    random = np.random.default_rng(1)
    ours, usual = [], []
    for _step in range(4000):
        items = ragged(random, count)
        squares, whole = simulated(random, items)
        ours.append(of_step(items, squares, whole))
        usual.append(equal_size_formula(items, squares, whole))
    noise, signal = np.mean(ours, axis=0)
    assert noise == pytest.approx(NOISE, rel=0.03)
    assert signal == pytest.approx(SIGNAL, abs=4 * np.std([each[1] for each in ours]) / np.sqrt(len(ours)))
    wrong_noise, wrong_signal = np.mean(usual, axis=0)
    assert wrong_noise > 1.2 * NOISE
    assert wrong_signal < 0.8 * SIGNAL


def test_both_formulas_agree_where_all_micro_batches_are_equally_large() -> None:
    random = np.random.default_rng(2)
    items = np.full(4, 300.0)
    squares, whole = simulated(random, items)
    assert of_step(items, squares, whole) == pytest.approx(equal_size_formula(items, squares, whole))


def test_the_interval_holds_the_truth_as_often_as_is_said() -> None:
    random = np.random.default_rng(3)
    inside = 0
    for _run in range(60):
        steps = []
        for _step in range(80):
            items = ragged(random, 8)
            squares, whole = simulated(random, items, signal=4.0)
            steps.append(of_step(items, squares, whole))
        found = noise_scale(steps)
        assert found is not None
        assert found.tokens_interval is not None
        low, high = found.tokens_interval
        assert low <= (found.tokens or 0) <= high
        inside += low <= NOISE / 4.0 <= high
    assert inside >= 52


def test_it_cannot_be_told_where_the_signal_may_be_zero_and_then_says_what_it_is_at_least() -> None:
    random = np.random.default_rng(4)
    steps = []
    for _step in range(60):
        items = ragged(random, 4)
        squares, whole = simulated(random, items, signal=0.001)
        steps.append(of_step(items, squares, whole))
    found = noise_scale(steps, tokens_per_sequence=100.0)
    assert found is not None
    assert found.signal_interval[0] <= 0
    assert found.tokens is None
    assert found.sequences is None
    assert found.sequences_interval is None
    assert 0 < found.at_least_tokens < NOISE / 0.001


def test_sequences_are_tokens_of_the_mean_sequence() -> None:
    steps = [(1000.0 + step % 3, 1.0) for step in range(60)]
    found = noise_scale(steps, tokens_per_sequence=50.0)
    assert found is not None
    assert found.sequences == pytest.approx(1001 / 50, rel=0.01)
    assert found.sequences_interval is not None
    assert found.sequences_interval[1] == pytest.approx(20, rel=0.02)


def wandering(random: np.random.Generator, count: int, memory: float) -> tuple[list[tuple[float, float]], float]:
    """Steps whose signal goes up and down slowly, and the noise scale by the mean of such signals."""
    steps, level = [], float(random.normal())
    for _step in range(count):
        level = memory * level + float(np.sqrt(1 - memory**2) * random.normal())
        items = ragged(random, 8)
        steps.append(of_step(items, *simulated(random, items, signal=4.0 * float(np.exp(0.8 * level - 0.32)))))
    return steps, NOISE / 4.0


def test_the_interval_holds_where_the_signal_wanders() -> None:
    random = np.random.default_rng(7)
    told = inside = 0
    for _run in range(60):
        steps, truth = wandering(random, 200, 0.8)
        found = noise_scale(steps)
        assert found is not None
        if found.tokens_interval is not None:
            told += 1
            inside += found.tokens_interval[0] <= truth <= found.tokens_interval[1]
    assert told >= 30
    assert inside >= 0.82 * told


def test_a_signal_that_wanders_for_most_of_the_run_gets_no_interval() -> None:
    random = np.random.default_rng(8)
    found = [noise_scale(wandering(random, 100, 0.97)[0]) for _run in range(30)]
    assert sum(each is not None and each.tokens_interval is not None for each in found) <= 10


def test_fewer_steps_than_fifty_give_an_estimate_without_an_interval() -> None:
    steps = [(1000.0 + step % 3, 1.0) for step in range(FEWEST_FOR_INTERVAL)]
    few, enough = noise_scale(steps[1:]), noise_scale(steps)
    assert few is not None
    assert enough is not None
    assert few.tokens == pytest.approx(1001, rel=0.01)
    assert few.tokens_interval is None
    assert enough.tokens_interval is not None


def test_few_steps_say_nothing() -> None:
    assert noise_scale([(1.0, 1.0)] * (FEWEST_STEPS - 1)) is None
    assert noise_scale([(1.0, 1.0)] * FEWEST_STEPS) is not None


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), min_size=FEWEST_STEPS, max_size=60))
@settings(max_examples=30, deadline=None)
def test_any_numbers_give_an_answer_without_warnings(steps: list[tuple[float, float]]) -> None:
    found = noise_scale(steps)
    assert found is not None
    assert found.tokens is not None or found.tokens_interval is None
    assert found.at_least_tokens >= 0


def test_a_line_of_the_ledger_counts_only_if_every_micro_batch_is_known() -> None:
    entry = step_of(1)
    assert of_entry(entry) is None
    _one, other = entry.slices
    with_squares = tuple(dataclasses.replace(each, gradient_square=2.0) for each in entry.slices)
    assert of_entry(step_of(1, slices=with_squares)) is not None
    assert of_entry(step_of(1, slices=(with_squares[0], other))) is None
    assert of_entry(step_of(1, slices=with_squares[:1])) is None
    assert of_entry(step_of(1, slices=with_squares, skipped=True)) is None
    assert of_entry(step_of(1, slices=with_squares, grad_norm=float("nan"))) is None
    assert of_entry(step_of(1, slices=with_squares, grad_norm=None)) is None
