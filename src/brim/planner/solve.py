"""`brim plan --solve`: the planner's question asked the other way round.

`micro-batch`: the largest that fits. `seq-len`: the longest sequence. `gpu`: the smallest card of the catalogue that does it, or the
cheapest. `model`: the largest model of the catalogue that a card can train. Every answer was predicted itself, with the margin that a plan
keeps, and comes with the command that plans it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from brim.errors import BrimError, UsageError
from brim.locale import _
from brim.memory.ahead import trace_ahead
from brim.memory.compatibility import longest_position
from brim.planner.answers import Solution, Solved, SolveRow
from brim.planner.command import command_of
from brim.planner.ladder import ladder
from brim.planner.nearest import missing_bytes
from brim.planner.option import Option, Sampler
from brim.planner.plan import speed_of
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.planner.search import LARGE_LOGITS, Pick, logits_bytes
from brim.planner.space import may_chunk
from brim.sizes import format_bytes
from brim.step.cuts import Cut
from brim.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from brim.workload.resolve import Model
    from brim.workload.settings import Settings

LARGEST_MICRO_BATCH = 1 << 16
LONGEST_SEQUENCE = 1 << 20
_MULTIPLE = 128
"""Kernels pad to it, and one trace knows all multiples."""
_SHORT = (64, 32, 16)
"""Tried where not even 128 tokens fit."""


@dataclass
class Found:
    """What a question came to; the rest of a `Solution` is the same for all of them."""

    answers: list[SolveRow] = field(default_factory=list)
    others: list[SolveRow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    assumptions: tuple[str, ...] = ()
    model: str = ""
    device: str = ""


def solve(
    model: str | os.PathLike[str] | Model | None,
    what: str,
    *,
    price: object = None,
    apply: bool = False,
    **asked: Any,
) -> Solution:
    """Find what is asked for. `asked` are the keywords of `brim.plan`; what is given is pinned.

    `price` belongs to `gpu`: prices per hour and card, as `{"t4": 0.35}`, `"t4=0.35,l4=0.8"`, or a TOML, JSON or YAML file of such pairs.
    `model` is None where the question is which model.
    """
    del apply
    began = time.perf_counter()
    known: dict[str, Solved] = {word: word for word in get_args(Solved)}
    if what not in known:
        text = _("--solve {what!r} is not possible; one of: {words}.")
        raise UsageError(text.format(what=what, words=", ".join(known)))
    _check(model, known[what], price)
    if what in {"gpu", "model"} and asked.get("probe") is not None:
        text = _("--probe measured one model on one device, and --solve {what} looks for another.")
        raise UsageError(text.format(what=what), hint=_("Leave --probe out."))
    found = _find(model, known[what], price, asked)
    return Solution(
        what=known[what],
        model=found.model,
        device=found.device,
        fits=bool(found.answers),
        answers=tuple(found.answers),
        others=tuple(found.others),
        reasons=tuple(found.reasons),
        assumptions=found.assumptions,
        command=command_of(model, {**asked, "solve": what, "price": _said(price)}),
        elapsed_seconds=round(time.perf_counter() - began, 3),
        brim_version=__version__,
    )


def _check(model: object, what: Solved, price: object) -> None:
    if what == "model" and model is not None:
        raise UsageError(_("--solve model looks for a model, and one was named."), hint=_("Leave MODEL out."))
    if what != "model" and model is None:
        raise UsageError(_("A model is needed."), hint=_("For example: brim plan llama-3.1-8b --solve seq-len --gpu t4."))
    if price is not None and what != "gpu":
        raise UsageError(_("--price belongs to --solve gpu."))


def _find(model: Any, what: Solved, price: object, asked: dict[str, Any]) -> Found:
    if what == "micro-batch":
        return _micro_batch(model, asked)
    if what == "seq-len":
        return _seq_len(model, asked)
    if what == "gpu":
        from brim.planner.solve_gpu import solve_gpu

        return solve_gpu(model, price, asked)
    from brim.planner.solve_model import solve_model

    return solve_model(asked)


def _said(price: object) -> object:
    return ",".join(f"{name}={value}" for name, value in price.items()) if isinstance(price, dict) else price


def largest_that(holds: Callable[[int], bool], most: int, *, first: int = 1) -> int:
    """The largest number up to `most` that holds, found by doubling and halving; 0 where none does.

    The way is fixed by the answers alone, so where more memory can only turn a no into a yes, the number never shrinks.
    """
    if not holds(first):
        return next((number for number in range(first - 1, 0, -1) if holds(number)), 0)
    low = first
    while low * 2 <= most and holds(low * 2):
        low *= 2
    high = min(low * 2, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def row_of(request: Request, pick: Pick, value: str, *, kind: str = "", reason: str = "", command: str = "") -> SolveRow:
    """A configuration that fits, with its times."""
    speed = speed_of(request, pick)
    row = bare_row(request, pick.option.device_bytes(pick.cut), value, kind=kind, reason=reason, command=command)
    return replace(
        row,
        micro_batch=pick.cut.micro_batch,
        step_seconds=speed.step_seconds,
        epoch_seconds=speed.epoch_seconds,
        tokens_per_second=speed.tokens_per_second,
    )


def bare_row(request: Request, needed: int, value: str, *, kind: str = "", reason: str = "", command: str = "") -> SolveRow:
    """The same where only the memory is known."""
    return SolveRow(
        value=value,
        kind=kind,
        fits=needed <= request.room_bytes,
        memory_bytes=needed,
        limit_bytes=request.where.limit_bytes,
        micro_batch=request.cuts[0].micro_batch,
        seq_len=request.length,
        effective_batch=request.effective_batch,
        reason=reason,
        command=command,
    )


def kind_of(settings: Settings, request: Request) -> str:
    """What was free and is chosen, as flags."""
    words = [] if "checkpointing" in request.pinned else [f"--checkpointing {settings.checkpointing}"]
    if settings.ranks > 1 and "sharding" not in request.pinned:
        words.append(f"--sharding {settings.sharding}")
    if settings.loss == "chunked" and "loss" not in request.pinned:
        words.append("--loss chunked")
    return " ".join(words)


def chosen(settings: Settings, request: Request) -> dict[str, Any]:
    """The same as keywords of `brim.plan`."""
    names = ["checkpointing", *(["sharding"] if settings.ranks > 1 else []), *(["loss"] if settings.loss == "chunked" else [])]
    return {name: getattr(settings, name) for name in names if name not in request.pinned}


def _options(request: Request) -> list[Option]:
    """Of every rung, its traces made side by side."""
    sampler, rates = Sampler(request), rates_of(request.where, request.host_cores)
    made = [Option(request, settings, sampler, rates) for settings in ladder(request)]
    trace_ahead([pair for option in made if (pair := option.wanted(request.cuts[0])) is not None])
    return made


def _nothing(request: Request) -> Found:
    text = _("Nothing fits: {missing} is missing for the smallest configuration.")
    reason = text.format(missing=format_bytes(missing_bytes(request)))
    return Found([], [], [reason], request.assumptions, request.question.name, request.where.name)


def _refuse(asked: dict[str, Any], name: str) -> None:
    if asked.get(name) is not None:
        flag = "--" + name.replace("_", "-")
        raise UsageError(_("{flag} is what is asked for.").format(flag=flag), hint=_("Leave it out."))


def _sorted(found: list[tuple[int, SolveRow]], request: Request, reasons: list[str]) -> Found:
    """The largest first; of equal ones the fastest."""
    ordered = [row for _number, row in sorted(found, key=lambda each: (-each[0], each[1].step_seconds or 0.0))]
    margin = _("{margin} stays free: {because}.").format(
        margin=format_bytes(request.margin.bytes), because=request.margin.because
    )
    notes = tuple(dict.fromkeys((*request.assumptions, *request.where.assumptions)))
    return Found(ordered[:1], ordered[1:], [*reasons, margin], notes, request.question.name, request.where.name)


@dataclass(frozen=True)
class LargestFit:
    """The largest micro-batch of one structure."""

    size: int
    most: int
    """What was tried at most."""
    option: Option
    """With that micro-batch."""

    @property
    def request(self) -> Request:
        """With that micro-batch."""
        return self.option.request

    @property
    def pick(self) -> Pick:
        """The structure and its slices."""
        return Pick(self.option, self.request.cuts[0])

    @property
    def next_bytes(self) -> int | None:
        """What one sequence more would need; None where it was not tried."""
        if self.size == self.most:
            return None
        return self.option.device_bytes(Cut(self.size + 1, self.request.cuts[0].accumulation, ()))


def largest_fits(model: Any, asked: dict[str, Any]) -> tuple[Request, list[LargestFit]]:
    """Of every structure, the largest first; of equal ones the fastest. With `accumulation` as given.

    Where an effective batch is given, it is 2, because gradients then live beside the next micro-batch.
    """
    _refuse(asked, "micro_batch")
    accumulation = asked.get("accumulation") or (1 if asked.get("effective_batch") is None else 2)
    bare = {**asked, "effective_batch": None, "accumulation": accumulation}
    request = make_request(model, **bare, micro_batch=2)
    most = min(LARGEST_MICRO_BATCH, 10**9 // max(request.length, request.base.target_len or 1))
    if asked.get("effective_batch") is not None:
        most = min(most, -(-asked["effective_batch"] // (request.base.ranks * accumulation)))
    known = {**bare, "data": request.data, "tokenizer": None}

    def of_size(size: int) -> Request:
        return make_request(request.question.model, **known, micro_batch=size)

    listed = _options(request)
    found = [fit for option in listed if (fit := _largest_fit(option, most, of_size)) is not None]
    if listed:
        # Every micro-batch with a chunked loss takes a trace of its own: only the structure that holds most is tried with it.
        largest = max(found, key=lambda fit: fit.size, default=None)
        option, size = (largest.option, largest.size) if largest is not None else (listed[-1], 0)
        chunked = _largest_with_chunked_loss(option, most, of_size, size)
        found += [chunked] if chunked is not None else []
    return request, sorted(found, key=lambda fit: (-fit.size, speed_of(fit.request, fit.pick).step_seconds))


def _largest_fit(option: Option, most: int, of_size: Callable[[int], Request], *, first: int = 2) -> LargestFit | None:
    """The largest micro-batch of one structure; None where not even one sequence fits."""
    accumulation = option.request.cuts[0].accumulation
    size = largest_that(lambda number: option.fits(Cut(number, accumulation, ())), most, first=first)
    if not size:
        return None
    request = of_size(size)
    sized = Option(request, option.settings, Sampler(request), rates_of(request.where, request.host_cores))
    sized.trace()
    sized.keep()
    return LargestFit(size, most, sized)


def _largest_with_chunked_loss(option: Option, most: int, of_size: Callable[[int], Request], size: int) -> LargestFit | None:
    """The same structure with a chunked loss, where that holds more than `size`: the optimizer step is the same."""
    request = option.request
    if size >= most or not may_chunk(request.pinned, request.base, request.question.model, request.where):
        return None
    if logits_bytes(request, max(1, size)) <= LARGE_LOGITS * request.where.limit_bytes:
        return None
    chunked = option.with_settings(replace(option.settings, loss="chunked"))
    try:
        fit = _largest_fit(chunked, most, of_size, first=max(2, size))
    except BrimError:  # a model without a plain head
        return None
    return fit if fit is not None and fit.size > size else None


def _micro_batch(model: Any, asked: dict[str, Any]) -> Found:
    request, fits = largest_fits(model, asked)
    rows = []
    for fit in fits:
        settings = fit.option.settings
        command = command_of(model, asked, micro_batch=fit.size, **chosen(settings, request))
        kind = kind_of(settings, request)
        rows.append(
            (fit.size, row_of(fit.request, fit.pick, str(fit.size), kind=kind, reason=_why_no_more(fit), command=command))
        )
    if not rows:
        return _nothing(request)
    accumulation = request.accumulation or 1
    held = _("Micro-batches of a step on each rank: {count}.").format(count=accumulation)
    if accumulation > 1 and not asked.get("accumulation"):
        held = _(
            "Several micro-batches make a step, so gradients are held through each of them; --accumulation 1 asks otherwise."
        )
    return _sorted(rows, request, [held])


def _why_no_more(fit: LargestFit) -> str:
    if fit.next_bytes is None:
        return _("{size}: more was not tried.").format(size=fit.size)
    return _("{next} would need {needed}, and {room} is there beside the margin.").format(
        next=fit.size + 1, needed=format_bytes(fit.next_bytes), room=format_bytes(fit.option.room_bytes)
    )


def _seq_len(model: Any, asked: dict[str, Any]) -> Found:
    _refuse(asked, "seq_len")
    lengths = _Lengths(model, {**asked, "micro_batch": asked.get("micro_batch") or 1})
    first = lengths.request(_MULTIPLE)
    rows: list[tuple[int, SolveRow]] = []
    for settings in ladder(first) or ladder(lengths.request(_SHORT[-1])):
        length = lengths.longest(settings)
        if length:
            request = lengths.request(length)
            command = command_of(model, lengths.asked, seq_len=length, **chosen(settings, first))
            reason = lengths.why_no_longer(settings, length)
            needed = lengths.needed(settings, length)
            rows.append(
                (length, bare_row(request, needed, str(length), kind=kind_of(settings, first), reason=reason, command=command))
            )
    if not rows:
        return _nothing(lengths.request(_SHORT[-1]))
    found = _sorted(rows, first, [])
    found.answers = [_timed(lengths.request(int(row.value)), row) for row in found.answers]
    return found


def _timed(request: Request, row: SolveRow) -> SolveRow:
    """The answer is also said how fast it is."""
    from brim.planner.ladder import option_of

    settings = next(each for each in ladder(request) if kind_of(each, request) == row.kind)
    return row_of(
        request,
        Pick(option_of(request, settings), request.cuts[0]),
        row.value,
        kind=row.kind,
        reason=row.reason,
        command=row.command,
    )


class _Lengths:
    """The same question at other lengths."""

    def __init__(self, model: Any, asked: dict[str, Any]) -> None:
        self.asked = asked
        self._first = make_request(model, **asked, seq_len=_SHORT[-1])
        self._made: dict[int, Request] = {}
        self._options: dict[tuple[Settings, int], Option] = {}
        found = longest_position(self._first.question.config or {})
        self.positions = found[0] if found is not None else None
        self.probed = self._first.measured.length if self._first.measured is not None else LONGEST_SEQUENCE
        self.most = min(LONGEST_SEQUENCE, self.positions or LONGEST_SEQUENCE, self.probed)

    def request(self, length: int) -> Request:
        length = min(length, self.most)
        if length not in self._made:
            known = {"data": self._first.data, "tokenizer": None} if self._first.data is not None else {}
            self._made[length] = make_request(self._first.question.model, **{**self.asked, **known}, seq_len=length)
        return self._made[length]

    def longest(self, settings: Settings) -> int:
        if not self.fits(settings, min(_MULTIPLE, self.most)):
            return next((length for length in _SHORT if length <= self.most and self.fits(settings, length)), 0)
        if self.most < _MULTIPLE:
            return self.most
        count = largest_that(lambda number: self.fits(settings, number * _MULTIPLE), self.most // _MULTIPLE)
        is_last = count == self.most // _MULTIPLE and self.most % _MULTIPLE
        return self.most if is_last and self.fits(settings, self.most) else count * _MULTIPLE

    def fits(self, settings: Settings, length: int) -> bool:
        request = self.request(length)
        return self._option(settings, length).fits(request.cuts[0])

    def needed(self, settings: Settings, length: int) -> int:
        return self._option(settings, length).device_bytes(self.request(length).cuts[0])

    def why_no_longer(self, settings: Settings, length: int) -> str:
        if length == self.positions:
            return _("{length}: the model's positions end there, and memory would allow it.").format(length=length)
        if length == self.probed:
            return _("{length}: no longer sequences were probed.").format(length=length)
        if length >= self.most - self.most % _MULTIPLE:
            return _("{length}: more was not tried.").format(length=length)
        longer = 2 * length if length < _MULTIPLE else length + _MULTIPLE
        return _("{next} tokens would need {needed}, and {room} is there beside the margin.").format(
            next=longer,
            needed=format_bytes(self.needed(settings, longer)),
            room=format_bytes(self._option(settings, longer).room_bytes),
        )

    def _option(self, settings: Settings, length: int) -> Option:
        key = settings, length
        if key not in self._options:
            request = self.request(length)
            target = request.base.target_len
            mine = replace(settings, seq_len=request.length, target_len=target)
            self._options[key] = Option(request, mine, Sampler(request), rates_of(request.where, request.host_cores))
        return self._options[key]
