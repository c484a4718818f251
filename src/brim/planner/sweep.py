"""`brim plan --sweep`: the same structure at several micro-batches or lengths, or on several GPUs, one row each.

Rows are there to be compared, so nothing but the swept value changes from one to the next. What is pinned stays; what is free is chosen
once, for the first row that fits, and said. A row that does not fit names the flags under which it would. One trace serves all
micro-batches, and most often all lengths.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from brim.errors import BrimError, UsageError
from brim.locale import _, sentences
from brim.planner.answers import Sweep, SweepRow, Swept, Verdict
from brim.planner.command import flags_of
from brim.planner.ladder import described, ladder, option_of, rungs, same_kind
from brim.planner.plan import speed_of
from brim.planner.request import Request, make_request
from brim.planner.schedule import learning_rate_factor
from brim.planner.search import Pick
from brim.planner.space import may_chunk
from brim.sizes import format_bytes
from brim.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from brim.planner.option import Option
    from brim.step.cuts import Cut
    from brim.workload.resolve import Model
    from brim.workload.settings import Settings

VERDICTS: tuple[tuple[float, Verdict], ...] = (
    (0.50, "conservative"),
    (0.80, "balanced"),
    (0.95, "recommended"),
    (0.98, "aggressive"),
)
"""Below which share of the card each word stands; `limit` up to all of it."""
_MOST_ROWS = 64
_FREE = ("checkpointing", "loss", "sharding", "offload", "precision", "optimizer", "method")


def sweep(
    model: str | os.PathLike[str] | Model,
    values: str | Sequence[int],
    *,
    apply: bool = False,
    **asked: Any,
) -> Sweep:
    """Predict one row for each value. `asked` are the keywords of `brim.plan`.

    `values`: micro-batches (`"32,48,64"`, or numbers), `"seq-len:512,1024"` or `"gpu:t4,rtx-3090"`. Over micro-batches, `effective_batch`
    holds the batch; else it grows, as micro-batch x `accumulation` x GPUs. Over lengths and GPUs the effective batch is held, and each row
    takes the fastest micro-batch that fits, unless `micro_batch` is given.
    """
    del apply  # The rate of every row is shown beside it.
    began = time.perf_counter()
    what, read = read_values(values)
    _check(what, asked)
    requests = _requests(model, what, read, asked)
    like, chosen_for = _structure(requests)
    rows, picks = [], []
    for value, request in zip(read, requests, strict=True):
        pick = _pick(request, same_kind(request, like))
        picks.append(pick)
        row = _row(request, pick, value)
        rows.append(row if row.fits else _with_structure_that_fits(row, request, pick))
    first = requests[0]
    from_batch = first.from_batch or rows[0].effective_batch
    made = [_followed(row, picks[0], from_batch, first.learning_rate) for row in _against_first(rows)]
    return Sweep(
        model=first.question.name,
        device="gpu" if what == "gpu" else first.where.name,
        what=what,
        fits=any(row.fits for row in made),
        rows=tuple(made),
        structure=described(picks[0].option) | _differing(picks) | _lengths(what, first),
        from_batch=from_batch,
        reasons=tuple(_reasons(what, first, made, chosen_for)),
        assumptions=tuple(dict.fromkeys((*first.assumptions, *(note for each in requests for note in each.where.assumptions)))),
        elapsed_seconds=round(time.perf_counter() - began, 3),
        brim_version=__version__,
    )


def read_values(values: str | Sequence[int]) -> tuple[Swept, list[str]]:
    """`32,48,64` are micro-batches; `seq-len:` and `gpu:` before the values say otherwise."""
    what: str = "micro-batch"
    listed = [str(value) for value in values] if not isinstance(values, str) else []
    if isinstance(values, str):
        kind, colon, rest = values.partition(":")
        what, text = (kind.strip(), rest) if colon else (what, values)
        listed = [part.strip() for part in text.split(",")]
    if what not in get_args(Swept):
        text = _("--sweep {what}: is not possible; one of: {words}.")
        raise UsageError(text.format(what=what, words=", ".join(get_args(Swept))), hint=_hint())
    if not 1 <= len(listed) <= _MOST_ROWS or not all(listed):
        raise UsageError(_("--sweep takes 1 to {most} values.").format(most=_MOST_ROWS), hint=_hint())
    if what != "gpu":
        for value in listed:
            if not value.isdecimal() or int(value) < 1:
                raise UsageError(_("--sweep: {value!r} is not a whole number of at least 1.").format(value=value), hint=_hint())
    found: dict[str, Swept] = {name: name for name in get_args(Swept)}
    return found[what], listed


def verdict_of(share: float) -> Verdict:
    """One word for how much of the card is taken."""
    for below, word in VERDICTS:
        if share < below:
            return word
    return "limit" if share <= 1 else "does-not-fit"


def _hint() -> str:
    return _("Write --sweep 32,48,64 for micro-batches, --sweep seq-len:512,1024 or --sweep gpu:t4,rtx-3090.")


def _check(what: Swept, asked: dict[str, Any]) -> None:
    if what == "gpu" and asked.get("probe") is not None:
        raise UsageError(
            _("--probe measured one device, and --sweep gpu: compares others."),
            hint=_("Leave --probe out, or sweep micro-batches."),
        )
    swept = {"micro-batch": ("micro_batch",), "seq-len": ("seq_len",), "gpu": ("gpu", "memory", "device")}[what]
    for name in swept:
        if asked.get(name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(_("{flag} is what the sweep goes over.").format(flag=flag), hint=_("Leave it out."))
    if what == "micro-batch" and asked.get("effective_batch") is not None and asked.get("accumulation") is not None:
        text = _("A sweep over micro-batches holds --effective-batch or --accumulation, not both.")
        raise UsageError(text, hint=_("Leave one of them out."))


def _requests(model: Any, what: Swept, values: list[str], asked: dict[str, Any]) -> list[Request]:
    """One question for each value; the model is found, and data are measured, once."""
    made: list[Request] = []
    for value in values:
        changed: dict[str, Any] = {what.replace("-", "_"): value if what == "gpu" else int(value)}
        if made:
            model = made[0].question.model
            changed |= {"data": made[0].data, "tokenizer": None} if made[0].data is not None else {}
        made.append(make_request(model, **{**asked, **changed}))
    return made


@dataclass(frozen=True)
class _Chosen:
    """For which row the structure was chosen, and whether that row fits."""

    index: int
    fits: bool


def _structure(requests: list[Request]) -> tuple[Settings, _Chosen]:
    """The simplest under which the first row fits; of the next row, where that fits under none."""
    for index, request in enumerate(requests):
        for settings in ladder(request):
            option = option_of(request, settings)
            if any(option.fits(cut) for cut in request.cuts[:1]):
                return settings, _Chosen(index, fits=True)
    return rungs(requests[0])[-1], _Chosen(0, fits=False)


def _pick(request: Request, settings: Settings) -> Pick:
    option = option_of(request, settings)
    cut: Cut | None = request.cuts[0] if len(request.cuts) == 1 else option.fastest()
    pick = Pick(option, cut or request.cuts[0])
    pick.option.device_bytes(pick.cut)
    option.keep()
    return pick


def _with_structure_that_fits(row: SweepRow, request: Request, shown: Pick) -> SweepRow:
    """The row with the flags under which it fits: the simplest that keeps the margin, else the simplest that the card holds."""
    above_margin: SweepRow | None = None
    for changed, option, cut in _other_structures(request, shown):
        needed = option.device_bytes(cut)
        if needed > request.where.limit_bytes:
            continue
        keeps_margin = option.surely_fits(cut)
        fitting = replace(row, fits_with=shlex.join(flags_of(changed)), fits_with_bytes=needed, fits_with_margin=keeps_margin)
        if keeps_margin:
            return fitting
        above_margin = above_margin or fitting
    return above_margin or row


def _other_structures(request: Request, shown: Pick) -> Iterator[tuple[dict[str, Any], Option, Cut]]:
    """Simplest first: what changes against the structure that is shown, the structure, and its fastest slices."""
    listed = ladder(request)
    if may_chunk(request.pinned, request.base, request.question.model, request.where):
        listed += [replace(settings, loss="chunked") for settings in listed]
    for settings in listed:
        changed = {
            name: getattr(settings, name) for name in _FREE if getattr(settings, name) != getattr(shown.option.settings, name)
        }
        if not changed:
            continue
        try:
            option = option_of(request, settings)
            yield changed, option, request.cuts[0] if len(request.cuts) == 1 else option.fastest() or request.cuts[0]
        except BrimError:
            continue


def _lengths(what: Swept, request: Request) -> dict[str, str]:
    """The length that all rows share."""
    target = request.base.target_len
    return {} if what == "seq-len" else {"seq_len": str(request.length)} | ({"target_len": str(target)} if target else {})


def _row(request: Request, pick: Pick, value: str) -> SweepRow:
    needed, limit = pick.option.device_bytes(pick.cut), request.where.limit_bytes
    share = needed / limit
    fits = share <= 1
    speed = speed_of(request, pick)
    return SweepRow(
        value=value,
        micro_batch=pick.cut.micro_batch,
        accumulation=pick.cut.accumulation,
        effective_batch=request.effective_batch,
        memory_bytes=needed,
        limit_bytes=limit,
        share=share,
        verdict=verdict_of(share),
        reason=_why(request, pick, needed),
        keeps_margin=needed <= pick.option.room_bytes,
        steps_per_epoch=request.steps_per_epoch,
        step_seconds=speed.step_seconds if fits else None,
        epoch_seconds=speed.epoch_seconds if fits else None,
        tokens_per_second=speed.tokens_per_second if fits else None,
    )


def _why(request: Request, pick: Pick, needed: int) -> str:
    limit = request.where.limit_bytes
    share = needed / limit
    said = {"share": share, "limit": format_bytes(limit), "missing": format_bytes(max(0, needed - limit))}
    texts: dict[Verdict, str] = {
        "conservative": _("{share:.1%} of {limit}: more than half is idle."),
        "balanced": _("{share:.1%} of {limit}: room for more, or for longer sequences."),
        "recommended": _("{share:.1%} of {limit}: well filled, with room for what an estimate does not see."),
        "aggressive": _("{share:.1%} of {limit}: little is left for what an estimate does not see."),
        "limit": _("{share:.1%} of {limit}: next to nothing is left, and one long batch may be too much."),
        "does-not-fit": _("{share:.1%} of {limit}: {missing} too much."),
    }
    text = texts[verdict_of(share)].format(**said)
    if pick.option.room_bytes < needed <= limit:
        margin = _("It breaks the margin of {margin} that a plan keeps.").format(margin=format_bytes(pick.option.margin.bytes))
        return sentences(text, margin)
    return text


def _against_first(rows: list[SweepRow]) -> list[SweepRow]:
    """Speeds against the first row that has one."""
    first = next((row.tokens_per_second for row in rows if row.tokens_per_second), None)
    if first is None:
        return rows
    return [replace(row, speed=row.tokens_per_second / first if row.tokens_per_second else None) for row in rows]


def _followed(row: SweepRow, pick: Pick, from_batch: int, rate: float | None) -> SweepRow:
    factor = learning_rate_factor(from_batch, row.effective_batch, pick.option.settings.optimizer)
    return replace(row, learning_rate_factor=factor, learning_rate=rate * factor if rate is not None else None)


def _differing(picks: list[Pick]) -> dict[str, str]:
    """What the cards themselves make different: half precision is bfloat16 on some and float16 on others."""
    found: dict[str, list[str]] = {}
    for pick in picks:
        for name, word in described(pick.option).items():
            found.setdefault(name, []).append(word)
    return {name: ", ".join(dict.fromkeys(words)) for name, words in found.items() if len(set(words)) > 1}


def _grows(accumulation: int, ranks: int) -> str:
    if ranks > 1:
        text = _("Accumulation is held at {count} on {ranks} GPUs, so the effective batch grows with the micro-batch.")
    else:
        text = _("Accumulation is held at {count}, so the effective batch grows with the micro-batch.")
    return text.format(count=accumulation, ranks=ranks)


def _reasons(what: Swept, first: Request, rows: list[SweepRow], chosen: _Chosen) -> list[str]:
    row = rows[chosen.index]
    if chosen.fits:
        why = _("All rows share one structure: the simplest that fits at {value}; what you pin is kept.").format(value=row.value)
    else:
        why = _("All rows share one structure, the smallest; none of them fits.")
    if what != "micro-batch":
        held = _("The effective batch is held at {effective}, {because}.").format(
            effective=first.effective_batch, because=first.effective_because
        )
    elif len({each.effective_batch for each in rows}) == 1:
        held = _("The effective batch is held at {effective}; slices are as equal as they can be.").format(
            effective=first.effective_batch
        )
    else:
        held = _grows(row.accumulation, first.base.ranks)
    margin = _("A plan keeps {margin} free: {because}.").format(
        margin=format_bytes(first.margin.bytes), because=first.margin.because
    )
    return [why, held, margin]
