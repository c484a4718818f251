"""Run a loader for real and watch the clock: how long the step waits for each batch, and what a worker takes meanwhile.

Batches are drawn by an order of its own, and every random number generator of this process is left as it was by whoever calls. Workers are
ended before anything returns, whichever way it returns. That a worker cannot start, dies, or never answers is a result here.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from brim.errors import RunError, UsageError
from brim.locale import _
from brim.machine.loading import PREFETCH
from brim.prober.loader_rules import HIDDEN, Weighed

RUN_SECONDS: Final = 1.0
UNSURE: Final = 2.0
"""A run whose wait is within this factor of `HIDDEN` goes on for as many times `RUN_SECONDS`: a hiccup of the machine must not decide."""
MOST_STEPS: Final = 400
FEWEST_STEPS: Final = 4
CACHED: Final = 4
HAND_OVERS: Final = 40
HAND_OVER_REST_SECONDS: Final = 0.01
TIMEOUT_SECONDS: Final = 60.0
TIMEOUT_BATCHES: Final = 30
"""A worker that gives nothing for so long has hung: a minute, or the time of so many batches where that is more."""


class WorkersFailed(Exception):  # noqa: N818 (a result that is caught, not an error that is told)
    """A loader with workers broke; the message is the first line of what was said."""


@dataclass(frozen=True)
class Run:
    """What a loader did to the step: one number for each step after warm-up."""

    workers: int
    prefetch: int | None
    waits: tuple[float, ...]
    steps: tuple[float, ...]
    worker_bytes: int | None = None
    weighed: Weighed = "assumed"
    busy_share: float = 0.0
    """Of one core, on average over the workers."""
    hand_over_seconds: float = 0.0
    """Of each wait, taking over a batch that is there: no number of workers makes it shorter."""

    @property
    def wait_seconds(self) -> float:
        """Mean wait for a batch."""
        return sum(self.waits) / len(self.waits)

    @property
    def step_seconds(self) -> float:
        """Mean of the step itself."""
        return sum(self.steps) / len(self.steps)

    @property
    def seconds(self) -> float:
        """A step with its wait."""
        return self.wait_seconds + self.step_seconds

    @property
    def wait_fraction(self) -> float:
        """The share of the time that the step waits."""
        return self.wait_seconds / self.seconds

    @property
    def is_hidden(self) -> bool:
        """Whether the wait is too small to matter, but for taking the batch over."""
        return (self.wait_seconds - self.hand_over_seconds) / self.seconds < HIDDEN


class Order:
    """Batches of places, without end: of the user's sampler, copied so that its own order stays, or drawn by a generator of its own."""

    def __init__(self, dataset: Any, batch_size: int, seed: int, batch_sampler: Iterable[Any] | None) -> None:
        self.last: list[Any] = []
        """The batch that was given last."""
        self._count, self._batch_size = len(dataset), batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._sampler = None if batch_sampler is None else _copy(batch_sampler, dataset)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._drawn() if self._sampler is None else self._sampled(self._sampler):
            self.last = batch
            yield batch

    def _drawn(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(self._count, (self._batch_size,), generator=self._generator).tolist()

    def _sampled(self, sampler: Iterable[Any]) -> Iterator[list[Any]]:
        while True:
            batch = None
            for batch in sampler:
                yield list(batch)
            if batch is None:
                raise UsageError(_("The batch sampler gives no batch."))


def _copy(sampler: Iterable[Any], dataset: Any) -> Iterable[Any]:
    try:
        return copy.deepcopy(sampler, {id(dataset): dataset})  # the data itself is not copied
    except Exception as error:
        raise UsageError(
            _("The batch sampler cannot be copied, and reading it would change the order of training ({error}).").format(
                error=error
            ),
            hint=_("Leave batch_sampler out: batches of batch_size items are drawn instead."),
        ) from error


class Bench:
    """One data set and one step, to be run with any number of workers."""

    def __init__(
        self, dataset: Any, order: Order | None, batch_size: int, collate: Callable[[Any], Any] | None,
        step: Callable[[Any], object] | None, step_seconds: float, pins: bool, seed: int,
    ) -> None:  # fmt: skip
        self._dataset, self._order, self._batch_size, self._collate = dataset, order, batch_size, collate
        self._step, self._step_seconds, self._pins = step, step_seconds, pins
        self._generator = torch.Generator().manual_seed(seed)
        self._batch_seconds = 0.0
        self._cached: list[Any] = []
        self.batch_bytes = 0
        self.hand_over_seconds = 0.0

    def without_workers(self) -> Run:
        """Batches made in this process. A step that is only stood for need not be: nothing goes on beside it."""
        loader: DataLoader[Any] = DataLoader(self._dataset, **self._settings())
        take = _Taker(loader, iter(loader))

        def taken() -> Any:
            try:
                return take()
            except UsageError:
                raise
            except Exception as error:
                raise self._broken(error) from error

        def step(batch: Any) -> float:
            self._see(batch)
            return self._step_seconds if self._step is None else _timed(self._step, batch)

        for _warm in range(2):
            step(taken())
        waits, steps = _watch(taken, step, unit=1)
        self._batch_seconds = max(waits)
        return Run(0, None, waits, steps)

    def with_workers(self, workers: int, prefetch: int) -> Run:
        """The same with so many workers. Raises `WorkersFailed` where they do not work."""
        step = self._step

        def timed(batch: Any) -> float:
            return _timed(time.sleep, self._step_seconds) if step is None else _timed(step, batch)

        settings = self._settings() | self._for_workers(prefetch)
        with _opened(self._dataset, workers, settings) as (loader, iterator), _as_failure("DataLoader worker"):
            take = _Taker(loader, iterator)

            def taken() -> Any:
                with _as_failure():
                    return take()

            # The first batch of each worker comes late and all at once; from there on the queue is as full as the workers keep it.
            for _warm in range(workers):
                timed(taken())
            scale = _Scale(iterator._workers)  # noqa: SLF001 (nobody else knows them)
            waits, steps = _watch(taken, timed, unit=workers, hand_over_seconds=self.hand_over_seconds)
            return Run(workers, prefetch, waits, steps, *scale.read(), self.hand_over_seconds)

    def weigh_hand_over(self) -> float:
        """Seconds that this process needs to take a batch from a worker that has it ready. Raises `WorkersFailed`."""
        waits = []
        settings = self._for_workers(PREFETCH) | {"batch_size": None, "collate_fn": _as_it_is}
        with _opened(_Again(self._cached[0]), 1, settings) as (_loader, iterator), _as_failure():
            next(iterator)
            for _turn in range(HAND_OVERS):
                time.sleep(HAND_OVER_REST_SECONDS)
                waits.append(_timed(next, iterator))
        self.hand_over_seconds = statistics.median(waits)
        return self.hand_over_seconds

    def replay(self) -> float:
        """Seconds of a step whose data is there already. A step that is only stood for takes what it takes."""
        if self._step is None:
            return self._step_seconds
        batches = itertools.cycle(self._cached)
        step = self._step
        _waits, steps = _watch(lambda: _copied(next(batches)), lambda batch: _timed(step, batch), unit=1)
        return sum(steps) / len(steps)

    def _settings(self) -> dict[str, Any]:
        batches = {"batch_size": self._batch_size} if self._order is None else {"batch_sampler": self._order}
        return {"collate_fn": self._collate, "generator": self._generator, **batches}

    def _for_workers(self, prefetch: int) -> dict[str, Any]:
        return {
            "prefetch_factor": prefetch,
            "generator": self._generator,
            "persistent_workers": True,
            "multiprocessing_context": start_method(),
            "timeout": max(TIMEOUT_SECONDS, TIMEOUT_BATCHES * self._batch_seconds),
            "pin_memory": self._pins and torch.accelerator.is_available(),
        }

    def _see(self, batch: Any) -> None:
        self.batch_bytes = max(self.batch_bytes, tensor_bytes(batch))
        if len(self._cached) < (1 if self._step is None else CACHED):
            self._cached.append(_copied(batch))

    def _broken(self, error: Exception) -> RunError:
        """Which item it was: each of the batch is asked for alone."""
        for place in [] if self._order is None else self._order.last:
            try:
                self._dataset[place]
            except Exception as own:  # noqa: BLE001 (it is told)
                text = _("Item {place} of the data set cannot be read: {error}").format(place=place, error=_line(own))
                return RunError(text, hint=_("Mend that item, or leave it out; dataset[{place}] shows it.").format(place=place))
        return RunError(
            _("A batch of the data set cannot be made: {error}").format(error=_line(error)),
            hint=_("Its items can be read one by one; look at collate_fn.") if self._order is not None else None,
        )


class _Again(Dataset[Any]):
    """One batch, over and over: a loader whose loading takes no time."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return HAND_OVERS + 1

    def __getitem__(self, place: int) -> Any:
        return self._batch


class _Taker:
    """The next batch, from the start again where a stream has ended."""

    def __init__(self, loader: DataLoader[Any], iterator: Iterator[Any]) -> None:
        self._loader, self._iterator = loader, iterator

    def __call__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise UsageError(_("The data set gives no items.")) from None


class _Scale:
    """What the workers take: memory of the heaviest, and their share of a core."""

    def __init__(self, workers: Iterable[Any]) -> None:
        """From now on."""
        self._processes = [psutil.Process(worker.pid) for worker in workers]
        self._since, self._busy_seconds = time.perf_counter(), self._busy()
        self._before = self._heaviest()[0] or 0

    def read(self) -> tuple[int | None, Weighed, float]:
        elapsed = time.perf_counter() - self._since
        share = (self._busy() - self._busy_seconds) / elapsed / len(self._processes)
        heaviest, weighed = self._heaviest()
        return (None if heaviest is None else max(heaviest, self._before)), weighed, min(1.0, max(0.0, share))

    def _busy(self) -> float:
        """Seconds in which they had something to compute, also those in which others had the core; without Linux, only their own."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            texts = [Path(f"/proc/{process.pid}/schedstat").read_text(encoding="ascii") for process in self._processes]
            return sum(int(nanoseconds) for text in texts for nanoseconds in text.split()[:2]) / 1e9
        with contextlib.suppress(psutil.Error):
            return sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return 0.0

    def _heaviest(self) -> tuple[int | None, Weighed]:
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            return max(process.memory_full_info().pss for process in self._processes), "proportional"
        with contextlib.suppress(psutil.Error, OSError):
            return max(process.memory_info().rss for process in self._processes), "resident"
        return None, "assumed"


def _as_it_is(batch: Any) -> Any:
    return batch


def _copied(batch: Any) -> Any:
    """For a step that takes its batch apart; the batch itself where it is of a kind that cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # noqa: BLE001 (whatever kind that is)
        return batch


def start_method() -> str:
    """How workers start where nobody has said how; asking must not settle it for the rest of the program."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def tensor_bytes(batch: Any) -> int:
    """Bytes of all tensors in a batch: those are what goes through shared memory."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, Mapping):
        return sum(tensor_bytes(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return sum(tensor_bytes(value) for value in batch)
    return sum(tensor_bytes(value) for value in vars(batch).values()) if hasattr(batch, "__dict__") else 0


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated."""
    return isinstance(dataset, IterableDataset)


@contextlib.contextmanager
def _opened(dataset: Any, workers: int, settings: dict[str, Any]) -> Iterator[tuple[DataLoader[Any], Any]]:
    """A loader with its workers, which are all gone afterwards: also those of a start that was broken off half-way."""
    others = set(multiprocessing.active_children())
    iterator: Any = None
    try:
        with _as_failure(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own idea of how many workers there should be
            loader: DataLoader[Any] = DataLoader(dataset, num_workers=workers, **settings)
            iterator = iter(loader)
        yield loader, iterator
    finally:
        started = set(multiprocessing.active_children()) - others if iterator is None else iterator._workers  # noqa: SLF001
        try:
            if iterator is not None:
                iterator._shutdown_workers()  # noqa: SLF001 (else only when the last reference goes)
        finally:
            for worker in started:
                if worker.is_alive():
                    worker.kill()
                worker.join()


@contextlib.contextmanager
def _as_failure(start: str = "") -> Iterator[None]:
    """Errors of the workers as a result; with `start`, only those that begin so.

    torch tells of a dead worker wherever this process happens to be, also inside the step.
    """
    try:
        yield
    except (UsageError, WorkersFailed):
        raise
    except Exception as error:
        if not str(error).startswith(start):
            raise
        raise WorkersFailed(_line(error)) from error


def _line(error: Exception) -> str:
    """The line that says what happened: the first, also of an error whose traceback a worker sent."""
    text = str(error)
    _head, _mark, sent = text.partition("Original Traceback")
    told = [line for line in sent.splitlines()[1:] if line and not line.startswith(" ")]
    first = text.strip().partition("\n")[0]
    return told[0] if told else f"{type(error).__name__}: {first}" if first else type(error).__name__


def _timed(call: Callable[[Any], object], argument: Any) -> float:
    start = time.perf_counter()
    call(argument)
    return time.perf_counter() - start


def _watch(
    take: Callable[[], Any], step: Callable[[Any], float], unit: int, hand_over_seconds: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Waits and steps, until they tell: in whole rounds of `unit` batches, because workers that started together come in together."""
    waits: list[float] = []
    steps: list[float] = []
    started = time.perf_counter()
    while True:
        start = time.perf_counter()
        batch = take()
        waits.append(time.perf_counter() - start)
        steps.append(step(batch))
        count, elapsed_seconds = len(waits), time.perf_counter() - started
        if count < max(FEWEST_STEPS, 2 * unit) or count % unit:
            continue
        excess = (sum(waits) - count * hand_over_seconds) / max(sum(waits) + sum(steps), 1e-9)
        is_clear = not HIDDEN / UNSURE < excess < HIDDEN * UNSURE
        if count >= MOST_STEPS or elapsed_seconds >= RUN_SECONDS * (1 if is_clear else UNSURE):
            return tuple(waits), tuple(steps)
