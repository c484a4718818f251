"""The decorator of accelerate's name is called as accelerate's is, and fails as it does: the same tests for both."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from brim.prober.executable import find_executable_batch_size
from tests.prober.recoveries import out_of_memory, swiftly

Finder = Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]


def accelerates(*arguments: Any, **keywords: Any) -> Any:
    from accelerate.utils import memory

    return memory.find_executable_batch_size(*arguments, **keywords)


BOTH = pytest.mark.parametrize("find", [accelerates, find_executable_batch_size], ids=["accelerate", "brim"])


@pytest.fixture(scope="module", autouse=True)
def _swift() -> Iterator[None]:
    import accelerate  # noqa: F401 (before what is there is frozen)

    with swiftly():
        yield


@BOTH
def test_it_begins_at_the_starting_size_and_ends_at_one_that_runs(find: Finder) -> None:
    tried: list[int] = []

    @find(starting_batch_size=128)
    def loop(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size != 8:
            raise out_of_memory()

    loop()
    assert tried[0] == 128
    assert tried[-1] == 8
    assert tried == sorted(tried, reverse=True)
    if find is find_executable_batch_size:
        assert tried == [128, 64, 32, 16, 8]


@BOTH
def test_the_starting_size_is_128_when_none_is_given_and_the_decorator_may_be_bare(find: Finder) -> None:
    def loop(batch_size: int) -> int:
        return batch_size

    bare: Any = find(loop)
    assert bare() == 128
    placed: Any = find(loop, 32)
    assert placed() == 32
    named: Any = functools.partial(find, starting_batch_size=16)(function=loop)
    assert named() == 16


@BOTH
def test_arguments_are_passed_on_and_results_back(find: Finder) -> None:
    @find(starting_batch_size=128)
    def loop(batch_size: int, first: str, second: int = 0, *, third: int = 0) -> tuple[Any, ...]:
        if batch_size != 8:
            raise out_of_memory()
        return batch_size, first, second, third

    assert loop("hello") == (8, "hello", 0, 0)
    assert loop("hello", 2, third=3) == (8, "hello", 2, 3)


@BOTH
@pytest.mark.parametrize("start", [0, 1, 16])
def test_at_zero_it_ends_with_an_error(find: Finder, start: int) -> None:
    @find(starting_batch_size=start)
    def loop(batch_size: int) -> None:
        assert batch_size > 0
        raise out_of_memory()

    with pytest.raises(RuntimeError) as caught:
        loop()
    assert "No executable batch size found, reached zero." in caught.value.args[0]


@BOTH
def test_a_batch_size_that_is_passed_too_is_told_with_the_right_call(find: Finder) -> None:
    @find(starting_batch_size=128)
    def loop(batch_size: int, first: int, second: int) -> None:
        raise out_of_memory()

    with pytest.raises(TypeError) as caught:
        loop(128, 10, 20)
    assert "`loop`" in caught.value.args[0]
    assert "`loop(first=10, second=20)`" in caught.value.args[0]


@BOTH
@pytest.mark.parametrize("error", [ValueError("Oops"), RuntimeError("shapes do not match"), KeyboardInterrupt()], ids=repr)
def test_what_is_not_about_memory_passes_through(find: Finder, error: BaseException) -> None:
    tried = []

    @find(starting_batch_size=16)
    def loop(batch_size: int) -> None:
        tried.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert tried == [16]


@BOTH
def test_a_failure_that_holds_memory_has_let_go_of_it_at_the_next_try(find: Finder) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find(starting_batch_size=4)
    def loop(batch_size: int) -> list[bool]:
        alive = [one() is not None for one in held]
        activation = torch.ones(batch_size)
        held.append(weakref.ref(activation))
        if batch_size > 2:
            raise out_of_memory()
        return alive

    assert not any(loop())
