"""What brim asks of an engine that spreads a model over ranks, and how a whole state is taken out of it and put into it.

Forward and backward of such a model are collective: parameters are gathered for them, gradients scattered after them. So all ranks run the
same number of micro-batches, and each of them goes backward with its weight in the whole global batch. Both engines average over
ranks, which is undone by a factor.

A checkpoint holds whole tensors in the form that one process writes, whatever held them: a run may go on under another engine, on another
number of ranks, or alone. Whole tensors are the host's business, not the device's, and only the first rank keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from brim.errors import UnsupportedError
from brim.locale import _
from brim.machine import child

if TYPE_CHECKING:
    from pathlib import Path

    from brim.records import RunCard

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
State = dict[str, Any]
"""Of an optimizer, as `torch.optim.Optimizer.state_dict` has it: `state` by number of the parameter, and `param_groups`."""

ELEMENTWISE = frozenset({"adamw", "adamw-fused", "adamw-loop", "sgd", "sgd-momentum", "lion"})
"""Optimizers that treat each number by itself: a piece of a tensor is stepped as the whole would be. Adafactor sums over rows and columns,
8-bit states over blocks, and cut otherwise they would be other optimizers."""


class Shards(Protocol):
    """A model that is spread over ranks, with its optimizer. Everything but the properties is collective."""

    @property
    def model(self) -> nn.Module:
        """What goes forward."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """As the Trainer and its schedules see it."""
        ...

    @property
    def whole_bytes(self) -> int:
        """Of a checkpoint's tensors: weights and the optimizer's state."""
        ...

    def begin_round(self, *, is_last: bool) -> None:
        """A micro-batch follows; after the last one the optimizer steps."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Of a loss that has its weight already; what the engine divides by is undone here."""
        ...

    def clip(self, max_norm: float | None) -> float | None:
        """Clip, and say the norm of before; None where the engine does it inside its step."""
        ...

    @property
    def norm(self) -> float | None:
        """Of the gradient of the last step, where the engine has found it inside."""
        ...

    @property
    def has_skipped(self) -> bool:
        """Whether the engine left the last step out: fp16 overflowed."""
        ...

    def clear(self) -> None:
        """No gradients, and nothing that a failed round has left."""
        ...

    def settle(self) -> None:
        """After an evaluation: parameters are in pieces again."""
        ...

    def whole_weights(self, *, keeps: bool) -> dict[str, torch.Tensor] | None:
        """By name, on the host, as exact as they are held. `keeps`: whether this rank wants them."""
        ...

    def whole_optimizer(self, *, keeps: bool) -> State | None:
        """The optimizer's state, as one process would save it."""
        ...

    def load_optimizer(self, saved: State) -> None:
        """What one process, or any engine, has saved."""
        ...


def make_shards(model: nn.Module, card: RunCard, folder: Path, make: MakeOptimizer) -> Shards:
    """By the engine that the card names; `folder` is the run's."""
    refuse(card)
    if card.settings.sharding == "fsdp":
        from brim.trainer.sharding.fsdp import FullyShards

        return FullyShards(model, card, make)
    from brim.trainer.sharding.zero import ZeroShards

    return ZeroShards(model, card, folder, make)


def import_engine(card: RunCard) -> None:
    """What its imports take is the process's own, and does not count against a limit."""
    if card.settings.sharding == "fsdp":
        pass
    else:
        from brim.trainer.sharding.zero import imported

        imported(card)


def refuse(card: RunCard) -> None:
    """What would not be what was asked for, cut into pieces."""
    settings = card.settings
    if settings.optimizer not in ELEMENTWISE:
        text = _(
            "{optimizer} does not treat each number by itself, so on the pieces of {sharding} it would be another optimizer."
        )
        raise UnsupportedError(
            text.format(optimizer=settings.optimizer, sharding=settings.sharding),
            hint=_("Take one of: {names}; or --sharding ddp.").format(names=", ".join(sorted(ELEMENTWISE))),
        )
    if settings.method in {"qlora", "lora-8bit"}:
        raise UnsupportedError(
            _("{method} with --sharding {sharding}: packed weights cannot be cut into pieces here.").format(
                method=settings.method, sharding=settings.sharding
            ),
            hint=_("Take --sharding ddp, or --method lora."),
        )
    if settings.sharding == "fsdp" and settings.precision == "amp-fp16":
        raise UnsupportedError(
            _("FSDP2 with amp-fp16: its pieces have no loss scaling here."),
            hint=_("Take --sharding zero2 or zero3, which scale by themselves, or --precision amp-bf16."),
        )


@contextmanager
def in_host_memory(card: RunCard) -> Iterator[None]:
    """Whole tensors belong to the host. Where the CPU plays the device, its limit is lifted for them, and stands again after."""
    if not card.limit_is_hard or not child.HAS_DATA_LIMIT:
        yield
        return
    limit = child.data_limit()
    child.set_data_limit(None)
    try:
        yield
    finally:
        child.give_back_memory()
        child.set_data_limit(limit)


def first_names(model: nn.Module) -> dict[str, str]:
    """Of every parameter's name, the first under which the same parameter is known: weights that are tied have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}


def tied(weights: dict[str, torch.Tensor], first: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """With the other names of tied weights, which are the same tensor, so that whoever saves them sees it."""
    return {**weights, **{name: weights[other] for name, other in first.items() if other in weights}}


def groups_by_number(groups: list[dict[str, Any]], names: Mapping[int, int]) -> list[dict[str, Any]]:
    """Parameter groups with the numbers of their parameters (by identity), as a saved state has them."""
    return [{**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in groups]


def numbers_of(groups: list[dict[str, Any]]) -> dict[int, int]:
    """The number of each parameter in a saved state, by its identity."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(parameters)}


def take_over_groups(groups: list[dict[str, Any]], saved: State) -> None:
    """Learning rates and the like of a saved state; the parameters stay."""
    for group, was in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in was.items() if key != "params"})
