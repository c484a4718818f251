"""Structures from the simplest to the smallest: where a question needs one structure that fits and not the fastest of all.

A search looks at everything that could be fastest. Other questions (what is the largest, the longest, the nearest that fits?) need few
traces and one structure that does not change under the user's eyes: what is pinned stays, attention and precision are the usual ones of the
card, and of the rest the first that fits is taken: without checkpointing before with it, whole weights on every GPU before shards of them,
on the card before on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.search import host_allows, too_large
from brim.planner.space import structures_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.planner.request import Request
    from brim.workload.settings import Settings

_SHARDINGS = ("none", "ddp", "zero2", "fsdp")
"""Of the engines, those that differ in what they hold: everything, all but the optimizer's state and gradients, shards only."""
_OFFLOADS = ("none", "optimizer", "parameters")
_CHOSEN = ("method", "checkpointing", "optimizer", "sharding", "offload")
_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout")
_SHARED = ("method", "precision", "checkpointing", "attention", "optimizer", "sharding", "offload")


def ladder(request: Request) -> list[Settings]:
    """The structures that may fit, simplest first; empty where the weights alone are more than any of them can hold."""
    return [settings for settings in rungs(request) if not too_large(request, settings)]


def rungs(request: Request) -> list[Settings]:
    """All structures of a request that are worth a look: what a probe ran, then simplest first."""
    space = structures_of(request.pinned, request.base, request.question.model, request.where, request.vary)
    listed = [structure.settings for structure in space.structures if not structure.dominated_by]
    listed = listed or [structure.settings for structure in space.structures]
    listed = [settings for settings in listed if host_allows(request, settings)] or listed
    usual = _usual_precision(request, [settings for settings in listed if _is_usual(request, settings)] or listed)
    probed = [structure.settings for structure in space.structures if request.was_probed(structure.settings)]
    others = [settings for settings in usual if not any(_is_alike(settings, each) for each in probed)]
    return [*probed, *sorted(others, key=lambda settings: _rank(request, settings))]


def options(request: Request) -> Iterator[Option]:
    """The same, each traced when it is asked for."""
    sampler, rates = Sampler(request), rates_of(request.where, request.host_cores)
    for settings in ladder(request):
        option = Option(request, settings, sampler, rates)
        option.trace()
        yield option


def option_of(request: Request, settings: Settings) -> Option:
    """One structure, traced."""
    option = Option(request, settings, Sampler(request), rates_of(request.where, request.host_cores))
    option.trace()
    return option


def described(option: Option) -> dict[str, str]:
    """A structure in the words of the command line; adapters with their rank and alpha."""
    settings = option.settings
    named = {name: str(getattr(settings, name)) for name in _SHARED}
    adapters = {name: str(value) for name in _ADAPTERS if (value := getattr(settings, name))}
    return {**named, "attention": option.attention, "loss": settings.loss, **adapters}


def same_kind(request: Request, like: Settings) -> Settings:
    """The structure of another request (another length, another card) that makes the same choices, as far as its card allows."""
    listed = rungs(request)
    for names in (_SHARED, _CHOSEN, _CHOSEN[:2]):
        for settings in listed:
            if all(getattr(settings, name) == getattr(like, name) for name in names):
                return settings
    return listed[0]


def _is_alike(one: Settings, other: Settings) -> bool:
    """Whether they differ in kernels and precision only: of such, the one that a probe ran is enough."""
    return all(getattr(one, name) == getattr(other, name) for name in _CHOSEN if name != "optimizer")


def _is_usual(request: Request, settings: Settings) -> bool:
    if "attention" not in request.pinned and settings.attention is not None:
        return False
    return "sharding" in request.pinned or settings.sharding in _SHARDINGS


def _usual_precision(request: Request, listed: list[Settings]) -> list[Settings]:
    """The first of the space, half precision where the card computes in it."""
    if "precision" in request.pinned or not listed:
        return listed
    return [settings for settings in listed if settings.precision == listed[0].precision]


def _rank(request: Request, settings: Settings) -> tuple[object, ...]:
    shardings = {name: index for index, name in enumerate(_SHARDINGS)}
    return (
        settings.method != request.base.method,
        _OFFLOADS.index(settings.offload),
        settings.checkpointing != "none",
        shardings.get(settings.sharding or "none", len(shardings)),
    )
