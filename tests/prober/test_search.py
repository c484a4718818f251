"""The search against a device that is only a formula: it always ends, soon, and never with a size that did not run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from brim.prober.search import Aim, affine, bracket, next_size, predicted_largest
from brim.records import Trial
from brim.sizes import GIB, MIB

NOISE = 0.002
"""How far a measurement is from the truth: less than the search reckons with."""
LIMIT = 2 * GIB


@dataclass(frozen=True)
class Model:
    """Bytes of a step as the larger of two phases, each a line."""

    base: float
    slope: float
    other_base: float = 0.0
    other_slope: float = 0.0

    def __call__(self, size: int) -> float:
        return max(self.base + self.slope * size, self.other_base + self.other_slope * size)

    def largest(self, room: float, most: int) -> int:
        """By trying all: 0 if not even one fits."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self(middle) <= room else (low, middle)
        return low


def search(
    model: Model,
    *,
    limit: int = LIMIT,
    most: int = 4096,
    start: int | None = None,
    predicted: Callable[[int], float] | None = None,
    knows_limit: bool = True,
    seed: int = 0,
    noise: float = NOISE,
) -> list[Trial]:
    """Every trial of a search. A size is never asked for twice, nor one that is out of the question."""
    dice, trials = random.Random(seed), list[Trial]()
    aim = Aim(limit_bytes=limit if knows_limit else None, most=most, start=start, predicted=predicted)
    while (size := next_size(aim, trials)) is not None:
        assert 1 <= size <= most
        assert size not in [trial.micro_batch for trial in trials]
        one, needed = (round(model(each) * (1 + dice.uniform(-noise, noise))) for each in (1, size))
        trials.append(ran(size, needed, one) if needed <= limit else failed(size))
    return trials


def ran(size: int, needed: int, one: int | None = None) -> Trial:
    return Trial(micro_batch=size, max_length=8, verdict="ok", peak_device_bytes=needed, one_sequence_bytes=one)


def failed(size: int) -> Trial:
    return Trial(micro_batch=size, max_length=8, verdict="out-of-memory", phase="backward")


def answer(trials: list[Trial]) -> int:
    return max((trial.micro_batch for trial in trials if trial.verdict == "ok"), default=0)


def scaled(model: Model, factor: float) -> Callable[[int], float]:
    return lambda size: factor * model(size)


@st.composite
def models(draw: st.DrawFn, *, most_base: float = 0.9, most: int = 2000) -> Model:
    """Such that some size up to `most` fits into the limit."""
    largest = draw(st.integers(1, most)) + draw(st.floats(0, 0.99))
    base = draw(st.floats(0, most_base)) * LIMIT
    slope = (LIMIT - base) / largest
    if draw(st.booleans()):
        return Model(base, slope)
    return Model(base, slope, draw(st.floats(0, most_base)) * LIMIT, slope * draw(st.floats(0.3, 1.5)))


factors = st.one_of(st.none(), st.just(1.0), st.sampled_from([0.97, 1.03]), st.floats(0.85, 1.15))
seeds = st.integers(0, 1000)


