"""How much of what is computed is padding, by how sequences come into micro-batches; and the padded shapes of brim's steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from brim.planner.padding import padding_waste, report, sorted_slices
from brim.step.cuts import cut
from brim.workload.lengths import Lengths, fixed_lengths, measure_lengths

SFT = Path(__file__).parents[2] / "../shared/data/sft"
needs_data = pytest.mark.skipif(not SFT.is_dir(), reason="the instruction data of ../shared/data/sft are not here")


def lengths_of(tokens: list[int], targets: list[int] | None = None) -> Lengths:
    return Lengths("", np.array(tokens), np.array(targets or [0] * len(tokens)), "told", exact=True)


def drawn(n: int, seed: int = 0, *, targets: bool = False) -> Lengths:
    random = np.random.default_rng(seed)
    tokens, others = (np.clip(random.lognormal(5, 0.8, n), 4, 1024).astype(int).tolist() for _column in range(2))
    return lengths_of(tokens, others if targets else None)


@needs_data
def test_on_alpaca_brim_slices_nearly_as_well_as_sorting_the_whole_set_would() -> None:
    """Measured before, on a real run with an effective batch of 64: 46.7 % shuffled, 3.0 % grouped, 3.3 % sliced."""
    waste = padding_waste(measure_lengths(SFT / "alpaca_en_1k.json"), effective_batch=64, micro_batch=4)
    assert 0.40 < waste["shuffled"] < 0.55
    assert 0.015 < waste["grouped"] < 0.06
    assert 0.015 < waste["sliced"] < 0.06


@needs_data
def test_with_sources_and_targets_only_the_slicer_sorts_by_both() -> None:
    lengths = measure_lengths(SFT / "chatlm_zh_train_3k.parquet", task="seq2seq").cut(256, 256)
    waste = padding_waste(lengths, effective_batch=256, micro_batch=16)
    assert waste["sliced"] < 0.12
    assert waste["sliced"] < 0.3 * waste["grouped"] < 0.3 * waste["shuffled"]


def test_equal_lengths_waste_nothing() -> None:
    assert padding_waste(fixed_lengths(10_000_000, 2048), effective_batch=64, micro_batch=8) == {
        "shuffled": 0,
        "grouped": 0,
        "sliced": 0,
    }


def test_shuffled_micro_batches_pad_to_their_longest() -> None:
    # Two lengths, all in one micro-batch: 4 x 10 computed, 25 real.
    waste = padding_waste(lengths_of([10, 5, 5, 5]), effective_batch=4, micro_batch=4)
    assert waste["shuffled"] == waste["grouped"] == pytest.approx(1 - 25 / 40)
    # Targets pad as well: 2 x (10 + 8) computed.
    waste = padding_waste(lengths_of([10, 5], [2, 8]), effective_batch=2, micro_batch=2)
    assert waste["shuffled"] == pytest.approx(1 - 25 / 36)


def test_grouping_is_the_order_of_transformers() -> None:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = drawn(5000)
    theirs = lengths.tokens[get_length_grouped_indices(lengths.tokens.tolist(), 64)]  # type: ignore[no-untyped-call]
    starts = np.arange(0, 5000, 8)
    counts = np.diff(np.append(starts, 5000))
    expected = 1 - theirs.sum() / (np.maximum.reduceat(theirs, starts) * counts).sum()
    found = padding_waste(lengths, effective_batch=64, micro_batch=8)["grouped"]
    assert found == pytest.approx(expected, abs=0.003)


def test_a_dearer_micro_batch_is_sliced_more_coarsely() -> None:
    lengths = drawn(2000)
    fine, coarse = (
        padding_waste(lengths, effective_batch=64, micro_batch=8, fixed_tokens=fixed)["sliced"] for fixed in (1.0, 2000.0)
    )
    assert fine < coarse


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 300), st.integers(1, 80), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_waste_is_a_share_and_the_same_each_time(
    n: int, effective_batch: int, micro_batch: int, ranks: int, targets: bool
) -> None:
    lengths = drawn(n, targets=targets)
    waste = padding_waste(lengths, effective_batch=effective_batch, micro_batch=micro_batch, ranks=ranks)
    assert all(0 <= share < 1 for share in waste.values())
    assert waste == padding_waste(
        drawn(n, targets=targets), effective_batch=effective_batch, micro_batch=micro_batch, ranks=ranks
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_the_shapes_of_a_step_hold_its_sequences_and_cover_their_tokens(
    n: int, effective_batch: int, micro_batch: int, ranks: int, targets: bool
) -> None:
    lengths = drawn(n, targets=targets)
    chosen = cut(effective_batch, micro_batch, ranks)
    slices = chosen.slices or (chosen.micro_batch,) * (chosen.accumulation * ranks)
    shapes = sorted_slices(lengths, effective_batch, slices, ranks)
    assert shapes.shape[1:] == (ranks, chosen.accumulation, 3 if targets else 2)
    assert (shapes[..., 0] == np.array(slices).reshape(ranks, -1)).all()
    assert ((shapes[..., 1] > 0) == (shapes[..., 0] > 0)).all()
    assert shapes[..., 1].max() <= lengths.tokens.max()
    if n == effective_batch:
        real = lengths.tokens.sum() + lengths.target_tokens.sum()
        assert (shapes[..., 0] * shapes[..., 1:].sum(axis=-1)).sum() >= real
    assert (shapes == sorted_slices(drawn(n, targets=targets), effective_batch, slices, ranks)).all()


def test_a_step_with_one_sequence_a_slice_is_padded_by_nothing() -> None:
    lengths = drawn(64)
    shapes = sorted_slices(lengths, 64, (1,) * 64, ranks=2)
    assert sorted(shapes[0, ..., 1].ravel().tolist()) == sorted(lengths.tokens.tolist())


def test_where_all_are_equal_one_step_says_it_all() -> None:
    assert sorted_slices(fixed_lengths(5000, 256, 128), 6, (2, 2, 2)).tolist() == [[[[2, 256, 128]] * 3]]


def test_the_report_counts_what_the_model_sees_and_says_what_is_cut() -> None:
    told = report(lengths_of([10, 20, 30, 400]), max_length=100, effective_batch=2, micro_batch=1)
    assert (told.sequences, told.tokens, told.mean_tokens, told.median_tokens, told.p95_tokens) == (4, 160, 40.0, 20, 100)
    assert (told.longest_tokens, told.cut, told.counted_by, told.exact) == (400, 1, "told", True)
    assert set(told.padding) == {"shuffled", "grouped", "sliced"}
    told = report(lengths_of([10, 200], [300, 5]), max_length=100, target_length=50, effective_batch=2, micro_batch=1)
    assert (told.tokens, told.longest_tokens, told.cut) == (165, 310, 2)
