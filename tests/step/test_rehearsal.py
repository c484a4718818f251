"""The optimizer steps once before the first step, and nobody could tell: not from the weights, the state, or the run that follows."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from brim.errors import OutOfMemoryError
from brim.machine.budget import ForkServer
from brim.machine.device import CpuDevice
from brim.sizes import MIB, format_bytes
from brim.step.rehearsal import Rehearsal, rehearse

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
optim: Any = torch.optim


def of_transformers(*arguments: Any, **keywords: Any) -> Any:
    from transformers import optimization  # not at the top: children import this module, and count what they import

    kind: Any = optimization.Adafactor
    return kind(*arguments, **keywords)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW with a rate that is a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adam with decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD with dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "Adafactor of torch": lambda p: optim.Adafactor(p, lr=0.1),
    "Adafactor of transformers": lambda p: of_transformers(p, lr=0.1, relative_step=False, scale_parameter=True),
    "Adafactor with a rate of its own": lambda p: of_transformers(p, lr=None, relative_step=True),
    "eps of zero": lambda p: optim.AdamW(p, lr=0.1, eps=0.0),
    "two groups": lambda p: optim.AdamW([{"params": p[:1], "lr": 0.5}, {"params": p[1:], "weight_decay": 0.0}], lr=0.1),
}  # fmt: skip


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((64, 80), (80,), (3, 5))]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _step in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach().clone() for weight in weights]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def check_that_nobody_could_tell(make: Make) -> None:
    weights, others = parameters(), parameters()
    optimizer, other = make(weights), make(others)
    before = [weight.detach().clone() for weight in weights]
    settings = settings_of(optimizer)
    rehearsal = rehearse(optimizer, CpuDevice())
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    assert all(weight.grad is None for weight in weights)
    assert settings_of(optimizer) == settings
    rehearsal.release()
    assert all(torch.equal(*pair) for pair in zip(train(optimizer, weights), train(other, others), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_weight_moves_and_the_run_that_follows_is_the_same_to_the_last_bit(name: str) -> None:
    check_that_nobody_could_tell(OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_bitsandbytes_is_rehearsed_without_a_trace(name: str) -> None:
    kinds = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
    try:
        train(getattr(kinds, name)(trial := parameters(), lr=0.1), trial, 1)
    except Exception as error:
        pytest.skip(f"bitsandbytes' {name} does not run on this machine: {error}")
    check_that_nobody_could_tell(lambda p: getattr(kinds, name)(p, lr=0.1))


def tensor_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def told_bytes(rehearsal: Rehearsal) -> tuple[str, str]:
    """Of the state, and of the peak that was measured: what the ledger says."""
    found = re.fullmatch(
        r"The optimizer's state takes ([\d.]+ \w+); its step peaks at ([\d.]+ \w+), measured before the first\.", rehearsal.note
    )
    assert found is not None, rehearsal.note
    return found[1], found[2]


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "SGD with momentum", "RMSprop"])
def test_a_state_of_zeros_stays_and_is_counted(name: str) -> None:
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    rehearsal = rehearse(optimizer, CpuDevice())
    assert len(optimizer.state) == len(weights)
    state_bytes = tensor_bytes(optimizer)
    assert state_bytes >= sum(weight.numel() * 4 for weight in weights)
    state, peak = told_bytes(rehearsal)
    assert state == format_bytes(state_bytes)
    assert peak != "0 B"
    assert not rehearsal.held
    for kept in optimizer.state.values():
        assert float(kept.get("step", 0)) == 0


@pytest.mark.parametrize("name", ["NAdam", "SGD with dampening", "Adafactor of torch", "Adafactor of transformers"])
def test_a_state_that_a_fresh_one_would_not_be_goes_and_its_room_is_held(name: str) -> None:
    optimizer = OPTIMIZERS[name](weights := parameters())
    rehearsal = rehearse(optimizer, CpuDevice())
    assert not optimizer.state
    held_bytes = sum(held.numel() for held in rehearsal.held)
    assert told_bytes(rehearsal)[0] == format_bytes(held_bytes)
    rehearsal.release()
    assert not rehearsal.held
    train(optimizer, weights, 1)
    assert held_bytes == tensor_bytes(optimizer) > 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Adagrad", "The optimizer's state was there already."),
        ("Adafactor with a rate of its own", "brim does not know how Adafactor behaves"),
        ("eps of zero", "brim does not know how AdamW behaves"),
    ],
)
def test_what_cannot_be_rehearsed_is_told(name: str, why: str) -> None:
    assert why in rehearse(OPTIMIZERS[name](parameters()), CpuDevice()).note


def test_an_optimizer_that_wants_a_closure_is_left_alone() -> None:
    optimizer = torch.optim.LBFGS(weights := parameters())
    before = [weight.detach().clone() for weight in weights]
    note = rehearse(optimizer, CpuDevice()).note
    assert note.startswith("The memory of the optimizer's step was not rehearsed: ")
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


class Mine(torch.optim.SGD):
    """From a module that brim does not know."""


def test_an_optimizer_of_somebody_else_is_left_alone() -> None:
    optimizer = Mine(parameters(), lr=0.1, momentum=0.9)
    assert "brim does not know how Mine behaves" in rehearse(optimizer, CpuDevice()).note
    assert not optimizer.state


def test_nobody_who_counts_steps_counts_this_one() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    counted: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: counted.append("before"))
    optimizer.register_step_post_hook(lambda *_: counted.append("after"))
    rehearse(optimizer, CpuDevice())
    assert not counted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("before `optimizer.step()`" in str(one.message) for one in caught)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def rehearse_what_does_not_fit(foreach: bool) -> dict[str, Any]:
    """64 MiB of weights, 64 MiB of gradients, and 128 MiB of state of which half fits."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024, bias=False) for _layer in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    before = [float(weight.detach().sum()) for weight in model.parameters()]
    message = hint = ""
    try:
        rehearse(optimizer, CpuDevice())
    except OutOfMemoryError as error:
        message, hint = error.message, str(error.hint)
    return {
        "message": message,
        "hint": hint,
        "same": before == [float(weight.detach().sum()) for weight in model.parameters()],
        "state": len(optimizer.state),
        "gradients": sum(weight.grad is not None for weight in model.parameters()),
        "room": torch.ones(100 * MIB, dtype=torch.uint8).numel(),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_memory_that_really_runs_out_in_the_rehearsal_costs_nothing(server: ForkServer, foreach: bool) -> None:
    outcome = server.run(
        rehearse_what_does_not_fit, foreach,
        memory_bytes=192 * MIB, preload=("torch._dynamo", "tests.step.test_rehearsal"), timeout_seconds=120,
    )  # fmt: skip
    found = outcome.unwrap()
    assert found["message"].startswith("The optimizer AdamW does not fit: its state and the gradients (64.0 MiB)")
    assert found["message"].endswith("Nothing was changed yet.")
    assert "A smaller micro-batch does not help here." in found["hint"]
    assert (found["same"], found["state"], found["gradients"], found["room"]) == (True, 0, 0, 100 * MIB)
