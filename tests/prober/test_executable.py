"""The largest batch size that runs, found by trials that are cut off, and the result of a plain call with it."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from brim.errors import OutOfMemoryError, UsageError
from brim.machine.budget import ForkServer
from brim.prober.executable import ReachedZeroError, find_executable_batch_size
from brim.sizes import MIB
from tests.prober.recoveries import out_of_memory, swiftly


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    import torch._dynamo  # noqa: F401 (at the first optimizer, otherwise)

    with swiftly():
        yield


def test_a_failure_lets_go_of_what_a_cycle_of_errors_holds_too() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=4)
    def loop(batch_size: int) -> list[bool]:
        alive = [one() is not None for one in held]
        activation = torch.ones(batch_size)
        held.append(weakref.ref(activation))
        if batch_size > 2:
            try:
                raise out_of_memory()
            except RuntimeError as error:
                kept = error
                raise RuntimeError("in a layer") from kept
        return alive

    assert loop() == [False]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        OutOfMemoryError("The optimizer does not fit."),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["driver", "cublas", "python", "brim", "system"],
)
def test_out_of_memory_is_recognised_in_its_other_words_too(error: Exception) -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def loop(batch_size: int) -> int:
        if batch_size > 2:
            raise error
        return batch_size

    assert loop() == 2


class Loop:
    """A training loop that runs out of memory above `limit`, or later above `late_limit`, and notes every run."""

    def __init__(self, limit: int, *, steps: int = 5, late_limit: int = 1 << 30, optimizers: int = 1) -> None:
        self.limit, self.steps, self.late_limit, self.optimizers = limit, steps, late_limit, optimizers
        self.runs: list[tuple[int, int]] = []
        """Batch size, and how many steps were done."""

    def __call__(self, batch_size: int, **keywords: Any) -> tuple[int, dict[str, Any], list[float]]:
        self.runs.append((batch_size, 0))
        model = torch.nn.Linear(2, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _each in range(self.optimizers)]
        if batch_size > self.limit:
            raise out_of_memory()
        for step in range(self.steps):
            if step >= 3 and batch_size > self.late_limit:
                raise out_of_memory()
            for number, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                noise = torch.randn(batch_size, 2) * float(np.random.rand())
                model(noise).mean().backward()
                if step % (number + 1) == 0:
                    self.runs[-1] = (batch_size, step + 1)
                    optimizer.step()
        return batch_size, keywords, [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100), st.integers(1, 100))
def test_the_answer_is_the_largest_size_that_runs_and_only_its_run_goes_to_the_end(start: int, limit: int) -> None:
    loop = Loop(limit)
    found, _keywords, _weights = find_executable_batch_size(loop, start)()
    assert found == min(start, limit)
    *trials, last = loop.runs
    assert last == (found, 5)
    assert loop.runs[0][0] == start
    assert all(steps == (2 if size <= limit else 0) for size, steps in trials)
    assert len(loop.runs) <= 2 * start.bit_length() + 1


def test_the_sizes_between_are_found_by_halving_what_is_left() -> None:
    loop = Loop(11)
    find_executable_batch_size(loop, 32)()
    assert loop.runs == [(32, 0), (16, 0), (8, 2), (12, 0), (10, 2), (11, 5)]


def test_the_result_is_bit_for_bit_that_of_a_plain_call() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    loop = Loop(11)
    found = find_executable_batch_size(loop, 64)()
    after = torch.rand(1), np.random.rand()
    torch.manual_seed(7)
    np.random.seed(7)
    assert Loop(11)(11) == found
    assert (torch.rand(1), np.random.rand()) == after


def test_every_call_looks_anew() -> None:
    loop = Loop(4)
    decorated = find_executable_batch_size(loop, 16)
    assert decorated()[0] == 4
    loop.limit = 9
    assert decorated()[0] == 9


@pytest.mark.parametrize("steps", [1, 3])
def test_how_many_steps_a_trial_takes_may_be_said(steps: int) -> None:
    loop = Loop(5)
    find_executable_batch_size(loop, 8, steps=steps)()
    assert {done for size, done in loop.runs[:-1] if size <= 5} == {steps}


def test_with_two_optimizers_the_busiest_counts() -> None:
    loop = Loop(5, optimizers=2)
    assert find_executable_batch_size(loop, 8)()[0] == 5
    assert loop.runs == [(8, 0), (4, 2), (6, 0), (5, 5)]


def test_a_run_that_fails_later_goes_on_from_a_size_that_is_clearly_smaller_and_says_so() -> None:
    loop = Loop(40, late_limit=30)
    with pytest.warns(RuntimeWarning, match=r"Batch size \d+ ran out of memory after 3 optimizer steps") as caught:
        found = find_executable_batch_size(loop, 64)()
    assert caught[0].filename == __file__
    assert found[0] == 28
    assert [size for size, done in loop.runs if done > 2] == [40, 36, 32, 28]
    assert [str(one.message).rpartition(" ")[2] for one in caught] == ["36.", "32.", "28."]


@pytest.mark.filterwarnings("ignore:Batch size")
def test_a_run_that_always_fails_later_reaches_zero() -> None:
    loop = Loop(40, late_limit=0)
    with pytest.raises(ReachedZeroError) as caught:
        find_executable_batch_size(loop, 4)()
    assert "Not even a batch size of 1 fits (CUDA out of memory." in str(caught.value.hint)


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_function_that_catches_exceptions_does_not_catch_the_end_of_a_trial(limit: int) -> None:
    loop, caught = Loop(limit), []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        try:
            return int(loop(batch_size)[0])
        except Exception as error:
            caught.append(error)
            raise

    assert train() == limit
    assert all(isinstance(error, torch.OutOfMemoryError) for error in caught)


@pytest.mark.parametrize("way", ["returns", "raises another", "exits", "raises later"])
def test_nor_is_a_run_taken_for_whole_that_swallowed_its_end(way: str) -> None:
    loop = Loop(5)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        failed = False
        try:
            loop(batch_size)
        except Exception:
            raise
        except BaseException as error:
            if way == "raises another":
                raise ValueError("training failed") from error
            if way == "exits":
                sys.exit(3)
            failed = True
        if failed and way == "raises later":
            raise ValueError("training failed")
        return -1 if failed else batch_size

    assert train() == 5
    assert loop.runs[-1] == (5, 5)


@pytest.mark.filterwarnings("ignore:Batch size")
def test_one_decorated_function_inside_another() -> None:
    @find_executable_batch_size(starting_batch_size=8)
    def outer(batch_size: int) -> tuple[int, int]:
        inner = find_executable_batch_size(Loop(3), 4)()
        return batch_size, int(Loop(5)(batch_size)[0]) * inner[0]

    assert outer() == (5, 15)


def test_no_hook_stays_behind() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = dict(_global_optimizer_post_hooks)
    find_executable_batch_size(Loop(3), 8)()
    with pytest.raises(ZeroDivisionError):
        find_executable_batch_size(lambda batch_size: 1 // 0)()
    assert dict(_global_optimizer_post_hooks) == before


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 96), st.integers(1, 64), st.integers(1, 64))
def test_with_an_effective_batch_the_product_is_always_that(effective: int, start: int, limit: int) -> None:
    loop = Loop(limit)
    found, keywords, _weights = find_executable_batch_size(loop, start, effective_batch=effective)()
    assert found * keywords["gradient_accumulation_steps"] == effective
    assert found == max(size for size in range(1, effective + 1) if effective % size == 0 and size <= min(start, limit))
    assert all(effective % size == 0 for size, _steps in loop.runs)


def test_the_micro_batches_come_by_the_name_that_the_function_knows() -> None:
    def one(batch_size: int, model: str, gradient_accumulation_steps: int) -> tuple[Any, ...]:
        return batch_size, model, gradient_accumulation_steps

    def two(batch_size: int, *, accumulation_steps: int) -> tuple[Any, ...]:
        return batch_size, accumulation_steps

    def neither(batch_size: int, steps: int) -> None: ...

    def by_place(accumulation_steps: int, /, batch_size: int) -> None: ...

    assert find_executable_batch_size(one, 32, effective_batch=48)("m") == (24, "m", 2)
    assert find_executable_batch_size(two, effective_batch=256)() == (128, 2)
    for function in (neither, by_place):
        with pytest.raises(UsageError, match="takes no parameter for that") as caught:
            find_executable_batch_size(effective_batch=64)(function)
        assert "gradient_accumulation_steps" in str(caught.value.hint)


def test_the_signature_shows_what_the_caller_gives() -> None:
    def loop(batch_size: int, model: str, gradient_accumulation_steps: int = 1, *, rate: float = 0.1) -> None:
        """Train."""

    assert str(inspect.signature(find_executable_batch_size(loop, effective_batch=8))) == "(model: 'str', *, rate: 'float' = 0.1)"
    assert (find_executable_batch_size(loop).__name__, find_executable_batch_size(loop).__doc__) == ("loop", "Train.")


def test_a_batch_size_by_name_is_told_too_and_long_values_are_not_printed() -> None:
    @find_executable_batch_size
    def loop(batch_size: int, model: Any, rate: float = 0.1) -> None: ...

    with pytest.raises(TypeError, match=r"`loop\(model=\.\.\., rate=0\.2\)`"):
        loop("m" * 100, batch_size=3, rate=0.2)


def test_any_number_of_arguments_may_be_taken() -> None:
    assert find_executable_batch_size(lambda batch_size, *rest: (batch_size, rest), 4)(1, 2, 3) == (4, (1, 2, 3))


def test_what_runs_only_later_is_refused() -> None:
    def generator(batch_size: int) -> Iterator[int]:
        yield batch_size

    async def coroutine(batch_size: int) -> int:
        return batch_size

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match="returns before it runs"):
            find_executable_batch_size(function)
    with pytest.raises(TypeError, match="must be a function"):
        find_executable_batch_size(64)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "keywords", [{"starting_batch_size": -1}, {"starting_batch_size": 2.5}, {"effective_batch": 0}, {"steps": 0}], ids=str
)
def test_numbers_that_make_no_sense_are_refused_where_they_are_given(keywords: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        find_executable_batch_size(**keywords)


def train_for_real(batch_size: int) -> int:
    """Each sample takes 6 MiB of activations, in three pieces of 2 MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _step in range(3):
        optimizer.zero_grad()
        model(torch.ones(batch_size, 8192, 64)).mean().backward()
        optimizer.step()
    return batch_size


