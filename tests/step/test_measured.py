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
from brim.step.measured import bytes_of, measured_budget, proven_shapes
from brim.step.slicing import slice_batch
from brim.workload.settings import Settings
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
    with pytest.raises(UsageError, match="Nothing ran") as caught:
        Budget.measured(measurement(ran=(), complete=False))
    assert "more time or more trials" in str(caught.value.hint)


def alone(ran: tuple[int, ...] = (8,), **changes: Any) -> Measurement:
    """A probe at effective batch 8: the largest is its whole step, smaller ones are not."""
    wishes: dict[str, Any] = {"ran": ran, "settings": Settings(), "effective_batch": 8, "length": 64, **changes}
    return measurement(**wishes)


def test_what_ran_alone_is_no_proof_for_slices_of_a_step() -> None:
    gradients = 150 * MIB
    points = [(1, 64), (4, 64), (8, 32)]
    peaks = ShapeCost(fixed=400 * MIB, per_token=20_000)
    # 8 ran alone at 410 of 500 MiB; beside others nothing does that 8 x 64 hold.
    probe = alone(shapes=points, bytes_of=peaks, limit_bytes=500 * MIB, margin_bytes=0, gradient_bytes=gradients)
    for known in (probe, replace(probe, gradient_bytes=None)):
        budget = Budget.measured(known)
        for shape in ((8, 64), (8, 32)):
            assert budget.cost_of(*shape) > budget.limit
        assert measured_budget(known, accumulates=False).cost_of(8, 64) <= budget.limit
    assert "2 of the shapes ran without gradients of other micro-batches: 150 MiB are added" in Budget.measured(probe).because
    assert "do not count as proven" in Budget.measured(replace(probe, gradient_bytes=None)).because


def test_what_ran_alone_and_fits_with_the_gradients_of_others_is_allowed() -> None:
    probe = alone(ran=(2, 8), gradient_bytes=30 * MIB)
    peak = probe.trials[-1].peak_device_bytes
    assert peak is not None
    budget = Budget.measured(probe)
    assert peak + 30 * MIB <= budget.cost_of(8, 64) <= budget.limit
    assert budget.cost_of(2, 64) >= float(TRUTH(2, 64)) - 1
    one = Budget.measured(alone(gradient_bytes=30 * MIB))
    assert (one.unit, one.limit) == ("tokens", 8 * 64)
    tight = alone(gradient_bytes=30 * MIB, limit_bytes=peak + 29 * MIB, margin_bytes=0)
    assert largest(Budget.measured(tight), 64) == 0
    assert "One shape says nothing about what less of it takes" in Budget.measured(tight).because
    assert largest(measured_budget(tight, accumulates=False), 64) == 8


def test_without_a_limit_gradients_do_not_make_room_for_themselves() -> None:
    probe = alone(ran=(2, 8), limit_bytes=None, margin_bytes=0, gradient_bytes=30 * MIB)
    assert Budget.measured(probe).limit == probe.trials[-1].peak_device_bytes


def test_gradients_that_nobody_counted_are_at_most_half_of_the_smallest_peak() -> None:
    probe = alone(ran=(4, 8), settings=Settings(), effective_batch=1)
    smallest = min(bytes_of(probe, accumulates=False).values())
    assert bytes_of(probe) == {shape: peak + smallest // 2 for shape, peak in bytes_of(probe, accumulates=False).items()}
    assert proven_shapes(probe, ROOM) == ()


def test_a_failure_beside_others_stands_though_a_larger_size_ran_alone() -> None:
    probe = alone(failed=(4,), shapes=[(1, 64), (2, 64)], gradient_bytes=MIB)
    budget = Budget.measured(probe)
    assert budget.cost_of(3, 64) <= budget.limit < budget.cost_of(4, 64)
    assert measured_budget(probe, accumulates=False).cost_of(8, 64) <= budget.limit


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("trials", {"peak_device_bytes": 0}, r"trials\[0\]\.peak_device_bytes of the probe is 0"),
        ("trials", {"peak_device_bytes": 10**400}, r"trials\[0\]\.peak_device_bytes of the probe is more than 2\*\*62"),
        ("trials", {"micro_batch": 10**9}, r"trials\[0\]\.micro_batch of the probe is more than 1,000,000"),
        ("trials", {"micro_batch_seconds": float("inf")}, r"trials\[0\]\.micro_batch_seconds"),
        ("points", {"peak_bytes": 0}, r"points\[0\]\.peak_bytes of the probe is 0"),
        ("points", {"peak_bytes": 10**400}, r"points\[0\]\.peak_bytes of the probe is more than"),
        ("points", {"length": 10**9}, r"points\[0\]\.length"),
    ],
    ids=["trial-0", "trial-huge", "trial-size", "trial-seconds", "point-0", "point-huge", "point-length"],
)
def test_figures_that_cannot_be_are_refused_by_name(part: str, changes: dict[str, Any], said: str) -> None:
    probe = measurement(ran=(4, 16), shapes=grid(), largest=None, fastest=None)
    first, *others = getattr(probe, part)
    hostile: dict[str, Any] = {part: (replace(first, **changes), *others)}
    with pytest.raises(UsageError, match=said) as caught:
        Budget.measured(replace(probe, **hostile))
    assert "probe again" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["limit_bytes", "margin_bytes", "gradient_bytes"])
def test_limits_that_cannot_be_are_refused_by_name(name: str) -> None:
    wrong: dict[str, Any] = {name: 10**400}
    with pytest.raises(UsageError, match=f"{name} of the probe is more than"):
        Budget.measured(replace(measurement(), **wrong))


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
    """Any truth, with noise on every figure; the trial that failed is the next larger one. Some ran alone, some among others."""
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
    made_of = measurement(ran=ran, failed=failed, shapes=sorted(shapes), bytes_of=uneven, limit_bytes=limit, margin_bytes=0)
    return replace(
        made_of,
        gradient_bytes=draw(st.none() | st.integers(0, 4 * 10**8)),
        trials=tuple(replace(trial, accumulates=draw(st.booleans())) for trial in made_of.trials),
        points=tuple(replace(point, accumulates=draw(st.booleans())) for point in made_of.points),
    )


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
    budget, single = Budget.measured(probe), measured_budget(probe, accumulates=False)
    proven = proven_shapes(probe, budget.limit if budget.unit == "bytes" else float(probe.limit_bytes or 0))
    for trial in probe.trials:
        shape = trial.micro_batch, 512
        assert (single.cost_of(*shape) <= single.limit) == (trial.verdict == "ok")
        if trial.verdict != "ok" or shape in proven:
            assert (budget.cost_of(*shape) <= budget.limit) == (trial.verdict == "ok")
        if trial.verdict == "ok" and trial.accumulates:
            assert shape in proven
    if budget.unit == "bytes":
        for point, peak in bytes_of(probe).items():
            assert budget.cost_of(*point) >= min(peak, budget.limit) * (1 - 1e-9)


@settings(deadline=None, max_examples=300)
@given(probes(), SHAPES)
def test_nothing_is_allowed_that_is_larger_in_all_directions_than_what_failed(probe: Measurement, shape: tuple[int, int]) -> None:
    budget = Budget.measured(probe)
    for trial in probe.trials:
        if trial.verdict != "ok" and shape[0] >= trial.micro_batch and shape[1] >= trial.max_length:
            assert budget.cost_of(*shape) > budget.limit
