"""The host's side: never more memory than there is, never fewer workers for more of anything, and a because for each number."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from brim.machine.loading import reserve_bytes
from brim.planner.host import (
    MOST_WORKERS,
    PROCESS_BYTES,
    UNKNOWN_HOST_WORKERS,
    HostSide,
    host_side,
    offload_fits,
    offload_refusal,
)
from brim.sizes import GIB, MIB

GB = 10**9
TOKEN_BATCH = 48 * 512 * 3 * 8

HOSTS: Any = st.fixed_dictionaries(
    {
        "available_bytes": st.integers(0, 256 * GIB),
        "cores": st.floats(0.1, 128),
        "ranks": st.integers(1, 8),
        "batch_bytes": st.integers(1, 512 * MIB),
        "shm_bytes": st.one_of(st.none(), st.integers(0, 64 * GIB)),
        "dataset_bytes": st.sampled_from([0, GIB]),
        "held_bytes": st.integers(0, 64 * GIB),
    }
)


def _two_gpus(available_bytes: int | None, cores: float | None = 4, **more: Any) -> HostSide:
    return host_side(available_bytes=available_bytes, cores=cores, ranks=2, batch_bytes=TOKEN_BATCH, **more)


def test_13_gb_4_cores_and_2_gpus_get_4_workers_prefetch_2_and_pinning() -> None:
    side = _two_gpus(13 * GB)
    assert (side.num_workers, side.prefetch_factor, side.pin_memory) == (4, 2, True)
    assert not side.warnings
    assert not side.assumptions


def test_6_gb_gets_neither_workers_nor_pinning_and_says_why() -> None:
    side = _two_gpus(6 * GB)
    assert (side.num_workers, side.prefetch_factor, side.pin_memory) == (0, None, False)
    assert "host memory is short" in side.reasons[0]
    assert "5.59 GiB" in side.reasons[0]
    assert not side.warnings


def test_10_gb_lies_between_and_says_why() -> None:
    side = _two_gpus(10 * GB)
    assert 1 <= side.num_workers < 4
    assert side.pin_memory
    assert "9.31 GiB of host memory" in side.reasons[0]


def test_memory_that_does_not_even_hold_the_training_processes_is_a_warning() -> None:
    side = _two_gpus(4 * GB)
    assert side.num_workers == 0
    assert "3.73 GiB" in side.warnings[0]


def test_an_unknown_host_gets_modest_defaults_and_the_assumption_is_said() -> None:
    side = _two_gpus(None, None)
    assert (side.num_workers, side.prefetch_factor, side.pin_memory) == (UNKNOWN_HOST_WORKERS, 2, True)
    assert len(side.assumptions) == 2
    assert "--host-memory" in side.assumptions[0]
    assert "--host-cores" in side.assumptions[1]


def test_known_memory_decides_also_where_the_cores_are_unknown() -> None:
    assert _two_gpus(13 * GB, None).num_workers == UNKNOWN_HOST_WORKERS
    short = _two_gpus(6 * GB, None)
    assert short.num_workers == 0
    assert not short.pin_memory


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(0.5, 1, 0), (1, 1, 1), (2, 1, 2), (64, 1, 4), (4, 8, 1), (3, 8, 0)])
def test_cores_limit_the_workers_of_a_rank_and_of_all_ranks(cores: float, ranks: int, workers: int) -> None:
    side = host_side(available_bytes=512 * GIB, cores=cores, ranks=ranks, batch_bytes=TOKEN_BATCH)
    assert side.num_workers == workers
    assert workers == MOST_WORKERS or f"cores, {cores:g}" in side.reasons[0]


def test_dockers_64_mib_of_shared_memory_suffice_for_token_ids() -> None:
    assert _two_gpus(64 * GB, shm_bytes=64 * MIB).num_workers == 4


def test_large_batches_in_little_shared_memory_mean_fewer_workers_and_it_says_so() -> None:
    some = host_side(available_bytes=64 * GB, cores=8, ranks=1, batch_bytes=10 * MIB, shm_bytes=64 * MIB)
    assert some.num_workers == 3
    assert "/dev/shm" in some.reasons[0]
    none = host_side(available_bytes=64 * GB, cores=8, ranks=1, batch_bytes=100 * MIB, shm_bytes=64 * MIB)
    assert none.num_workers == 0
    assert "--shm-size" in none.reasons[0]


def test_a_dataset_of_python_objects_counts_once_for_every_process() -> None:
    assert _two_gpus(13 * GB, dataset_bytes=GIB).num_workers == 1


def test_training_on_the_cpu_keeps_its_cores() -> None:
    side = host_side(available_bytes=64 * GB, cores=8, ranks=1, batch_bytes=TOKEN_BATCH, device="cpu")
    assert (side.num_workers, side.pin_memory) == (0, False)
    assert "cores" in side.reasons[0]


@given(HOSTS)
def test_what_is_planned_never_exceeds_what_is_there(host: dict[str, Any]) -> None:
    side = host_side(**host)
    available = host["available_bytes"]
    assert 0 <= side.num_workers <= min(MOST_WORKERS, host["cores"])
    assert (side.prefetch_factor is None) == (side.num_workers == 0)
    if side.num_workers:
        assert side.host_bytes + reserve_bytes(available) <= available
        waiting = host["ranks"] * side.num_workers * (side.prefetch_factor or 0) * host["batch_bytes"]
        assert host["shm_bytes"] is None or waiting <= host["shm_bytes"]
    else:
        assert not side.pin_memory
        assert side.host_bytes <= available or side.warnings


@given(HOSTS)
def test_every_number_has_a_because(host: dict[str, Any]) -> None:
    side = host_side(**host)
    assert all("because" in reason and "{" not in reason for reason in side.reasons)
    assert side.reasons[0].startswith(f"num_workers is {side.num_workers}")
    assert ("pin_memory is on" in side.reasons[-1]) == side.pin_memory
    assert len(side.reasons) == (3 if side.num_workers else 2)


@given(HOSTS, st.integers(0, 64 * GIB))
def test_more_memory_never_means_fewer_workers_or_less_pinning(host: dict[str, Any], more: int) -> None:
    less, richer = host_side(**host), host_side(**{**host, "available_bytes": host["available_bytes"] + more})
    assert richer.num_workers >= less.num_workers
    assert richer.pin_memory >= less.pin_memory


@given(HOSTS, st.floats(0, 64))
def test_more_cores_never_mean_fewer_workers(host: dict[str, Any], more: float) -> None:
    assert host_side(**{**host, "cores": host["cores"] + more}).num_workers >= host_side(**host).num_workers


@given(HOSTS, st.integers(0, 64 * GIB))
def test_offloaded_state_never_means_more_workers(host: dict[str, Any], more: int) -> None:
    assert host_side(**{**host, "held_bytes": host["held_bytes"] + more}).num_workers <= host_side(**host).num_workers


def test_offloading_keeps_the_processes_and_the_reserve() -> None:
    room = 64 * GIB - 2 * PROCESS_BYTES - reserve_bytes(64 * GIB)
    assert offload_fits(room, 64 * GIB, ranks=2)
    assert offload_refusal(room, 64 * GIB, ranks=2) is None
    assert not offload_fits(room + MIB, 64 * GIB, ranks=2)
    refusal = offload_refusal(room + MIB, 64 * GIB, ranks=2)
    assert refusal is not None
    assert "1.00 MiB too little" in refusal


def test_offloading_to_an_unknown_host_is_refused() -> None:
    assert not offload_fits(1, None, ranks=1)
    assert "--host-memory" in (offload_refusal(1, None, ranks=1) or "")
