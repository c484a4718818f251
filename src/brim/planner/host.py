"""The host's side of a plan: worker processes, batches made ahead, pinned memory, and what offloading may take.

Host memory is a budget like the card's. One training process for each GPU comes first, with what training itself keeps on the host; a
reserve stays free, because the kernel kills whoever asks for the last byte; workers get what is left, and none where nothing is left. A
worker is a process of its own: it costs the same whether it carries images or token ids. Token ids are cheap to make, so a few workers hide
them, and what binds is the memory of the processes and hardly ever the bytes of the batches.

`num_workers` is what torch calls it: the workers of *each* rank's DataLoader. A worker sleeps until its batch is asked for (32 rows of 512
ids took one 8 ms of CPU time, where a step takes hundreds), so ranks may share cores: a rank gets at most as many workers as there are
cores, and all ranks together at most `WORKERS_PER_CORE` for each core. Nothing here touches the effective batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from brim.locale import _
from brim.machine.loading import PINNED_FACTOR, PREFETCH, WORKER_BYTES, WORKERS_PER_CORE, reserve_bytes
from brim.sizes import GIB, format_bytes

PROCESS_BYTES = 9 * GIB // 4
"""What a training process holds on the host. torch with a live CUDA context: 2,056,600 kB on an RTX 3090 (pytorch#113326), ~2 GB also for
another framework (tensorflow#36459), 1.3-1.6 GB on T4 (traceml#401); transformers, datasets and peft: 252 MiB more, measured."""

CPU_PROCESS_BYTES = 3 * GIB // 4
"""The same without CUDA: 564 MiB resident with a loader running, measured, and room for oneDNN's buffers."""

MOST_WORKERS = 4
"""For each rank. Where workers fill a bounded queue (M/M/1/K) and the step may wait 2 % of its time, 4 hide a loader that needs twice
the time of a step, and 2 one that keeps pace with it. A few measured steps say more than any rule."""

UNKNOWN_HOST_WORKERS = 2


@dataclass(frozen=True)
class HostSide:
    """How the DataLoader of each rank should be set up, and why."""

    num_workers: int
    """Worker processes of each rank."""
    prefetch_factor: int | None
    """Batches that each worker makes ahead; None without workers."""
    pin_memory: bool
    host_bytes: int
    """What all processes on this host hold at most, the reserve not counted."""
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Loader:
    workers: int
    prefetch: int
    pinned: bool

    def shared_bytes(self, batch_bytes: int) -> int:
        """In /dev/shm: every batch that a worker has made and nobody has taken."""
        return self.workers * self.prefetch * batch_bytes

    def pinned_bytes(self, batch_bytes: int) -> int:
        """Pinned copies of all of them, and of the one in use."""
        return (self.workers * self.prefetch + 1) * batch_bytes * PINNED_FACTOR if self.pinned else 0


@dataclass(frozen=True)
class _Budget:
    """What there is, and what is asked of it. None: not known."""

    available_bytes: int | None
    shm_bytes: int | None
    ranks: int
    batch_bytes: int
    worker_bytes: int
    process_bytes: int
    held_bytes: int

    @property
    def training_bytes(self) -> int:
        """All training processes, a batch in the hands of each, and what training keeps on the host."""
        return self.ranks * (self.process_bytes + self.batch_bytes) + self.held_bytes

    def bytes_with(self, loader: _Loader) -> int:
        batch = self.batch_bytes
        each = loader.workers * self.worker_bytes + loader.shared_bytes(batch) + loader.pinned_bytes(batch)
        return self.training_bytes + self.ranks * each

    def memory_holds(self, loader: _Loader) -> bool:
        if self.available_bytes is None:
            return True
        return self.bytes_with(loader) + reserve_bytes(self.available_bytes) <= self.available_bytes

    def shm_holds(self, loader: _Loader) -> bool:
        return self.shm_bytes is None or self.ranks * loader.shared_bytes(self.batch_bytes) <= self.shm_bytes

    def holds(self, loader: _Loader) -> bool:
        return self.memory_holds(loader) and self.shm_holds(loader)


_NO_WORKERS = _Loader(0, 0, pinned=False)


def host_side(
    *,
    available_bytes: int | None,
    cores: float | None,
    ranks: int,
    batch_bytes: int,
    shm_bytes: int | None = None,
    dataset_bytes: int = 0,
    held_bytes: int = 0,
    device: Literal["cpu", "cuda"] = "cuda",
) -> HostSide:
    """Workers, prefetching and pinning for `ranks` processes on one host, within `available_bytes`.

    `batch_bytes` are those of one micro-batch as the loader hands it over. `dataset_bytes` is data that a process keeps as Python objects,
    which every worker comes to copy: 0 for Arrow tables and other mapped files. `held_bytes` is what training keeps on this host in all:
    offloaded state, or the whole step where the device is the CPU. None means not known, and is said.
    """
    budget = _Budget(
        available_bytes=available_bytes,
        shm_bytes=shm_bytes,
        ranks=ranks,
        batch_bytes=batch_bytes,
        worker_bytes=WORKER_BYTES + dataset_bytes,
        process_bytes=(PROCESS_BYTES if device == "cuda" else CPU_PROCESS_BYTES) + dataset_bytes,
        held_bytes=held_bytes,
    )
    is_known = available_bytes is not None and cores is not None
    most = 0 if device == "cpu" else _most_workers(cores, ranks, MOST_WORKERS if is_known else UNKNOWN_HOST_WORKERS)
    wanted = [_Loader(count, PREFETCH, pinned=True) for count in range(most, 0, -1)]
    last = [_Loader(1, 1, pinned=False)] if most else []
    choices = [*wanted, *last, _NO_WORKERS]
    index = next((index for index, loader in enumerate(choices) if budget.holds(loader)), len(choices) - 1)
    chosen, refused = choices[index], choices[index - 1] if index else None
    return HostSide(
        num_workers=chosen.workers,
        prefetch_factor=chosen.prefetch or None,
        pin_memory=chosen.pinned,
        host_bytes=budget.bytes_with(chosen),
        reasons=_reasons(budget, chosen, refused, cores, device),
        assumptions=_assumptions(available_bytes, cores),
        warnings=_warnings(budget),
    )


def offload_fits(host_bytes_needed: int, available_bytes: int | None, ranks: int) -> bool:
    """Whether this host has room for offloaded state of all its ranks, beside their processes and the reserve."""
    return _missing_for_offload(host_bytes_needed, available_bytes, ranks) == 0


def offload_refusal(host_bytes_needed: int, available_bytes: int | None, ranks: int) -> str | None:
    """The sentence that says why offloaded state has no room; None where it has."""
    missing = _missing_for_offload(host_bytes_needed, available_bytes, ranks)
    if available_bytes is None:
        return _("Offloading is not tried, because the host's memory is not known: say it with --host-memory.")
    if missing == 0:
        return None
    return _(
        "Offloading needs {needed} of host memory beside {processes} for {ranks} training processes and {reserve} that stays free; "
        "{available} is there, {missing} too little."
    ).format(
        needed=format_bytes(host_bytes_needed),
        processes=format_bytes(ranks * PROCESS_BYTES),
        ranks=ranks,
        reserve=format_bytes(reserve_bytes(available_bytes)),
        available=format_bytes(available_bytes),
        missing=format_bytes(missing or 0),
    )


def _missing_for_offload(needed: int, available: int | None, ranks: int) -> int | None:
    if available is None:
        return None
    return max(0, needed + ranks * PROCESS_BYTES + reserve_bytes(available) - available)


def _most_workers(cores: float | None, ranks: int, most: int) -> int:
    if cores is None:
        return most
    return min(most, int(cores), int(cores * WORKERS_PER_CORE) // ranks)


def _reasons(
    budget: _Budget, chosen: _Loader, refused: _Loader | None, cores: float | None, device: Literal["cpu", "cuda"]
) -> tuple[str, ...]:
    if device == "cpu":
        return (
            _("num_workers is 0, because the step itself runs on the CPU's cores: a worker would take one from it."),
            _("pin_memory is off, because nothing is copied to a card."),
        )
    workers = _why_workers(budget, chosen, refused, cores)
    if not chosen.workers:
        return workers, _(
            "pin_memory is off, because without workers the training process would make each pinned copy itself, and wait."
        )
    return workers, _why_prefetch(budget, chosen), _why_pinning(budget, chosen)


def _why_workers(budget: _Budget, chosen: _Loader, refused: _Loader | None, cores: float | None) -> str:
    if refused is None:
        return _why_no_more_workers(budget, chosen, cores)
    if not budget.memory_holds(refused):
        return _why_memory(budget, chosen, refused)
    return _(
        "num_workers is {count} for each rank, because more batches than that do not fit in the {shm} of /dev/shm, one being {batch}; in a "
        "container, --shm-size gives more."
    ).format(count=chosen.workers, shm=format_bytes(budget.shm_bytes or 0), batch=format_bytes(budget.batch_bytes))


def _why_no_more_workers(budget: _Budget, chosen: _Loader, cores: float | None) -> str:
    """Neither memory nor /dev/shm said no: what is asked for, or what the cores allow."""
    values = {"count": chosen.workers, "bytes": format_bytes(budget.bytes_with(chosen) - budget.training_bytes)}
    if chosen.workers == MOST_WORKERS:
        return _(
            "num_workers is {count} for each rank, because that hides a loader that takes twice as long as a step, and token ids take far "
            "less; all workers and their batches take {bytes} of host memory."
        ).format(**values)
    if cores is None or (budget.available_bytes is None and chosen.workers == UNKNOWN_HOST_WORKERS):
        return _(
            "num_workers is {count} for each rank, because that hides a loader that keeps pace with the step, and token ids are quickly "
            "made; all workers and their batches take {bytes} of host memory."
        ).format(**values)
    return _(
        "num_workers is {count} for each rank (ranks: {ranks}), because of the number of cores, {cores}: a rank gets at most as many "
        "workers, and all ranks together {each} for each core."
    ).format(**values, ranks=budget.ranks, cores=f"{cores:g}", each=WORKERS_PER_CORE)


def _why_memory(budget: _Budget, chosen: _Loader, refused: _Loader) -> str:
    assert budget.available_bytes is not None
    reserve = reserve_bytes(budget.available_bytes)
    values = {
        "count": chosen.workers,
        "ranks": budget.ranks,
        "available": format_bytes(budget.available_bytes),
        "training": format_bytes(budget.training_bytes),
        "reserve": format_bytes(reserve),
        "left": format_bytes(max(0, budget.available_bytes - reserve - budget.training_bytes)),
        "more": refused.workers,
        "prefetch": refused.prefetch,
        "needed": format_bytes(budget.bytes_with(refused) - budget.training_bytes),
    }
    if chosen.workers:
        return _(
            "num_workers is {count} for each rank (ranks: {ranks}), because of {available} of host memory training takes {training} and "
            "{reserve} stays free: {left} is left, and num_workers {more} with prefetch_factor {prefetch} would take {needed}."
        ).format(**values)
    return _(
        "num_workers is 0, because host memory is short: of {available} training takes {training} and {reserve} stays free. {left} is "
        "left, and one worker for each rank (ranks: {ranks}) would take {needed}."
    ).format(**values)


def _why_prefetch(budget: _Budget, chosen: _Loader) -> str:
    return _(
        "prefetch_factor is {prefetch}, because that keeps a batch waiting while the next is made; the batches that wait take {shared} of "
        "shared memory over all ranks."
    ).format(prefetch=chosen.prefetch, shared=format_bytes(budget.ranks * chosen.shared_bytes(budget.batch_bytes)))


def _why_pinning(budget: _Budget, chosen: _Loader) -> str:
    if not chosen.pinned:
        return _("pin_memory is off, because pinned copies of the batches have no room.")
    pinned = format_bytes(budget.ranks * chosen.pinned_bytes(budget.batch_bytes))
    return _(
        "pin_memory is on, because a thread then makes the pinned copies and the card fetches them beside the computation; they take at "
        "most {pinned} over all ranks."
    ).format(pinned=pinned)


def _assumptions(available_bytes: int | None, cores: float | None) -> tuple[str, ...]:
    said = []
    if available_bytes is None:
        said.append(
            _(
                "The host's memory is not known and counts as enough for {count} workers on each rank; --host-memory says it."
            ).format(count=UNKNOWN_HOST_WORKERS)
        )
    if cores is None:
        said.append(
            _(
                "The host's cores are not known and count as enough for {count} workers on each rank; --host-cores says it."
            ).format(count=UNKNOWN_HOST_WORKERS)
        )
    return tuple(said)


def _warnings(budget: _Budget) -> tuple[str, ...]:
    available = budget.available_bytes
    if available is None or budget.training_bytes <= available:
        return ()
    return (
        _(
            "Training takes about {training} of host memory even without workers, and {available} is there: the kernel may kill it."
        ).format(training=format_bytes(budget.training_bytes), available=format_bytes(available)),
    )
