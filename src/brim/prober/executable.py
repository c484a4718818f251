"""`find_executable_batch_size`: the decorator that many scripts know from accelerate, with an exact answer.

The decorated function gets the batch size as its first argument and may be run again from scratch: that is the convention, and all
that is needed. Sizes are halved until one runs; between that one and the last that failed, the largest is looked for. A trial with
something larger left to try need not train to its end: it is cut off after a few optimizer steps, when memory has had its peak.
The run at the size that is chosen is never cut off, and what it returns is returned. Every try begins with the same random numbers, so
that the result is that of a plain call with this size.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from bisect import bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook

from brim.errors import RunError, UsageError, is_out_of_memory
from brim.locale import _
from brim.prober.snapshot import Generators, devices_in_use, free
from brim.step.arguments import whole
from brim.step.devices import device_of
from brim.step.oom import BACK_OFF, release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from brim.machine.device import Device

Result = TypeVar("Result")

REACHED_ZERO: Final = "No executable batch size found, reached zero."
"""Not translated: programs look for these words."""
_ACCUMULATION: Final = ("gradient_accumulation_steps", "accumulation_steps")
_LONGEST_VALUE: Final = 40
_LONGEST_ERROR: Final = 200


class ReachedZeroError(RunError, RuntimeError):
    """Not even the smallest batch size ran. A RuntimeError, because that is what callers of accelerate's decorator catch."""


