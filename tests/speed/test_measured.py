"""Measured figures take the place of constants: of the machine, and of one micro-batch of the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings, strategies as st

from brim.memory.work import FORMATS
from brim.speed.measured import calibrated, measure_cpu
from brim.speed.rates import Rates
from brim.speed.roofline import Roofline
from tests.speed.test_roofline import DEVICES, EVERYWHERE, LENGTH, family


@EVERYWHERE
@settings(deadline=None, max_examples=40)
@given(seconds=st.floats(1e-4, 1e3), batch=st.integers(1, 64), before=st.floats(0.1, 10.0))
def test_a_calibrated_model_gives_back_what_was_measured(rates: Rates, seconds: float, batch: int, before: float) -> None:
    work = family().work
    found = calibrated(replace(rates, scale=before), work, batch, LENGTH, seconds)
    assert Roofline(work, found).micro_batch_seconds(batch, LENGTH) == pytest.approx(seconds)
    assert found.source == "calibrated"
    assert replace(found, scale=before, source=rates.source) == replace(rates, scale=before)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine make a short measurement long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def this_cpu(one_thread: None) -> Rates:
    return measure_cpu(0.2, half=False)


def test_a_measured_cpu_says_so_and_can_be_used(this_cpu: Rates) -> None:
    assert this_cpu.source == "measured"
    assert set(this_cpu.flops) == set(FORMATS)
    assert not this_cpu.overlaps
    assert Roofline(family().work, this_cpu).micro_batch_seconds(2, LENGTH) > 0


def test_every_measured_figure_is_positive(this_cpu: Rates) -> None:
    assert all(0 < rate < inf for rate in this_cpu.flops.values())
    sizes = [size for size, _rate in this_cpu.bandwidth]
    assert sizes == sorted(set(sizes))
    assert all(0 < rate < inf for _size, rate in this_cpu.bandwidth)
    assert 0 < this_cpu.kernel_seconds < inf
    assert this_cpu.new_pages is not None
    assert all(0 < figure < inf for figure in this_cpu.new_pages)


def test_a_fixed_threshold_of_malloc_is_where_new_pages_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICES["cpu"].new_pages is not None
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    found = measure_cpu(0.05, half=False).new_pages
    assert found is not None
    assert found[0] == 65536


def test_the_room_is_imported_without_torch() -> None:
    code = "import sys, brim.speed.measured; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
