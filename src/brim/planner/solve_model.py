"""`--solve model`: the largest model of the catalogue that a card can train in full, with LoRA and with QLoRA.

Need grows with the parameters, though not strictly: vocabularies and widths differ. So the search starts where bytes per parameter say that
the line should lie, and walks up until two models in a row do not fit; every model that is named was traced itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from brim.errors import BrimError, UsageError
from brim.locale import _, sentences
from brim.memory.ahead import trace_ahead
from brim.planner.command import command_of
from brim.planner.ladder import rungs
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.planner.search import too_large
from brim.planner.solve import Found, bare_row
from brim.sizes import format_bytes, format_count
from brim.workload.cards import ModelCard, cards

if TYPE_CHECKING:
    from brim.planner.answers import SolveRow

METHODS = ("full", "lora", "qlora")
_BYTES_PER_PARAMETER = {"full": 17.0, "lora": 2.3, "lora-8bit": 1.4, "qlora": 0.9}
"""Where the search starts. It decides how long that takes, and nothing else."""
_BYTES_WITHOUT_MOMENTS = 10.0
_FAILURES = 2
"""Models in a row, from small to large, after which no larger one is tried."""
_TASKS = {
    None: ("causal-lm",),
    "causal-lm": ("causal-lm",),
    "seq2seq": ("seq2seq",),
    "classification": ("masked-lm", "encoder", "causal-lm"),
}


def solve_model(asked: dict[str, Any]) -> Found:
    """One answer for each method, the next smaller as runner-up, and the next larger that does not fit."""
    for name in ("data", "columns", "tokenizer"):
        if asked.get(name) is not None:
            text = _("--solve model compares models at one length, and --{name} belongs to one model.")
            raise UsageError(text.format(name=name), hint=_("Give --seq-len."))
    asked = {**asked, "micro_batch": asked.get("micro_batch") or 1}
    said = asked.get("method")
    walks = [_Walk(asked, method) for method in ((said,) if said is not None else METHODS)]
    trace_ahead([pair for walk in walks for pair in walk.ahead()])
    found = Found()
    for walk in walks:
        walk.go()
        found.answers += walk.answers()[:1]
        found.others += [*walk.answers()[1:], *walk.refused()]
        found.reasons.append(walk.said())
        found.device = found.device or walk.device
        found.assumptions = walk.assumptions
    return found


@dataclass(frozen=True)
class _Group:
    """Models of one size: what holds for one holds for all of them."""

    card: ModelCard
    others: tuple[str, ...]


def _groups(task: str | None) -> list[_Group]:
    """From small to large."""
    by_size: dict[int, list[ModelCard]] = {}
    for card in cards():
        if card.task in _TASKS.get(task, ()):
            by_size.setdefault(card.parameters, []).append(card)
    ordered = [by_size[size] for size in sorted(by_size)]
    return [_Group(cards[0], tuple(card.name for card in cards[1:])) for cards in ordered]


class _Walk:
    """The search for one method."""

    def __init__(self, asked: dict[str, Any], method: str) -> None:
        self.method = method
        self._asked = {**asked, "method": method}
        self._seen: dict[int, SolveRow | None] = {}
        self._options: dict[int, Option | None] = {}
        self.device = ""
        self.assumptions: tuple[str, ...] = ()
        self._groups = _groups(asked.get("task"))
        self._start = self._guess()

    def ahead(self) -> list[Any]:
        """What will be traced whatever comes out: where the walk starts, and the next larger."""
        near = range(self._start, min(len(self._groups), self._start + 2))
        options = [option for index in near if (option := self._option(index)) is not None]
        return [pair for option in options if (pair := option.wanted(option.request.cuts[0])) is not None]

    def go(self) -> None:
        """Down to one that fits, then up to where none does; and one below, where there is no runner-up yet."""
        index = self._start
        while index >= 0 and not self._fits(index):
            index -= 1
        failures, above = 0, index + 1
        while above < len(self._groups) and failures < _FAILURES:
            failures = 0 if self._fits(above) else failures + 1
            above += 1
        if len(self.answers()) == 1:
            largest = next(each for each in self._seen if self._fits(each))
            below = [each for each in range(largest) if not _has_experts(self._groups[each].card)]
            if below:
                self._fits(below[-1])

    def answers(self) -> list[SolveRow]:
        """The models that fit, largest first."""
        return [row for index in sorted(self._seen, reverse=True) if (row := self._seen[index]) is not None and row.fits]

    def refused(self) -> list[SolveRow]:
        """The smallest above the answer that was traced and does not fit."""
        largest = max((index for index, row in self._seen.items() if row is not None and row.fits), default=-1)
        above = [row for index in sorted(self._seen) if index > largest and (row := self._seen[index]) is not None]
        return above[:1]

    def said(self) -> str:
        """The answer in a sentence."""
        answers = self.answers()
        if not answers:
            return _("{method}: no model of the catalogue fits.").format(method=self.method)
        return _("{method}: {name} is the largest of {count} that were compared.").format(
            method=self.method, name=answers[0].value, count=len(self._groups)
        )

    def _fits(self, index: int) -> bool:
        if index not in self._seen:
            self._seen[index] = self._row(index)
        row = self._seen[index]
        return row is not None and row.fits

    def _row(self, index: int) -> SolveRow | None:
        """None where the weights alone are too much, or it cannot be trained so."""
        option = self._option(index)
        if option is None:
            return None
        try:
            needed = option.device_bytes(option.request.cuts[0])
        except BrimError:
            return None
        option.keep()
        group = self._groups[index]
        row = bare_row(option.request, needed, group.card.name, kind=self.method)
        return replace(row, reason=_why(group, option.request, needed), command=command_of(group.card.name, self._asked))

    def _option(self, index: int) -> Option | None:
        if index not in self._options:
            self._options[index] = self._made(index)
        return self._options[index]

    def _made(self, index: int) -> Option | None:
        try:
            request = self._request(index)
            # The smallest of the structures: with checkpointing, and sharded, unless that is pinned otherwise.
            settings = rungs(request)[-1]
        except BrimError:
            return None
        if too_large(request, settings):
            return None
        return Option(request, settings, Sampler(request), rates_of(request.where, request.host_cores))

    def _request(self, index: int) -> Request:
        return make_request(self._groups[index].card.name, **self._asked)

    def _guess(self) -> int:
        """The largest by bytes per parameter."""
        if not self._groups:
            raise UsageError(_("No model of the catalogue has this task."))
        request = self._request(0)
        self.device, self.assumptions = request.where.name, request.where.assumptions
        each = _BYTES_PER_PARAMETER[self.method]
        if self.method == "full" and not request.base.optimizer.startswith("adamw"):
            each = _BYTES_WITHOUT_MOMENTS
        if rungs(request)[-1].sharding in {"fsdp", "zero3"}:
            each /= request.base.ranks
        fitting = [index for index, group in enumerate(self._groups) if group.card.parameters * each <= request.room_bytes]
        return max(fitting, default=0)


def _has_experts(card: ModelCard) -> bool:
    """Mixtures of experts take long to trace: too long for a runner-up."""
    return any("experts" in key for key in card.config)


def _why(group: _Group, request: Request, needed: int) -> str:
    size = format_count(group.card.parameters)
    if needed > request.room_bytes:
        return _("{size} parameters: {missing} too much.").format(size=size, missing=format_bytes(needed - request.room_bytes))
    text = _("{size} parameters: {needed} of {limit}.").format(
        size=size, needed=format_bytes(needed), limit=format_bytes(request.where.limit_bytes)
    )
    return sentences(text, _("As large: {names}.").format(names=", ".join(group.others)) if group.others else "")
