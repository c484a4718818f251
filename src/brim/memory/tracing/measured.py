"""The reference step, really run on the CPU, with every allocation recorded by torch's profiler: what estimates are judged by.

The model and the batch come from `brim.memory.tracing.reference`, with memory this time; the step and its optimizers are the real ones. The
second step is recorded, when the optimizer's state exists. What lives before it (parameters, buffers, state, batch) is counted by
storage; the profiler tells the rest, allocation by allocation.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from brim.memory.tracing.building import build_model, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from brim.memory.setup import Setup


@dataclass(frozen=True)
class Allocation:
    """One request to the CPU allocator, or its return."""

    size: int
    """Bytes; negative when they are given back."""
    operator: str
    """The operator that was running; empty outside of any."""


@dataclass(frozen=True)
class Measured:
    """What a real step held."""

    static_bytes: int
    """Alive before the step: parameters, buffers, optimizer state, batch."""
    allocations: tuple[Allocation, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once during the step."""
        live = peak = self.static_bytes
        for allocation in self.allocations:
            live += allocation.size
            peak = max(peak, live)
        return peak


def measure_step(setup: Setup) -> Measured:
    """Run two steps on the CPU and record the second; or one, and record a step of evaluation if the setup has one."""
    torch.manual_seed(0)
    random.seed(0)
    model = build_model(setup, device="cpu")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _OPTIMIZERS[setup.optimizer](trainable)
    batch = make_batch(setup, device="cpu")

    def step() -> None:
        for _micro in range(min(2, setup.accumulation)):
            loss = model(**batch).loss
            if setup.accumulation > 1:
                loss = loss / setup.accumulation
            loss.backward()
            del loss
        if setup.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trainable, setup.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(**batch)

    step()
    if setup.evaluation_batch is not None:
        batch = make_batch(replace(setup, micro_batch=setup.evaluation_batch), device="cpu")
    gc.collect()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    static = _storage_bytes([*model.parameters(), *model.buffers(), *state, *batch.values()])
    return Measured(static, tuple(_record(step if setup.evaluation_batch is None else evaluate)))


def _storage_bytes(values: Iterable[Any]) -> int:
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _record(step: Callable[[], None]) -> list[Allocation]:
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    found: list[tuple[int, Allocation]] = []

    def visit(events: Iterable[Any]) -> Iterator[Any]:
        for event in events:
            yield event
            yield from visit(event.children)

    results: Any = profiler.profiler
    for event in visit(results.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            operator = event.parent.name if event.parent is not None else ""
            found.append((event.start_time_ns, Allocation(event.extra_fields.alloc_size, operator)))
    found.sort(key=lambda pair: pair[0])
    return [allocation for _time, allocation in found]


class PlainLion(torch.optim.Optimizer):
    """Lion as the lion-pytorch package writes it (lion_pytorch/lion_pytorch.py, `update_fn`)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move each parameter against the sign of a blend of moment and gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment, gradient, (beta1, beta2) = state["exp_avg"], parameter.grad, group["betas"]
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        update = moment.clone().mul_(beta1).add(gradient, alpha=1.0 - beta1).sign_()
        parameter.add_(update, alpha=-group["lr"])
        moment.mul_(beta2).add_(gradient, alpha=1.0 - beta2)


def _adafactor(parameters: list[nn.Parameter]) -> Any:
    from transformers.optimization import Adafactor

    made: Any = Adafactor
    return made(parameters, lr=1e-4, scale_parameter=False, relative_step=False)


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": torch.optim.AdamW,  # torch's own choice of implementation
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adafactor": _adafactor,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "lion": PlainLion,
}
