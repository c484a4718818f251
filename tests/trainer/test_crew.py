"""Who trains: how many processes, started by whom, with what memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brim.errors import UsageError
from brim.trainer.crew import crew_of, group_of
from brim.trainer.group import Group
from brim.trainer.ranks import World, sharding_of_environment
from brim.trainer.request import TrainRequest, read_request
from brim.workload.embedded import data_file, write_model

TWO = World(0, 2, 0, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def asked(model: Path, **given: Any) -> TrainRequest:
    return read_request(model, {"data": data_file(), "device": "cpu", **given}, None)


def test_one_process_needs_nobody_to_start_it(model: Path) -> None:
    assert group_of(asked(model), World()) is None


def test_several_are_started_by_torchrun_unless_said_otherwise(model: Path) -> None:
    assert group_of(asked(model, gpus=3), World()) == Group("torchrun", 3, device="cpu")
    assert group_of(asked(model, gpus=2, launch="accelerate"), World()) == Group("accelerate", 2, device="cpu")


def test_a_launcher_that_has_started_them_is_recognised(model: Path) -> None:
    assert group_of(asked(model, sharding="fsdp"), TWO) is None
    request, world = crew_of(asked(model, sharding="fsdp"), TWO, None)
    assert (request.settings.gpus, request.settings.sharding, request.settings.sync_each_batch, world.size) == (
        2,
        "fsdp",
        True,
        2,
    )


@pytest.mark.parametrize(
    ("given", "world", "words"),
    [
        ({"sharding": "fsdp"}, World(), "one was asked for"),
        ({"offload": "optimizer"}, World(), "one was asked for"),
        ({"launch": "torchrun"}, World(), "say how many"),
        ({"memory": ["1GiB", "2GiB"]}, World(), "several values"),
        ({"gpus": 3}, TWO, "the launcher has started 2"),
        ({"launch": "torchrun"}, TWO, "already"),
        ({"gpus": 2, "nodes": 2}, World(), "where to meet"),
        ({"gpus": 2, "nodes": 2, "rendezvous": "first:29500"}, World(), "the same folder"),
        ({"gpus": 2, "nodes": 2, "rendezvous": "first:29500", "output": "run"}, World(), "which one it is"),
        ({"gpus": 2, "nodes": 2, "rendezvous": "first:29500", "output": "run", "node_rank": 2}, World(), "count from 0"),
    ],
)
def test_what_cannot_be_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch, given: Any, world: World, words: str) -> None:
    for name in ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=words):
        group_of(asked(model, **given), world)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": ["1GiB", "2GiB", "3GiB"]}, "3 values, and there are 2"),
        ({"speeds": [1.0]}, "1 values, and there are 2"),
        ({"offload": "optimizer"}, "belongs to"),
        ({"sharding": "ddp", "gradient_as_bucket_view": True}, "sums gradients without it"),
    ],
)
def test_what_does_not_go_with_two_processes_is_refused(model: Path, given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        crew_of(asked(model, **given), TWO, None)


@pytest.mark.parametrize("words", ["nowhere", "host:port"])
def test_a_rendezvous_is_a_host_and_a_port(model: Path, words: str) -> None:
    with pytest.raises(UsageError, match="rendezvous"):
        asked(model, rendezvous=words)


def test_slurm_says_which_machine_this_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("BRIM_RENDEZVOUS_SECRET", "a secret of the machines")
    group = group_of(asked(model, gpus=2, nodes=2, rendezvous="first:29500", output="run"), World())
    assert group is not None
    assert (group.node_rank, group.rendezvous) == (1, "first:29500")
    assert "--node-rank 1" in " ".join(group.command(Path("run"), "brim.trainer.worker"))


def test_the_engine_that_accelerate_was_told_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding_of_environment() == "fsdp"
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    (tmp_path / "deepspeed.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "deepspeed.json"))
    assert sharding_of_environment() == "zero2"


def test_a_gpu_that_drives_the_display_gets_less_to_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(free_bytes=free, total_bytes=24 << 30) for free in (20 << 30, 23 << 30)]
    monkeypatch.setattr("brim.machine.detect.detect", lambda: SimpleNamespace(accelerators=cards))
    request, _world = crew_of(replace(asked(model), device="cuda"), TWO, None)
    assert (request.memory, request.memories) == (20 << 30, (20 << 30, 23 << 30))
    cards[0].free_bytes = 23 << 30
    request, _world = crew_of(replace(asked(model), device="cuda"), TWO, None)
    assert (request.memory, request.memories) == (None, ())


def test_memory_that_is_the_same_for_each_process_is_one_memory(model: Path) -> None:
    request = asked(model, gpus=2, memory="1GiB,1GiB")
    request, _world = crew_of(request, World(), group_of(request, World()))
    assert (request.memory, request.memories) == (2**30, ())


def test_machines_have_the_ranks_that_they_were_told(tmp_path: Path) -> None:
    """By `--node-rank`, for --memory and --speeds are told by rank; c10d's rendezvous would go by the machines' names."""
    words = Group("torchrun", gpus=4, nodes=2, node_rank=1, rendezvous="first:29500").command(tmp_path, "worker")
    told = dict(itertools.pairwise(words))
    assert (told["--rdzv-backend"], told["--node-rank"], told["--rdzv-endpoint"]) == ("static", "1", "first:29500")