@overload
def find_executable_batch_size(
    function: Callable[..., Result], starting_batch_size: int = ..., *, effective_batch: int | None = ..., steps: int = ...
) -> Callable[..., Result]: ...
@overload
def find_executable_batch_size(
    function: None = None, starting_batch_size: int = ..., *, effective_batch: int | None = ..., steps: int = ...
) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    *,
    effective_batch: int | None = None,
    steps: int = 2,
) -> Any:
    """Call `function(batch_size, ...)` with the largest batch size that runs, from `starting_batch_size` downwards.

    `steps` is after how many optimizer steps a trial is cut off. With `effective_batch`, only sizes that divide it are tried, and the
    function also gets `gradient_accumulation_steps` (or `accumulation_steps`, if that is what it takes), so that the product is always
    exactly the effective batch. A function that ends without so many steps has run, and its result is returned as it is. Every call
    looks anew. Errors that are not about memory pass through.
    """
    sizes = _sizes(starting_batch_size, effective_batch)
    whole("steps", steps)
    if function is None:
        return functools.partial(
            find_executable_batch_size, starting_batch_size=starting_batch_size, effective_batch=effective_batch, steps=steps
        )
    _refuse_what_runs_later(function)
    parameters = _parameters(function)
    keyword = None if effective_batch is None else _accumulation_keyword(function, parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        _refuse_a_batch_size(function, parameters, arguments, keywords)

        def attempt(size: int) -> Any:
            extra = {keyword: effective_batch // size} if effective_batch and keyword else {}
            return function(size, *arguments, **keywords, **extra)

        return _Search(attempt, sizes, steps).run()

    if parameters:  # what the caller gives, for whoever asks
        given = [parameter for parameter in parameters[1:] if parameter.name != keyword]
        call.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return call


class _Search:
    """The largest of some sizes, in ascending order, that runs; and its result."""

    def __init__(self, attempt: Callable[[int], Any], sizes: Sequence[int], steps: int) -> None:
        self._attempt, self._sizes, self._steps = attempt, sizes, steps
        self._ceiling = len(sizes)
        """The place of the smallest size that is known not to run."""
        self._floor = -1
        """The place of the largest below it that a trial says will run."""
        self._trials: set[int] = set()
        """The places of all that were cut off."""
        self._last_words = ""

    def run(self) -> Any:
        generators = Generators()
        free(_device())
        while self._ceiling > 0:
            place = self._next()
            generators.restore()
            watch = _Watch(None if place == self._ceiling - 1 else self._steps)
            try:
                with watch.on():
                    result = self._attempt(self._sizes[place])
                if not watch.was_cut:
                    return result
                del result  # of a run that has lost its end, and has not noticed
                free(_device())
            except BaseException as error:
                if not watch.has_cut(error):
                    if not is_out_of_memory(error):
                        raise
                    self._last_words = str(error).strip().partition("\n")[0][:_LONGEST_ERROR]
                release(error, _device())
            if watch.was_cut:
                self._trials.add(place)
                self._floor = place
            else:
                self._failed(place, watch.steps)
        raise ReachedZeroError(REACHED_ZERO, hint=self._why())

    def _next(self) -> int:
        """Halve until one runs; then the middle of what is left; then, with nothing between, the one that runs."""
        if self._ceiling == len(self._sizes):
            return self._ceiling - 1
        if self._floor < 0:
            return bisect_right(self._sizes, self._sizes[self._ceiling] // 2) - 1
        return (self._floor + self._ceiling) // 2

    def _failed(self, place: int, steps: int) -> None:
        """Out of memory. Where its first steps had fitted, trials tell nothing about sizes near it, and each whole run is dear."""
        if steps < self._steps and place not in self._trials:
            self._ceiling = place
            self._floor = max((trial for trial in self._trials if trial < place), default=-1)
            return
        self._floor = bisect_right(self._sizes, int(BACK_OFF * self._sizes[place])) - 1
        self._ceiling = self._floor + 1
        if self._floor >= 0:
            text = _(
                "Batch size {size} ran out of memory after {steps} optimizer steps, though a trial of it would have fitted. "
                "Everything begins again with {smaller}."
            )
            text = text.format(size=self._sizes[place], steps=steps, smaller=self._sizes[self._floor])
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _why(self) -> str:
        if not self._last_words:
            return _("Give a starting_batch_size of at least 1.")
        text = _("Not even a batch size of {size} fits ({error}). Save memory: gradient checkpointing, LoRA, an 8-bit optimizer.")
        return text.format(size=self._sizes[0], error=self._last_words)


class _CutOff(BaseException):
    """Ends a trial. Not an Exception: a training loop that goes on after errors must not go on after this one."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch


class _Watch:
    """Counts the steps of all optimizers; when the busiest has done `cut_after`, the run is cut off."""

    def __init__(self, cut_after: int | None) -> None:
        self._cut_after = cut_after
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.steps = 0
        self.was_cut = False

    @contextmanager
    def on(self) -> Iterator[None]:
        hook = register_optimizer_step_post_hook(self._count)
        try:
            yield
        finally:
            hook.remove()

    def _count(self, optimizer: torch.optim.Optimizer, *_details: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.steps = max(self.steps, self._counts[optimizer])
        if self._cut_after is not None and self.steps >= self._cut_after:
            self.was_cut = True
            raise _CutOff(self)

    def has_cut(self, error: BaseException) -> bool:
        """Whether a run ended by being cut off: with that itself, with what was made of it, or with an error that followed."""
        if not self.was_cut or isinstance(error, Exception):
            return self.was_cut
        seen: set[int] = set()
        current: BaseException | None = error
        while current is not None and id(current) not in seen:
            if isinstance(current, _CutOff) and current.watch is self:
                return True
            seen.add(id(current))
            current = current.__cause__ or current.__context__
        return False


def _device() -> Device:
    """The accelerator, once something has used it: before, there is nothing to free on it."""
    return device_of(devices_in_use()[-1])


def _sizes(starting: int, effective_batch: int | None) -> Sequence[int]:
    """What may be tried, in ascending order."""
    largest = whole("starting_batch_size", starting, least=0)
    if effective_batch is None:
        return range(1, largest + 1)
    effective = whole("effective_batch", effective_batch)
    return [size for size in range(1, min(largest, effective) + 1) if effective % size == 0]


def _refuse_what_runs_later(function: Callable[..., Any]) -> None:
    if not callable(function):
        raise TypeError(_("{name} is {value!r}, and must be a function.").format(name="function", value=function))
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        text = _("`{name}` is a generator or a coroutine: it returns before it runs, so no error of it could be seen here.")
        raise TypeError(text.format(name=_name(function)))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """As far as they can be told: of some functions in C they cannot."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return []


def _accumulation_keyword(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> str:
    by_name = {one.name for one in parameters[1:] if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}
    for name in _ACCUMULATION:
        if name in by_name:
            return name
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return _ACCUMULATION[0]
    text = _(
        "With effective_batch, `{name}` must be told how many micro-batches make a step, and it takes no parameter for that."
    )
    raise UsageError(
        text.format(name=_name(function)),
        hint=_("Give it a parameter `gradient_accumulation_steps`, and accumulate so many micro-batches in each optimizer step."),
    )


def _refuse_a_batch_size(
    function: Callable[..., Any], parameters: list[inspect.Parameter], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """The commonest slip: to pass the batch size too."""
    if not parameters or any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return
    names = [one.name for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    by_name = bool(names) and names[0] in keywords
    if len(arguments) < len(names) and not by_name:
        return
    rest = dict(zip(names[1:], arguments if by_name else arguments[1:], strict=False))
    rest |= {name: value for name, value in keywords.items() if name not in names[:1]}
    text = _("`{name}` gets its batch size from the decorator, as the first argument. Call it without: `{name}({arguments})`.")
    shown = ", ".join(f"{name}={_short(value)}" for name, value in rest.items())
    raise TypeError(text.format(name=_name(function), arguments=shown))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE and "\n" not in text else "..."


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
