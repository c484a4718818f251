"""The loader tuner: real workers, real waits. The fewest workers that hide the loading, never more than the host allows, none left behind."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from brim.errors import RunError, UsageError
from brim.machine.budget import run
from brim.machine.loading import PREFETCH, reserve_bytes
from brim.prober import loader_runs
from brim.prober.loader import _Tuner, tune_loader
from brim.prober.loader_rules import HIDDEN, MORE_PREFETCH, Limits, duration, percent, predicted_wait, variation, workers_needed
from brim.prober.loader_runs import Run, WorkersFailed, tensor_bytes
from brim.records.measurements import LoaderSettings
from brim.sizes import GIB, MIB
from tests.clock import by_the_clock
from tests.prober.loading import (
    BUS_ERROR,
    Broken,
    BrokenInWorkers,
    Busy,
    Noted,
    Random,
    Slow,
    Stream,
    Wide,
    fake_host,
    tune_noted,
)

STEP = 0.05


@pytest.fixture(autouse=True)
def _short_runs_and_nobody_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader_runs, "RUN_SECONDS", 0.3)
    monkeypatch.setattr(loader_runs, "HAND_OVERS", 15)
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def tuned(dataset: Any, **more: Any) -> LoaderSettings:
    if "step" not in more:
        more.setdefault("step_seconds", STEP)
    settings: dict[str, Any] = {"batch_size": 8, "host": fake_host()} | more
    return tune_loader(dataset, **settings)


def never_more_than_one(alive: list[str]) -> None:
    """How many workers lived when each was born. A bound that no clock excuses: it fails at the first attempt."""
    if set(alive) != {"1"}:
        pytest.fail(f"workers that lived at once: {sorted(alive)}")


def none_is_taken(settings: LoaderSettings) -> None:
    """Workers that do not work are never taken, however the clock ran."""
    if settings.num_workers:
        pytest.fail(f"{settings.num_workers} workers were taken")


@by_the_clock
def test_items_that_take_no_time_need_no_worker() -> None:
    settings = tuned(Slow(0))
    assert (settings.num_workers, settings.prefetch_factor, settings.pin_memory) == (0, None, False)
    assert settings.wait_fraction is not None
    assert settings.wait_fraction < HIDDEN
    assert settings.reasons[0].startswith("num_workers is 0, because a batch takes ")
    assert settings.reasons[1].startswith("With no loading at all a step would take 50 ms; now it takes 50")
    assert "takes cores from the workers, and that is not seen" in settings.reasons[2]


@by_the_clock
def test_a_loader_that_nearly_keeps_pace_gets_one_worker_or_two() -> None:
    said: list[str] = []
    settings = tuned(Slow(0.005), say=said.append)
    assert 1 <= settings.num_workers <= 3
    assert settings.prefetch_factor == PREFETCH
    assert settings.wait_fraction is not None
    assert settings.wait_fraction < 0.4 / 2, "without workers it is more than 0.4"
    assert said[0].startswith("num_workers 0: a step takes 50 ms and waits ")
    assert said[1].startswith("num_workers 1: ")


@pytest.mark.slow
@by_the_clock
def test_workers_that_only_wait_may_share_a_core_and_a_slow_loader_gets_all_that_are_allowed() -> None:
    settings = tuned(Slow(0.04), batch_size=4, step_seconds=STEP / 2, host=fake_host(cores=2))
    assert settings.num_workers == 4
    assert settings.wait_fraction is not None
    assert settings.wait_fraction < 0.6, "without workers it is more than 0.86"
    assert settings.reasons[0].startswith("num_workers is 4, which does not hide the loading")
    assert settings.reasons[1].startswith("The 2 cores hold num_workers at 4: ")


@pytest.mark.slow
@by_the_clock
def test_with_eight_cores_the_same_items_are_hidden() -> None:
    settings = tuned(Slow(0.04), batch_size=2, step_seconds=STEP / 2)
    assert 3 <= settings.num_workers <= 9
    assert settings.wait_fraction is not None
    assert settings.wait_fraction < 0.3, "without workers it is more than 0.76"


@by_the_clock
def test_workers_that_compute_get_a_core_each() -> None:
    settings = tuned(Busy(0.01), host=fake_host(cores=1))
    assert settings.num_workers <= 1
    assert "The 1 cores hold num_workers at 1" in " ".join(settings.reasons)


@by_the_clock
def test_where_memory_allows_one_worker_two_never_exist(tmp_path: Path) -> None:
    held = 256 * MIB
    # In a process of its own: what a forked worker takes depends on what its parent holds, and this one has run other tests.
    outcome = run(tune_noted, tmp_path, held, GIB + 2 * held, preload=("torch", "brim.prober.loader"), timeout_seconds=120)
    settings = outcome.unwrap()
    lived = [path.read_text() for path in tmp_path.iterdir()]
    assert lived
    never_more_than_one(lived)
    assert settings.num_workers == 1
    assert any(
        reason.startswith("Memory holds num_workers at 1: 1.50 GiB is free, 1.00 GiB of it stays free")
        for reason in settings.reasons
    )


def test_a_worker_that_turns_out_too_heavy_is_not_kept(tmp_path: Path) -> None:
    settings = tuned(Noted(tmp_path, 0.02, 256 * MIB), host_memory=GIB + 200 * MIB)
    assert settings.num_workers == 0
    assert [path.read_text() for path in tmp_path.iterdir()] == ["1"]
    assert settings.reasons[1].startswith("Memory holds num_workers at 0: ")


@pytest.mark.parametrize("host_memory", ["1GiB", GIB + 8 * MIB])
def test_where_memory_allows_no_worker_none_is_started_not_even_to_be_weighed(tmp_path: Path, host_memory: int | str) -> None:
    settings = tuned(Noted(tmp_path, 0.01), host_memory=host_memory)
    assert settings.num_workers == 0
    assert list(tmp_path.iterdir()) == []
    assert "is assumed to take" in settings.reasons[1]


def test_shared_memory_is_counted_in_batches_in_flight() -> None:
    none = tuned(Wide(0.01), batch_size=2, host=fake_host(shm_bytes=40 * MIB))
    assert none.num_workers == 0
    assert none.reasons[1].startswith("/dev/shm holds num_workers at 0: 40.0 MiB is free there, and a batch takes 16.0 MiB")
    one = tuned(Wide(0.04), batch_size=2, host=fake_host(shm_bytes=64 * MIB))
    assert one.num_workers <= 1


@by_the_clock
def test_an_upper_limit_of_ones_own_holds(tmp_path: Path) -> None:
    settings = tuned(Noted(tmp_path, 0.02), most_workers=1)
    lived = [path.read_text() for path in tmp_path.iterdir()]
    assert lived
    never_more_than_one(lived)
    assert settings.num_workers == 1
    assert "most_workers holds num_workers at 1." in settings.reasons


def test_an_upper_limit_of_none_holds() -> None:
    assert tuned(Slow(0.01), most_workers=0).reasons[1] == "most_workers holds num_workers at 0."


@by_the_clock
def test_pinning_is_for_accelerators_with_workers() -> None:
    settings = tuned(Slow(0.005), device="cuda", most_workers=1)
    assert settings.pin_memory
    assert any(reason.startswith("pin_memory is on, because") for reason in settings.reasons)
    assert not any("stood for" in reason for reason in settings.reasons)


def test_nothing_is_pinned_without_workers_or_for_devices_that_cannot_use_it() -> None:
    assert not tuned(Slow(0.01), device="cuda", most_workers=0).pin_memory
    assert not tuned(Slow(0.005), device="mps", most_workers=1).pin_memory


@pytest.mark.parametrize("signal_number", [None, BUS_ERROR], ids=["error", "bus error"])
@by_the_clock
def test_workers_that_do_not_work_are_a_result(signal_number: int | None) -> None:
    settings = tuned(BrokenInWorkers(0.005, signal_number))
    none_is_taken(settings)
    said = "ValueError: this handle" if signal_number is None else "RuntimeError: DataLoader worker (pid"
    assert settings.reasons[1].startswith(f"A failure holds num_workers at 0; with 1 it was: {said}")
    assert "\n" not in settings.reasons[1]


@pytest.mark.slow
@by_the_clock
def test_where_more_workers_fail_fewer_are_taken() -> None:
    settings = tuned(BrokenInWorkers(0.02, first_workers=1))
    assert settings.num_workers == 1
    assert settings.reasons[1] == "A failure holds num_workers at 1; with 2 it was: ValueError: this handle"


@by_the_clock
def test_a_data_set_that_no_fresh_process_can_receive_gets_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Slow):
        pass

    monkeypatch.setattr(loader_runs, "start_method", lambda: "spawn")
    settings = tuned(Local(0.01))
    none_is_taken(settings)
    assert "with 1 it was: " in settings.reasons[1]
    assert "pickle" in settings.reasons[1]


def test_an_item_that_cannot_be_read_is_named() -> None:
    with pytest.raises(RunError, match="Item 7 of the data set cannot be read: ValueError: no picture\n") as caught:
        tuned(Broken(0), batch_sampler=[[1, 2], [3, 7], [4, 5]])
    assert caught.value.hint == "Mend that item, or leave it out; dataset[7] shows it."


def test_a_batch_that_cannot_be_collated_is_told() -> None:
    def collate(items: list[Any]) -> Any:
        raise TypeError("ragged")

    with pytest.raises(RunError, match="A batch of the data set cannot be made: TypeError: ragged"):
        tuned(Slow(0), collate_fn=collate)


def test_random_numbers_and_the_order_of_training_are_as_before() -> None:
    sampler_generator = torch.Generator().manual_seed(5)

    def state() -> list[Any]:
        numpy: Any = np.random.get_state()
        own = [generator.get_state().tolist() for generator in (torch.default_generator, sampler_generator)]
        return [random.getstate(), numpy[1].tobytes(), numpy[2], *own]

    dataset = Random(0.005)
    sampler = BatchSampler(RandomSampler(dataset, generator=sampler_generator), 4, drop_last=True)
    before = state()
    tuned(dataset, batch_sampler=sampler, step=lambda _batch: torch.rand(100).sum(), most_workers=1)
    assert state() == before


def test_the_users_batches_are_those_that_are_read() -> None:
    seen: list[list[int]] = []

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        seen.append([int(item[0]) for item in items])
        return torch.stack(items)

    tuned(Slow(0), batch_sampler=[[1, 2], [3], [5, 6]], collate_fn=collate)
    assert seen[:4] == [[1, 2], [3], [5, 6], [1, 2]]


def test_a_sampler_that_cannot_be_copied_is_refused_rather_than_used_up() -> None:
    order = ([place] for place in range(100))
    with pytest.raises(UsageError, match="cannot be copied"):
        tuned(Slow(0), batch_sampler=order)
    assert next(order) == [0]


@by_the_clock
def test_a_data_set_smaller_than_a_batch_is_gone_through_again_and_again() -> None:
    assert tuned(Slow(0, count=3)).num_workers == 0


def test_a_real_step_is_timed_and_may_take_its_batch_apart() -> None:
    def step(batch: dict[str, torch.Tensor]) -> None:
        labels = batch.pop("label")
        for _turn in range(20):
            torch.ones(200, 200) @ torch.ones(200, 200)
        assert labels.shape == (2, 16)

    settings = tuned(Wide(0), batch_size=2, step=step, most_workers=1)
    assert settings.wait_fraction is not None
    assert settings.reasons[-1].startswith("With no loading at all a step would take ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_the_step_raises_comes_out_and_no_worker_stays(error: type[BaseException]) -> None:
    before = set(multiprocessing.active_children())

    def step(_batch: Any) -> None:
        if set(multiprocessing.active_children()) - before:
            raise error

    with pytest.raises(error):
        tuned(Slow(0.05), step=step)


def test_a_stream_gets_no_worker_unless_it_says_that_it_divides() -> None:
    settings = tuned(Stream(0.005), batch_size=4)
    assert settings.num_workers == 0
    assert settings.reasons[1].startswith("num_shards of the data set, which is a stream, holds num_workers at 0: ")
    assert tuned(Stream(0.005, num_shards=1), batch_size=4).num_workers <= 1


class Empty(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("dataset", "more", "said"),
    [
        (Slow(0), {"step_seconds": None}, "either step or step_seconds"),
        (Slow(0), {"step": print, "step_seconds": 1.0}, "either step or step_seconds"),
        (Slow(0), {"step_seconds": 0.0}, "step_seconds is 0.0"),
        (Slow(0), {"step_seconds": float("nan")}, "step_seconds is nan"),
        (Slow(0), {"batch_size": 0}, "batch_size is 0"),
        (Slow(0), {"most_workers": -1}, "most_workers is -1"),
        (Slow(0), {"device": "toaster"}, "'toaster' is no device"),
        (Slow(0), {"host_memory": "much"}, "'much' is not a size"),
        (Slow(0, count=0), {}, "The data set is empty"),
        (Slow(0), {"batch_sampler": []}, "gives no batch"),
        (iter([1, 2]), {}, "no length or no numbered items"),
        (Stream(0), {"batch_sampler": [[1]]}, "takes no batch_sampler"),
        (Empty(0), {}, "gives no items"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_meant_is_refused(dataset: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tuned(dataset, **more)


class Simulated:
    """A bench on paper: the step waits as in a queue whose sides are random, or for spikes that only a longer queue hides."""

    def __init__(
        self, batch_seconds: float, *, hand_over_seconds: float = 0.0, breaks_at: int = 10**6, spiky: bool = False
    ) -> None:
        self.batch_seconds, self.hand_over_seconds, self.breaks_at, self.spiky = (
            batch_seconds,
            hand_over_seconds,
            breaks_at,
            spiky,
        )
        self.batch_bytes = 0
        self.asked: list[tuple[int, int]] = []

    def without_workers(self) -> Run:
        waits = (0.0, 2 * self.batch_seconds) if self.spiky else (self.batch_seconds,)
        return Run(0, None, waits, (1.0,))

    def weigh_hand_over(self) -> float:
        return self.hand_over_seconds

    def with_workers(self, workers: int, prefetch: int) -> Run:
        self.asked.append((workers, prefetch))
        if workers >= self.breaks_at:
            raise WorkersFailed("RuntimeError: no")
        share = predicted_wait(1.0, self.batch_seconds, workers, prefetch)
        wait = share / (1 - share) + self.hand_over_seconds
        return Run(workers, prefetch, (wait,), (1.0,), 100 * MIB, "proportional", 0.0, self.hand_over_seconds)

    def replay(self) -> float:
        return 1.0


def search(bench: Simulated, **limits: Any) -> tuple[Run, LoaderSettings]:
    values = {"cores": 1000.0, "quota_cores": None, "free_bytes": 1000 * GIB, "shm_bytes": None} | limits
    tuner = _Tuner(bench, Limits(**values), lambda _line: None)  # type: ignore[arg-type]
    run = tuner.chosen()
    return run, tuner.settings(run)


@given(st.floats(0.001, 20), st.integers(0, 12), st.integers(1, 30))
def test_the_search_asks_for_no_more_than_allowed_and_takes_the_fewest_that_hide(
    batch: float, asked: int, breaks_at: int
) -> None:
    bench = Simulated(batch, breaks_at=breaks_at)
    run, settings = search(bench, asked=asked)
    assert all(workers <= asked for workers, _prefetch in bench.asked)
    assert settings.num_workers == run.workers <= min(asked, breaks_at - 1)
    allowed = range(1, min(asked, breaks_at - 1) + 1)
    hiding = [count for count in allowed if predicted_wait(1.0, batch, count) < HIDDEN]
    if batch / (1 + batch) < HIDDEN:
        assert run.workers == 0
    elif hiding:
        assert run.workers == hiding[0]
        assert run.is_hidden
    assert len(settings.reasons) == len(set(settings.reasons))


def test_a_hand_over_that_takes_longer_than_the_batch_means_no_worker() -> None:
    bench = Simulated(0.1, hand_over_seconds=0.2)
    run, settings = search(bench)
    assert (run.workers, bench.asked) == (0, [])
    assert settings.reasons[0].startswith(
        "num_workers is 0, because taking a batch from a worker takes 200 ms and making it here 100 ms"
    )
    assert len(settings.reasons) == 2


def test_the_hand_over_is_not_blamed_on_the_number_of_workers() -> None:
    run, settings = search(Simulated(1.0, hand_over_seconds=0.05))
    assert run.workers == 2
    assert settings.wait_fraction == pytest.approx(0.062, abs=0.001)
    assert "50 ms each for taking over a batch, which more workers do not shorten" in settings.reasons[0]


def test_a_longer_queue_is_tried_only_where_batches_differ_and_taken_only_where_it_helps() -> None:
    regular = Simulated(2.0)
    assert search(regular)[0].prefetch == PREFETCH
    assert all(prefetch == PREFETCH for _workers, prefetch in regular.asked)
    run, settings = search(Simulated(2.0, spiky=True))
    assert (run.workers, run.prefetch) == (3, MORE_PREFETCH)
    assert any(
        reason.startswith("prefetch_factor is 4, because the times of batches differ by 100 %") for reason in settings.reasons
    )
    run, settings = search(Simulated(1.0, spiky=True))
    assert (run.workers, run.prefetch) == (2, PREFETCH)
    assert any("but 4 left a wait of " in reason for reason in settings.reasons)


@pytest.mark.parametrize(("ratio", "workers"), [(1, 2), (2, 4), (4, 5), (8, 9)])
def test_the_queue_says_how_many_workers_a_batch_of_so_many_steps_needs(ratio: float, workers: int) -> None:
    assert workers_needed(1.0, ratio, 100) == workers
    assert workers_needed(1.0, ratio, workers - 1) == workers - 1


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.integers(1, 64), st.sampled_from([PREFETCH, MORE_PREFETCH]))
def test_the_predicted_wait_is_a_share_that_falls_with_more_workers(
    step: float, batch: float, workers: int, prefetch: int
) -> None:
    wait = predicted_wait(step, batch, workers, prefetch)
    assert 0 <= wait <= 1
    assert predicted_wait(step, batch, workers + 1, prefetch) <= wait + 1e-9


LIMITS: Callable[..., st.SearchStrategy[Limits]] = lambda: st.builds(  # noqa: E731
    Limits,
    cores=st.floats(0.1, 64), quota_cores=st.none(), free_bytes=st.integers(0, 64 * GIB),
    shm_bytes=st.one_of(st.none(), st.integers(0, 8 * GIB)), batch_bytes=st.integers(0, 512 * MIB),
    worker_bytes=st.integers(MIB, 4 * GIB), busy_share=st.floats(0, 1), pinned=st.booleans(),
    asked=st.one_of(st.none(), st.integers(0, 32)),
)  # fmt: skip


@given(LIMITS(), st.sampled_from([PREFETCH, MORE_PREFETCH]))
def test_as_many_workers_as_are_allowed_fit_in_memory_and_shared_memory(limits: Limits, prefetch: int) -> None:
    most, bound = limits.most(prefetch)
    batches = most * prefetch + 1
    if most:
        needed = most * limits.worker_bytes + batches * limits.batch_bytes
        assert needed + reserve_bytes(limits.free_bytes) <= limits.free_bytes
        assert limits.shm_bytes is None or batches * limits.batch_bytes <= limits.shm_bytes or not limits.batch_bytes
        assert most <= max(1, 2 * limits.cores)
    assert limits.why(bound, most).count("{") == 0


def test_a_worker_whose_memory_cannot_be_read_counts_as_a_fresh_process() -> None:
    limits = Limits(cores=8, quota_cores=2.0, free_bytes=3 * GIB, shm_bytes=None).weigh(None, "assumed", 0.1)
    assert (limits.worker_bytes, limits.most()) == (512 * MIB, (4, "memory"))
    assert "one worker is assumed to take 512 MiB" in limits.why("memory", 4)
    assert "(resident, measured)" in limits.weigh(GIB, "resident", 0.1).why("memory", 2)


def test_small_things() -> None:
    assert [duration(seconds) for seconds in (2.5, 0.0512, 0.0000427)] == ["2.5 s", "51.2 ms", "42.7 µs"]
    assert [percent(share) for share in (0.0131, 0.4)] == ["1.3 %", "40 %"]
    assert variation([1, 1, 1]) == variation([0.0]) == 0
    assert tensor_bytes({"a": [torch.zeros(3, dtype=torch.int64)], "b": (torch.zeros(2), "text")}) == 32
