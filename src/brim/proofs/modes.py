"""Training mode without noise, so that what differs in it is no dropout."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

_DROPOUTS = {
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, functional.dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, functional.alpha_dropout, functional.feature_alpha_dropout,
}  # fmt: skip


class _Still(TorchFunctionMode):
    """Dropout that drops nothing, wherever it is called and whatever its rate."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else given["input"]
        if function is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in given:
                given["dropout_p"] = 0.0
        return function(*args, **given)


def _is_rate(name: str, kind: str) -> bool:
    return "drop" in name.lower() or (name == "p" and "drop" in kind.lower())


@contextmanager
def _without_dropout() -> Iterator[None]:
    """For what checkpointing runs again inside backward, where no mode of torch's is in force."""
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    kept = {name: getattr(functional, name) for name in names}
    try:
        for name in names:
            setattr(functional, name, _nothing_dropped)
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)


def _nothing_dropped(input: torch.Tensor, *_rate: Any, **_more: Any) -> torch.Tensor:  # noqa: A002 (torch's own name for it)
    return input


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode; every rate of dropout that is a number on a module is zero meanwhile, and functional dropout does nothing."""
    rates: list[tuple[Any, str, float]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and 0 < value < 1 and _is_rate(name, type(module).__name__):
                rates.append((module, name, value))
                setattr(module, name, 0.0)
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        with _Still(), _without_dropout():
            yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)
        for module, mode in modes:
            module.training = mode