@settings(deadline=None, max_examples=100)
@given(models(), factors, st.one_of(st.none(), st.integers(1, 5000)), st.integers(1, 4096), seeds)
def test_the_answer_is_the_true_maximum_or_next_to_it(
    model: Model, factor: float | None, start: int | None, most: int, seed: int
) -> None:
    predicted = None if factor is None else scaled(model, factor)
    trials = search(model, start=start, most=most, predicted=predicted, seed=seed)
    found = answer(trials)
    surely, possibly = (model.largest(LIMIT / (1 + noise), most) for noise in (NOISE, -NOISE))
    assert found <= possibly
    assert found >= surely - max(1, found // 100)


@settings(deadline=None, max_examples=60)
@given(models(most_base=0.5, most=80), st.floats(0.97, 1.03), seeds)
def test_four_trials_are_enough_where_the_prediction_is_three_percent_off(model: Model, factor: float, seed: int) -> None:
    assert len(search(model, predicted=scaled(model, factor), seed=seed)) <= 4


@settings(deadline=None, max_examples=60)
@given(models(most_base=0.5, most=2000), st.floats(0.97, 1.03), seeds)
def test_hundreds_of_sequences_may_take_two_more(model: Model, factor: float, seed: int) -> None:
    assert len(search(model, predicted=scaled(model, factor), seed=seed)) <= 6


@settings(deadline=None, max_examples=60)
@given(models(most_base=0.5, most=2000), st.floats(0.85, 1.15), seeds)
def test_a_prediction_that_is_far_off_costs_a_few_more(model: Model, factor: float, seed: int) -> None:
    assert len(search(model, predicted=scaled(model, factor), seed=seed)) <= 11


@settings(deadline=None, max_examples=60)
@given(models(most_base=0.5, most=2000), seeds)
def test_without_a_prediction_it_still_ends_soon(model: Model, seed: int) -> None:
    assert len(search(model, seed=seed)) <= 16


@settings(deadline=None, max_examples=60)
@given(models(), seeds, st.integers(1, 4096))
def test_without_a_limit_to_go_by_failures_alone_find_the_maximum(model: Model, seed: int, most: int) -> None:
    trials = search(model, knows_limit=False, most=most, seed=seed, noise=0.0)
    assert model.largest(LIMIT, most) - answer(trials) <= max(0, answer(trials) // 100)
    assert len(trials) <= 25


@settings(deadline=None, max_examples=100)
@given(models(), factors, st.randoms(use_true_random=False), st.floats(0, 1), st.integers(1, 500), st.booleans())
def test_failures_at_random_never_make_it_loop(
    model: Model, factor: float | None, dice: random.Random, share: float, most: int, knows_limit: bool
) -> None:
    trials = list[Trial]()
    predicted = None if factor is None else scaled(model, factor)
    aim = Aim(limit_bytes=LIMIT if knows_limit else None, most=most, predicted=predicted)
    while (size := next_size(aim, trials)) is not None:
        assert 1 <= size <= most
        assert size not in [trial.micro_batch for trial in trials]
        trials.append(failed(size) if dice.random() < share else ran(size, round(model(size) * dice.uniform(0.5, 1.5))))
    low, _high = bracket(trials, most)
    assert low == answer(trials)


@pytest.mark.parametrize(("factor", "sizes"), [(1.0, [19]), (1.03, [18, 19]), (0.97, [20, 18, 19])])
def test_the_first_size_is_the_predicted_one(factor: float, sizes: list[int]) -> None:
    model = Model(0.1 * LIMIT, 0.9 * LIMIT / 19.5)
    trials = search(model, predicted=scaled(model, factor), noise=0.0)
    assert [trial.micro_batch for trial in trials] == sizes


def test_a_start_comes_before_the_prediction_and_is_at_most_what_is_of_use() -> None:
    aim = Aim(limit_bytes=LIMIT, most=50, start=70, predicted=lambda size: size * LIMIT / 10)
    assert next_size(aim, []) == 50
    assert next_size(Aim(limit_bytes=LIMIT, most=50, start=7, predicted=aim.predicted), []) == 7


def test_with_nothing_to_go_by_it_begins_with_one() -> None:
    assert next_size(Aim(limit_bytes=None, most=64), []) == 1
    assert next_size(Aim(limit_bytes=LIMIT, most=64), []) == 1


def test_all_that_is_of_use_fits_in_one_trial() -> None:
    assert [trial.micro_batch for trial in search(Model(0, 1000), predicted=lambda size: 1000 * size, most=64)] == [64]


def test_where_not_even_one_sequence_fits_the_last_trial_is_one_sequence() -> None:
    trials = search(Model(2 * LIMIT, 1), predicted=lambda size: LIMIT / 30 * size)
    assert answer(trials) == 0
    assert trials[-1].micro_batch == 1
    assert len(trials) <= 8


def test_a_prediction_far_too_low_does_not_go_down_one_by_one() -> None:
    model = Model(0.5 * LIMIT, 0.5 * LIMIT / 40)
    trials = search(model, predicted=lambda size: 0.1 * model(size), most=128, noise=0.0)
    assert len(trials) <= 12
    assert answer(trials) == 40


def test_a_prediction_without_the_base_is_left_for_the_line_that_was_measured() -> None:
    model = Model(40.8 * MIB, 1.39 * MIB)
    trials = search(model, limit=149 * MIB, predicted=lambda size: 1.39 * MIB * size)
    assert trials[0].micro_batch > 100
    assert answer(trials) == 77
    assert len(trials) <= 7


def test_a_failure_below_what_ran_is_forgotten() -> None:
    trials = [failed(3), ran(2, 100), ran(8, 400)]
    assert bracket(trials, 20) == (8, 21)
    assert bracket([*trials, failed(12), failed(9)], 20) == (8, 9)
    assert next_size(Aim(limit_bytes=1000, most=20), [*trials, failed(9)]) is None


def test_other_failures_than_memory_are_failures() -> None:
    trials = [ran(4, 400), Trial(micro_batch=5, max_length=8, verdict="timeout")]
    assert next_size(Aim(limit_bytes=1000, most=20), trials) is None


@given(st.integers(0, 10**9), st.integers(1, 10**7), st.sets(st.integers(1, 500), min_size=2, max_size=6))
def test_a_line_through_exact_points_is_exact(base: int, slope: int, sizes: set[int]) -> None:
    fit = affine([ran(size, base + slope * size) for size in sizes])
    assert fit is not None
    assert fit.bytes_per_sequence == pytest.approx(slope, rel=1e-6, abs=1e-3)
    assert fit.bytes_of(100) == pytest.approx(base + 100 * slope, rel=1e-6)
    assert fit.residual_bytes <= 1e-6 * (base + 500 * slope) + 1


def test_one_trial_is_a_line_by_its_first_step() -> None:
    fit = affine([ran(9, 1000, one=200), failed(12)])
    assert fit is not None
    assert (fit.bytes_per_sequence, fit.base_bytes, fit.residual_bytes) == pytest.approx((100, 100, 0))
    assert affine([ran(9, 1000), failed(12)]) is None
    assert affine([]) is None


def test_the_residual_is_the_largest_distance() -> None:
    fit = affine([ran(1, 100), ran(2, 200), ran(3, 360)])
    assert fit is not None
    assert fit.residual_bytes == pytest.approx(20)


@given(st.integers(1, 300), st.floats(0.5, 1))
def test_the_predicted_largest_is_the_last_that_is_predicted_to_fit(largest: int, share: float) -> None:
    model = Model(0, LIMIT / (largest + 0.5))
    aim = Aim(limit_bytes=LIMIT, most=1000, predicted=model)
    assert predicted_largest(aim, share) == max(1, model.largest(share * LIMIT, 1000))


def test_headroom_takes_from_what_is_predicted_to_fit() -> None:
    aim = Aim(limit_bytes=1000, most=100, predicted=lambda size: 100 * size, headroom=0.2)
    assert predicted_largest(aim, 1.0) == 8
    assert predicted_largest(Aim(limit_bytes=1000, most=100), 1.0) is None
