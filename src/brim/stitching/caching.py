"""The keys and values of a stitched model: one ordinary cache that holds the layers of all parts, one after the other.

A part may only see its own layers: what an earlier part has just added to its own is not yet the past of a later one. So each part is
handed a view: another cache object with the same layer objects in it. Beam search, cropping and copying act on the layers, and so
need not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

from brim.errors import UnsupportedError, UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence


def new_cache(configs: Sequence[Any]) -> Any:
    """An empty cache for parts with these configs, each layer of the kind that its part has: sliding or full."""
    cache = DynamicCache()
    cache.layers = [layer for config in configs if config.num_hidden_layers for layer in DynamicCache(config=config).layers]
    return cache


def fit(cache: Any, configs: Sequence[Any]) -> None:
    """Make a cache that somebody else has made right for these parts, before anything is in it."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        text = _("A stitched model keeps its keys and values in a DynamicCache, and not in {kind}.")
        raise UnsupportedError(
            text.format(kind=type(cache).__name__), hint=_("Leave past_key_values and cache_implementation out.")
        )
    fresh = new_cache(configs)
    if [_kind(layer) for layer in cache.layers] == [_kind(layer) for layer in fresh.layers]:
        return
    if any(getattr(layer, "is_initialized", True) for layer in cache.layers):
        text = _("The cache holds {found} layers, and this model has {expected}: it was filled by another model.")
        raise UsageError(text.format(found=len(cache.layers), expected=len(fresh.layers)))
    cache.layers[:] = fresh.layers


def views(cache: Any, configs: Sequence[Any]) -> list[Any]:
    """What each part sees of a cache: its own layers; None for a part without any."""
    seen: list[Any] = []
    first = 0
    for config in configs:
        count = config.num_hidden_layers
        view = DynamicCache() if count else None
        if view is not None:
            view.layers = cache.layers[first : first + count]
        seen.append(view)
        first += count
    return seen


def refuse_other_kinds(implementation: str | None) -> None:
    """Static, quantized and offloaded caches are sized by one config, and parts have several."""
    if implementation not in {None, "dynamic"}:
        text = _("A stitched model cannot use the cache {kind!r}.")
        raise UnsupportedError(text.format(kind=implementation), hint=_("Leave cache_implementation out."))


def _kind(layer: Any) -> tuple[type, int | None]:
    return type(layer), getattr(layer, "sliding_window", None)
