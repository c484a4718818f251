"""`--solve gpu`: the smallest card of the catalogue that does the plan, or, with prices, the one that does it for least.

Kernels change at compute capability 8.0 and nowhere else, so two traces tell what every card of the catalogue would need; only the cards
that are shown are planned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.machine.catalogue import gpus
from brim.planner.command import command_of
from brim.planner.ladder import options, rungs
from brim.planner.option import Option, Sampler
from brim.planner.prices import read_prices
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.planner.search import Pick, too_large
from brim.planner.solve import Found, bare_row, kind_of, row_of
from brim.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.machine.records import GPU
    from brim.planner.answers import SolveRow

_RUNNERS_UP = 4


def solve_gpu(model: Any, price: object, asked: dict[str, Any]) -> Found:
    """Cards from small to large, or all that have a price."""
    if any(asked.get(name) is not None for name in ("gpu", "memory", "device")):
        raise UsageError(_("The GPU is what is asked for: leave --gpu, --memory and --device out."))
    prices = read_prices(price) if price is not None else None
    cards = _Cards(model, asked)
    found = _cheapest(cards, prices) if prices is not None else _smallest(cards)
    found.model = cards.name
    found.assumptions = cards.assumptions
    return found


class _Cards:
    """The same question on other cards."""

    def __init__(self, model: Any, asked: dict[str, Any]) -> None:
        self._model, self._asked, self._given = model, asked, model
        self._data: dict[str, Any] = {}
        self._needs: dict[object, int] = {}
        self._requests: dict[str, Request] = {}
        self.name = ""
        self.assumptions: tuple[str, ...] = ()

    def request(self, gpu: GPU) -> Request:
        """The model is found, and data are measured, once."""
        if gpu.name not in self._requests:
            request = make_request(self._model, **{**self._asked, **self._data}, gpu=gpu)
            self._model, self.name, self.assumptions = request.question.model, request.question.name, request.assumptions
            self._data = {"data": request.data, "tokenizer": None} if request.data is not None else {}
            self._requests[gpu.name] = request
        return self._requests[gpu.name]

    def needed(self, gpu: GPU) -> int | None:
        """Bytes of the smallest configuration; None where it cannot run there at all."""
        try:
            request = self.request(gpu)
            settings = rungs(request)[-1]
        except UnsupportedError:
            return None
        if settings.precision.endswith("bf16") and not gpu.bf16:
            return None  # it would be emulated, slowly
        where = request.where
        key = settings, where.target, where.outside(settings.ranks)
        if key not in self._needs:
            option = Option(request, settings, Sampler(request), rates_of(where, request.host_cores))
            self._needs[key] = option.device_bytes(request.cuts[0])
            option.keep()
        return self._needs[key]

    def cannot(self, gpu: GPU) -> bool:
        """Whether the weights alone rule it out, which costs nothing to know."""
        request = self.request(gpu)
        return all(too_large(request, settings) for settings in rungs(request))

    def fits(self, gpu: GPU) -> bool:
        try:
            if self.cannot(gpu):
                return False
        except UnsupportedError:
            return False
        needed = self.needed(gpu)
        return needed is not None and needed <= self.request(gpu).room_bytes

    def row(self, gpu: GPU) -> SolveRow | None:
        """The fastest of the simple structures, with its times."""
        request = self.request(gpu)
        picks = [Pick(option, cut) for option in options(request) if (cut := option.fastest()) and option.surely_fits(cut)]
        if not picks:
            return None
        pick = min(picks, key=lambda each: each.seconds)
        for each in picks:
            each.option.keep()
        needed = pick.option.device_bytes(pick.cut)
        reason = _("{needed} of {limit}, with {margin} to spare for the margin.").format(
            needed=format_bytes(needed),
            limit=format_bytes(request.where.limit_bytes),
            margin=format_bytes(request.margin.bytes),
        )
        kind = kind_of(pick.option.settings, request)
        return row_of(request, pick, gpu.name, kind=kind, reason=reason, command=self.command(gpu))

    def refusal(self, gpu: GPU) -> SolveRow | None:
        """What a card that is too small would have needed."""
        needed = self.needed(gpu)
        if needed is None:
            return None
        request = self.request(gpu)
        reason = _("{missing} too small.").format(missing=format_bytes(needed - request.room_bytes))
        return bare_row(request, needed, gpu.name, reason=reason)

    def command(self, gpu: GPU) -> str:
        return command_of(self._given, self._asked, gpu=gpu.name)


def _catalogue() -> list[GPU]:
    """Small to large. Laptop GPUs, and what the estimate has no memory model for, are not recommended."""
    return sorted(
        (gpu for gpu in gpus() if gpu.backend == "cuda" and not gpu.is_laptop), key=lambda gpu: (gpu.usable_bytes, -_flops(gpu))
    )


def _flops(gpu: GPU) -> float:
    return gpu.dense_flops.get("fp16") or gpu.dense_flops.get("fp32") or 0.0


def _smallest(cards: _Cards) -> Found:
    listed = _catalogue()
    rows = _rows(cards, listed)
    found = Found(
        reasons=[
            _("NVIDIA's cards of the catalogue, from the smallest memory to the largest; {count} of them.").format(
                count=len(listed)
            )
        ]
    )
    first = next(rows, None)
    if first is None:
        largest = cards.refusal(listed[-1])
        found.others = [largest] if largest is not None else []
        found.reasons.append(_("None of them holds it."))
        return found
    found.answers = [first]
    found.others = [row for _index, row in zip(range(_RUNNERS_UP), rows, strict=False)]
    smaller = [gpu for gpu in listed if gpu.usable_bytes < first.limit_bytes and not cards.cannot(gpu)]
    refused = cards.refusal(smaller[-1]) if smaller else None
    if refused is not None and not refused.fits:
        found.others.append(refused)
    return found


def _rows(cards: _Cards, listed: list[GPU]) -> Iterator[SolveRow]:
    """Of the cards that do it, each planned when it is asked for."""
    for gpu in listed:
        row = cards.row(gpu) if cards.fits(gpu) else None
        if row is not None:
            yield row


def _cheapest(cards: _Cards, prices: dict[str, float]) -> Found:
    listed = [gpu for gpu in gpus() if gpu.name in prices]
    priced = [_priced(row, prices[row.value] * cards.request(gpu).base.ranks) for gpu in listed for row in _rows(cards, [gpu])]
    priced.sort(key=lambda row: row.price_per_million_tokens or 0.0)
    found = Found(priced[:1], priced[1:])
    done = {row.value for row in priced}
    found.others += [row for gpu in listed if gpu.name not in done and (row := cards.refusal(gpu)) is not None]
    found.reasons.append(
        _("The cards that have a price, by what the same tokens cost; {count} of them.").format(count=len(listed))
    )
    if not priced:
        found.reasons.append(_("None of them holds it."))
    elif priced[0].epoch_seconds is None:
        found.reasons.append(_("What an epoch costs is said with --samples or --data."))
    return found


def _priced(row: SolveRow, per_hour: float) -> SolveRow:
    assert row.tokens_per_second
    return replace(
        row,
        price_per_hour=per_hour,
        price_per_epoch=per_hour * row.epoch_seconds / 3600 if row.epoch_seconds is not None else None,
        price_per_million_tokens=per_hour / 3600 * 1e6 / row.tokens_per_second,
    )