def find_for_real(effective_batch: int | None = None) -> dict[str, Any]:
    def train(batch_size: int, **_keywords: Any) -> int:
        return train_for_real(batch_size)

    train_for_real(1)
    found = find_executable_batch_size(train, 40, effective_batch=effective_batch)()
    fits, said = {}, []
    for size in (found, found + 1, 2 * found):
        try:
            fits[size] = train_for_real(size) == size
        except RuntimeError as error:
            fits[size] = False
            said.append(str(error))
    return {"found": found, "fits": fits, "said": said}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")
@pytest.mark.parametrize(
    "memory", [pytest.param(64 * MIB, id="64MiB"), pytest.param(150 * MIB, id="150MiB", marks=pytest.mark.slow)]
)
def test_with_real_memory_the_next_larger_size_does_not_fit(server: ForkServer, memory: int) -> None:
    preload = ("torch._dynamo", "tests.prober.test_executable")
    answer = server.run(find_for_real, memory_bytes=memory, preload=preload, timeout_seconds=120).unwrap()
    found = answer["found"]
    assert found > 1
    assert answer["fits"] == {found: True, found + 1: False, 2 * found: False}
    assert all("can't allocate memory" in words for words in answer["said"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")
def test_with_real_memory_and_an_effective_batch_the_next_divisor_does_not_fit(server: ForkServer) -> None:
    preload = ("torch._dynamo", "tests.prober.test_executable")
    answer = server.run(find_for_real, 64, memory_bytes=150 * MIB, preload=preload, timeout_seconds=120).unwrap()
    found = answer["found"]
    assert found in {4, 8, 16}
    assert answer["fits"][found]
    assert not answer["fits"][2 * found]
