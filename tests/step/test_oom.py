"""Out of memory is read for what it says, frees what it holds, and teaches a limit that is never above the budget."""

from __future__ import annotations

import weakref
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from brim.machine.device import CpuDevice
from brim.machine.nvml import Process
from brim.machine.sharing import Others
from brim.sizes import GIB, MIB
from brim.step.budget import Budget
from brim.step.micro import MicroBatch
from brim.step.oom import (
    BACK_OFF,
    CLIMB,
    CLIMB_AFTER,
    Failure,
    Guard,
    clipping_does_not_fit,
    does_not_fit_alone,
    failure_of,
    half_changed,
    release,
    requested_bytes,
)
from tests.step.faults import ASKED_BYTES, out_of_memory


def rows(count: int, length: int = 10) -> MicroBatch:
    return MicroBatch(np.arange(count), np.full(count, length), {"input_ids": torch.ones(count, length, dtype=torch.long)})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.58 GiB", 20 << 20),
        ("CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 14.76 GiB total capacity)", 3 << 29),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("MPS backend out of memory (MPS allocated: 8.00 GB). Tried to allocate 256 bytes on private pool.", 256),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12", 4 << 20),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
        ("std::bad_alloc", None),
    ],
)
def test_the_bytes_that_were_asked_for_are_read_from_the_message(message: str, expected: int | None) -> None:
    assert requested_bytes(message) == expected


@pytest.mark.parametrize("number", [0, 1])
def test_a_failure_keeps_what_the_error_said_and_not_the_error(number: int) -> None:
    failure = failure_of(out_of_memory(number), "backward")
    assert failure is not None
    assert (failure.phase, failure.requested_bytes, failure.family) == ("backward", ASKED_BYTES, ["cuda", "cpu"][number])
    assert not any(isinstance(getattr(failure, one.name), BaseException) for one in fields(failure))


def test_what_is_not_about_memory_is_no_failure() -> None:
    assert failure_of(ValueError("CUDA out of memory."), "forward") is None
    assert failure_of(RuntimeError("expected scalar type Half but found Float"), "forward") is None


def test_releasing_an_error_frees_what_its_frames_and_its_causes_held() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def inner() -> None:
        activation = torch.ones(8)
        held.append(weakref.ref(activation))
        raise out_of_memory(0)

    def outer() -> None:
        other = torch.zeros(8)
        held.append(weakref.ref(other))
        try:
            inner()
        except RuntimeError as error:
            raise RuntimeError("in a layer") from error

    with pytest.raises(RuntimeError, match="in a layer") as caught:
        outer()
    error = caught.value
    del caught
    release(error, CpuDevice())
    assert [one() for one in held] == [None, None]


def test_the_limit_falls_below_what_failed_and_one_sequence_teaches_nothing() -> None:
    guard = Guard(Budget.sequences(8))
    guard.learn(rows(6))
    assert guard.limit == pytest.approx(6 * BACK_OFF)
    guard.learn(rows(8))
    assert guard.limit == pytest.approx(6 * BACK_OFF)
    guard.learn(rows(1))
    assert guard.limit == pytest.approx(6 * BACK_OFF)
    assert guard.allows(rows(5))
    assert not guard.allows(rows(6))
    assert guard.in_force.limit == guard.limit


def test_one_sequence_is_always_allowed() -> None:
    assert Guard(Budget.tokens(10)).allows(rows(1, 500))


def test_the_limit_climbs_after_so_many_clean_steps_and_never_above_the_budget() -> None:
    guard = Guard(Budget.sequences(8))
    guard.learn(rows(8))
    for _step in range(CLIMB_AFTER - 1):
        guard.step_was_clean()
    assert guard.limit == pytest.approx(7.2)
    guard.step_was_clean()
    assert guard.limit == pytest.approx(7.2 * CLIMB)
    for _step in range(10 * CLIMB_AFTER):
        guard.step_was_clean()
    assert guard.limit == 8


