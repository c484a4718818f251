"""A budget from a probe agrees with what ran and with what failed, and is careful about the rest."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.errors import UsageError
from brim.records import Measurement, ShapePoint
from brim.sizes import MIB
from brim.step.budget import FIXED_TOKENS, Budget, ShapeCost
from brim.step.measured import bytes_of, measured_budget
from brim.step.slicing import slice_batch
from tests.planner.measurements import SECONDS, TRUTH, grid, measurement

ROOM = 580 * MIB
PAIRS = ShapeCost(fixed=100 * MIB, per_token=10_000, per_target=60_000)


def largest(budget: Budget, *lengths: int) -> int:
    """The most sequences that the budget allows at these lengths."""
    counts = np.arange(1, 20_000)
    return int((budget.cost(counts, *(np.full(len(counts), length) for length in lengths)) <= budget.limit).sum())


def test_many_shapes_give_back_the_truth_that_they_were_made_from() -> None:
    budget = Budget.measured(measurement(shapes=grid()))
    assert (budget.unit, budget.limit) == ("bytes", ROOM)
    assert budget.because == "Measured on cpu: 15 shapes, 580 MiB beside a margin of 20.0 MiB."
    for shape in ((3, 512), (7, 300), (16, 128), (1, 40)):
        assert budget.cost_of(*shape) == pytest.approx(float(TRUTH(*shape)), rel=0.02)
        assert float(budget.seconds(*shape)) == pytest.approx(float(SECONDS(*shape)), rel=0.05)


def test_a_margin_of_ones_own_stands_for_that_of_the_probe() -> None:
    found = Budget.measured(measurement(shapes=grid()), margin=100 * MIB)
    assert found.limit == 500 * MIB
    # What ran with more memory than there is now is no proof.
    assert found.cost_of(16, 512) <= 500 * MIB
    tight = Budget.measured(measurement(shapes=grid()), margin=300 * MIB)
    assert largest(tight, 512) < 16


def test_the_largest_that_ran_is_allowed_even_where_the_fit_says_more() -> None:
    peaks = {4: 400 * MIB, 8: 420 * MIB, 12: 579 * MIB, 16: 579 * MIB}
    budget = Budget.measured(measurement(ran=(4, 8, 12, 16), bytes_of=lambda count, length: peaks[count]))
    assert budget.cost_of(16, 512) <= budget.limit
    assert budget.cost_of(17, 512) > budget.limit


def test_a_trial_that_took_more_than_there_should_be_still_ran() -> None:
    budget = Budget.measured(measurement(limit_bytes=350 * MIB, margin_bytes=0))
    assert budget.cost_of(16, 512) <= budget.limit
    assert largest(budget, 512) == 16


def test_what_failed_and_all_that_is_larger_is_refused_though_the_fit_would_allow_it() -> None:
    probe = measurement(ran=(4, 12), failed=(13,), shapes=grid())
    budget = Budget.measured(probe)
    assert largest(budget, 512) == 12
    assert largest(budget, 511) > 13
    for shape in ((13, 512), (13, 600), (40, 512)):
        assert budget.cost_of(*shape) > budget.limit
    free = Budget.measured(replace(probe, trials=probe.trials[:2]))
    assert largest(free, 512) > 13


def test_a_failure_that_a_larger_trial_disproved_is_forgotten() -> None:
    budget = Budget.measured(measurement(ran=(4, 12), failed=(8,), shapes=grid()))
    assert largest(budget, 512) >= 12


def test_with_one_length_shorter_sequences_count_by_their_tokens() -> None:
    budget = Budget.measured(measurement(ran=(4, 12), bytes_of=ShapeCost(fixed=100 * MIB, per_token=50_000)))
    assert "All have 512 tokens" in budget.because
    assert budget.cost_of(24, 256) == pytest.approx(budget.cost_of(12, 512), rel=1e-6)
    squared = Budget.measured(measurement(ran=(4, 12)))
    for shape in ((4, 256), (8, 256), (40, 64), (100, 16)):
        assert squared.cost_of(*shape) >= float(TRUTH(*shape)) * (1 - 1e-6)


def test_one_shape_alone_allows_as_many_tokens() -> None:
    budget = Budget.measured(measurement(ran=(8,)))
    assert (budget.unit, budget.limit) == ("tokens", 8 * 512)
    assert largest(budget, 512) == 8
    assert largest(budget, 256) == 16
    assert "one shape ran, 8 x 512 tokens" in budget.because
    assert float(budget.seconds(3, 100)) == FIXED_TOKENS + 300


def test_source_and_target_each_count_as_if_they_were_all_where_one_pair_was_measured() -> None:
    budget = Budget.measured(measurement(ran=(4, 8), length=256, target=64, bytes_of=PAIRS))
    for shape in ((8, 256, 16), (8, 64, 64), (30, 64, 16), (9, 10, 64)):
        assert budget.cost_of(*shape) >= float(PAIRS(*shape)) * (1 - 1e-6)
    assert budget.cost_of(8, 256, 64) <= budget.limit
    one = Budget.measured(measurement(ran=(8,), length=256, target=64, bytes_of=PAIRS))
    assert largest(one, 1, 64) == largest(one, 256, 1) == 8
    many = Budget.measured(
        measurement(ran=(4, 8), length=256, target=64, bytes_of=PAIRS, shapes=[(2, 64, 64), (4, 256, 16), (8, 64, 16)])
    )
    assert many.cost_of(6, 100, 30) == pytest.approx(float(PAIRS(6, 100, 30)), rel=0.05)


def test_where_the_peak_is_flat_more_tokens_than_ran_are_not_free() -> None:
    """The optimizer's step was the peak of all that ran: nothing tells what more tokens take."""
    budget = Budget.measured(measurement(ran=(4, 8), bytes_of=lambda *_shape: 300 * MIB))
    assert 8 <= largest(budget, 512) <= 16


