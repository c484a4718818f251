"""What the layers of a model are handed: masks and hidden states, seen from outside while it runs.

A model of transformers takes a mask of one row a sequence, `[batch, tokens]`. Its layers do not: they take what `create_causal_mask` makes
of it for the attention in force. Most faults of stitched models are one taken for the other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from types import TracebackType

_MASKS = ("attention_mask", "causal_mask", "mask", "attn_mask")
_VISIBLE = -1e4
"""An additive mask hides what is far below zero."""


@dataclass(frozen=True)
class Sight:
    """One layer of transformers, as it was called."""

    module: str
    kind: str
    """Its class."""
    attention: str | None
    is_causal: bool
    """Whether it is causal by itself where it gets no mask."""
    hidden: tuple[int, ...] | None
    mask: tuple[int, ...] | None
    """The mask's shape; None if it was handed none."""
    dtype: str | None
    shows_future: bool
    """Whether its mask lets a token see a later one."""
    has_mask: bool
    """Whether it has a place for a mask at all."""

    @property
    def is_2d(self) -> bool:
        """The model's mask, where the layer's belongs."""
        return self.mask is not None and len(self.mask) == 2 and self.attention in {"sdpa", "eager"}

    @property
    def is_bidirectional(self) -> bool:
        """No mask, under an attention that then hides nothing."""
        return self.mask is None and self.has_mask and self.attention == "eager" and self.is_causal


class Spy:
    """Looks on while a model runs, then takes its hooks away."""

    def __init__(self, model: nn.Module) -> None:
        self.sights: list[Sight] = []
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            if _is_layer(module):
                self._hooks.append(module.register_forward_pre_hook(self._looker(name), with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _looker(self, name: str) -> Any:
        def look(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.sights.append(_sight(name, module, arguments, named))

        return look


def _is_layer(module: nn.Module) -> bool:
    """A part of transformers below the models: those take the mask as users give it."""
    if not type(module).__module__.startswith("transformers.models.") or hasattr(module, "from_pretrained"):
        return False
    return any(mask in _forward_of(module).parameters for mask in _MASKS)


def _forward_of(module: nn.Module) -> inspect.Signature:
    kind: Any = type(module)
    return _signature(kind.forward)


@cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _sight(name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Sight:
    try:
        given = _forward_of(module).bind_partial(module, *arguments, **named).arguments
    except TypeError:  # it will say so itself
        given = {}
    given = {**given, **given.get("kwargs", {})} if isinstance(given.get("kwargs"), dict) else dict(given)
    mask = next((given[word] for word in _MASKS if isinstance(given.get(word), torch.Tensor)), None)
    hidden = next((each for each in [*arguments, *named.values()] if isinstance(each, torch.Tensor)), None)
    return Sight(
        module=name, kind=type(module).__name__, attention=_attention(module),
        is_causal=bool(_of_attention(module, "is_causal", True)),
        hidden=None if hidden is None else tuple(hidden.shape),
        mask=None if mask is None else tuple(mask.shape),
        dtype=None if mask is None else str(mask.dtype).removeprefix("torch."),
        shows_future=mask is not None and _shows_future(mask), has_mask=True,
    )  # fmt: skip


def _attention(module: nn.Module) -> str | None:
    config = _of_attention(module, "config", None)
    found = getattr(config, "_attn_implementation", None)
    return found if isinstance(found, str) else None


def _of_attention(module: nn.Module, name: str, default: Any) -> Any:
    """From the layer, or from the attention inside it."""
    holders = [module, *(child for child in module.children() if "attention" in type(child).__name__.lower())]
    return next((getattr(holder, name) for holder in holders if hasattr(holder, name)), default)


def _shows_future(mask: torch.Tensor) -> bool:
    """For a mask of tokens against tokens: whether any later one is visible."""
    if mask.dim() < 3 or mask.shape[-1] < 2:
        return False
    shown = mask if mask.dtype == torch.bool else mask.float() > _VISIBLE
    if mask.shape[-2] == 1:
        return bool(shown.any())
    return bool(shown.triu(diagonal=1 + mask.shape[-1] - mask.shape[-2]).any())
