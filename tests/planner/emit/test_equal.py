"""Other tools take equal micro-batches only: the batch stays exact, or the format is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim import UnsupportedError
from brim.planner.emit.equal import cut_note, equal_cut, nearest_multiples
from brim.step.cuts import cut
from brim.workload.records import Configuration


def configuration(effective: int, micro: int, ranks: int) -> Configuration:
    made = cut(effective, micro, ranks)
    return Configuration(
        micro_batch=made.micro_batch, accumulation=made.accumulation, slices=made.slices, world_size=ranks, effective_batch=effective
    )  # fmt: skip


@given(st.integers(1, 1024), st.integers(1, 128), st.sampled_from([1, 2, 3, 8]))
def test_the_batch_is_exact_or_refused(effective: int, micro: int, ranks: int) -> None:
    planned = configuration(effective, micro, ranks)
    if effective % ranks:
        with pytest.raises(UnsupportedError, match="do not divide"):
            equal_cut(planned)
        return
    made = equal_cut(planned)
    assert made.micro_batch * made.accumulation * ranks == effective
    assert made.micro_batch <= planned.micro_batch
    larger = [size for size in range(made.micro_batch + 1, planned.micro_batch + 1) if (effective // ranks) % size == 0]
    assert not larger


def test_equal_slices_stay_as_they_are() -> None:
    planned = configuration(64, 4, 2)
    made = equal_cut(planned)
    assert (made.micro_batch, made.accumulation) == (4, 8)
    assert cut_note(planned, made) is None


def test_seven_on_two_gpus_is_refused_with_six_and_eight() -> None:
    with pytest.raises(UnsupportedError) as caught:
        equal_cut(configuration(7, 4, 2))
    assert "6 or 8" in str(caught.value.hint)


def test_fewer_sequences_than_gpus_name_only_what_exists() -> None:
    assert nearest_multiples(1, 2) == (2,)
    assert nearest_multiples(7, 2) == (6, 8)


def test_fifty_by_eight_becomes_five_times_ten_and_says_so() -> None:
    planned = configuration(50, 8, 1)
    made = equal_cut(planned)
    assert (made.micro_batch, made.accumulation) == (5, 10)
    note = cut_note(planned, made)
    assert note is not None
    assert "5 x 10" in note
    assert "48, 56" in note