def test_waiting_doubles_only_when_it_was_the_climb_that_failed() -> None:
    guard = Guard(Budget.sequences(8), climb_after=3)
    guard.learn(rows(8))
    assert guard.state()["climb_after"] == 3
    for _step in range(3):
        guard.step_was_clean()
    guard.learn(rows(7))
    assert guard.state()["climb_after"] == 6
    for _step in range(6 * 20):
        guard.step_was_clean()
    assert guard.limit == 8
    guard.learn(rows(8))  # an outlier, long after the climb has held
    assert guard.state()["climb_after"] == 6


@given(st.lists(st.integers(0, 12), max_size=80))
def test_whatever_happens_the_limit_stays_between_one_failed_sequence_and_the_budget(events: list[int]) -> None:
    guard = Guard(Budget.sequences(8), climb_after=2)
    for event in events:
        guard.step_was_clean() if event == 0 else guard.learn(rows(event))
        assert 2 * BACK_OFF <= guard.limit <= 8


def test_what_was_learned_goes_into_a_checkpoint_and_comes_back_under_the_same_budget() -> None:
    guard = Guard(Budget.sequences(8))
    guard.learn(rows(8))
    guard.step_was_clean()
    other = Guard(Budget.sequences(8))
    other.restore(guard.state())
    assert other.state() == guard.state()
    small = Guard(Budget.sequences(4))
    small.restore(guard.state())
    assert small.limit == 4


def test_the_last_words_say_what_where_and_how_to_go_on() -> None:
    failure = Failure("forward", "cuda", ASKED_BYTES)
    alone = does_not_fit_alone(MicroBatch(np.array([7]), np.array([[1200, 34]]), {}), failure, CpuDevice(), 512)
    assert alone.message.startswith("Sequence 7 (1,200 + 34 tokens) does not fit even alone: out of memory in forward, ")
    assert alone.message.endswith(", 20.0 MiB more asked for.")
    assert alone.family == "cuda"
    assert "up to 512 tokens have fitted" in str(alone.hint)
    torn = half_changed(failure, CpuDevice(), "Start again.")
    assert "does not save them" in torn.message
    assert str(torn.hint).startswith("Start again. A smaller micro-batch does not help")
    assert "This step was not taken" in clipping_does_not_fit(failure, CpuDevice()).message


class SharedCard(CpuDevice):
    """A device of which another process holds a part."""

    def __init__(self, used_bytes: int) -> None:
        self._used_bytes = used_bytes

    def others(self) -> Others:
        return Others(self._used_bytes, (Process(4711, self._used_bytes, "python"),) if self._used_bytes else ())


def test_memory_that_another_process_holds_is_not_blamed_on_the_sequence() -> None:
    failure, one = Failure("backward", "cuda", ASKED_BYTES), MicroBatch(np.array([7]), np.array([[512]]), {})
    error = does_not_fit_alone(one, failure, SharedCard(2 * GIB), 512)
    assert error.message.endswith("Other processes hold 2.00 GiB of this GPU: python (pid 4711) 2.00 GiB.")
    assert (
        str(error.hint)
        == "Sequences of this length have fitted in this run. Free the memory that other processes hold, then resume."
    )
    torn = half_changed(failure, SharedCard(2 * GIB), "Start again.")
    assert "pid 4711" in torn.message
    assert str(torn.hint) == "Start again. Free the memory that other processes hold."


def test_a_long_sequence_is_blamed_where_others_hold_too_little_to_matter() -> None:
    failure, one = Failure("forward", "cuda", ASKED_BYTES), MicroBatch(np.array([7]), np.array([[1200]]), {})
    error = does_not_fit_alone(one, failure, SharedCard(MIB), 512)
    assert "pid 4711" in error.message
    assert str(error.hint).startswith("Sequences of up to 512 tokens have fitted in this run: shorten the longer ones to that.")
    assert "hold" not in does_not_fit_alone(one, failure, SharedCard(0), 512).message