def test_without_a_limit_no_more_is_allowed_than_the_largest_took() -> None:
    probe = measurement(limit_bytes=None, shapes=grid())
    budget = Budget.measured(probe)
    assert largest(budget, 512) == 16
    assert "as the largest of them took" in budget.because
    less = measured_budget(probe, limit_bytes=300 * MIB)
    assert 1 <= largest(less, 512) < 16


def test_a_probe_in_which_nothing_ran_has_no_budget() -> None:
    with pytest.raises(UsageError, match="Nothing ran"):
        Budget.measured(measurement(ran=(), failed=(1,)))


def test_padded_and_unpadded_count_as_the_dearer_of_the_two() -> None:
    dearer = ShapePoint(sequences=8, length=256, padded=False, peak_bytes=500 * MIB, seconds=1.0)
    probe = measurement(shapes=[(8, 256), (4, 128), (2, 256)])
    budget = Budget.measured(replace(probe, points=(*probe.points, dearer)))
    assert bytes_of(probe)[8, 256] < 500 * MIB
    assert budget.cost_of(8, 256) >= 500 * MIB


def test_it_travels_and_slices() -> None:
    budget = Budget.measured(measurement(shapes=grid(), failed=(20,)))
    assert pickle.loads(pickle.dumps(budget)) == budget
    lengths = np.random.default_rng(5).integers(1, 513, 64)
    slices = slice_batch(lengths, cost_bytes=budget.cost, cost_seconds=budget.seconds, limit_bytes=budget.limit)
    assert sorted(np.concatenate(slices).tolist()) == list(range(64))
    assert all(float(TRUTH(len(each), lengths[each].max())) <= ROOM for each in slices)


def test_no_torch_is_needed() -> None:
    code = "import sys; import brim.step.measured; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@st.composite
def probes(draw: st.DrawFn) -> Measurement:
    """Any truth, with noise on every figure; the trial that failed is the next larger one."""
    truth = ShapeCost(
        fixed=draw(st.floats(0, 4e8)),
        per_sequence=draw(st.floats(0, 1e5)),
        per_token=draw(st.floats(1, 1e5)),
        per_squared_length=draw(st.floats(0, 50)),
    )
    noise = draw(st.floats(0, 0.05))
    random = draw(st.randoms(use_true_random=False))
    ran = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4)))
    shapes = draw(st.sets(st.tuples(st.integers(1, 40), st.integers(16, 512)), max_size=8))
    made: dict[Any, int] = {}

    def uneven(*shape: int) -> int:
        return made.setdefault(shape, int(float(truth(*shape)) * (1 + noise * random.random())) + 1)

    limit = max(uneven(size, 512) for size in ran) + draw(st.integers(0, 10**8))
    failed = [ran[-1] + draw(st.integers(1, 5))] if draw(st.booleans()) else []
    return measurement(ran=ran, failed=failed, shapes=sorted(shapes), bytes_of=uneven, limit_bytes=limit, margin_bytes=0)


SHAPES = st.tuples(st.integers(1, 500), st.integers(1, 600))


@settings(deadline=None, max_examples=300)
@given(probes(), SHAPES, st.tuples(st.integers(0, 100), st.integers(0, 200)))
def test_neither_bytes_nor_seconds_ever_fall(probe: Measurement, shape: tuple[int, int], more: tuple[int, int]) -> None:
    budget = Budget.measured(probe)
    larger = shape[0] + more[0], shape[1] + more[1]
    assert budget.cost_of(*larger) >= budget.cost_of(*shape)
    assert float(budget.seconds(*larger)) >= float(budget.seconds(*shape))


@settings(deadline=None, max_examples=300)
@given(probes())
def test_every_trial_is_believed_and_no_point_is_understated(probe: Measurement) -> None:
    budget = Budget.measured(probe)
    for trial in probe.trials:
        allowed = budget.cost_of(trial.micro_batch, 512) <= budget.limit
        assert allowed == (trial.verdict == "ok")
    if budget.unit == "bytes":
        for shape, peak in bytes_of(probe).items():
            assert budget.cost_of(*shape) >= min(peak, budget.limit) * (1 - 1e-9)


@settings(deadline=None, max_examples=300)
@given(probes(), SHAPES)
def test_nothing_is_allowed_that_is_larger_in_all_directions_than_what_failed(probe: Measurement, shape: tuple[int, int]) -> None:
    budget = Budget.measured(probe)
    for trial in probe.trials:
        if trial.verdict != "ok" and shape[0] >= trial.micro_batch and shape[1] >= trial.max_length:
            assert budget.cost_of(*shape) > budget.limit
