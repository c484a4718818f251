"""Nothing fits: how much is missing, and the nearest changes that would do, each tried.

Changes that leave the optimizer step as it is come first, then those that change the recipe, then other hardware. What a change can save at
most is often known without a trace, and then decides without one.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from brim.activity import doing
from brim.errors import BrimError
from brim.locale import _, sentences
from brim.machine.catalogue import gpus
from brim.memory.ahead import trace_ahead
from brim.memory.where import find_where
from brim.planner.command import flags_of
from brim.planner.ladder import rungs
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.request import Request, make_request
from brim.planner.search import LARGE_LOGITS, LOGITS_BYTES, MOST_LOGITS_BYTES, Found, Pick, logits_bytes, search, too_large
from brim.planner.space import may_chunk, structures_of
from brim.sizes import format_bytes
from brim.workload.resolve import Model
from brim.workload.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.memory.where import Where
    from brim.records import Candidate

MOST_ANSWERS = 5
_COUNTS = (2, 4, 8, 16, 32, 64)
_MULTIPLE = 128
_SHORTEST_SHARE = 8
"""A sequence shorter than this part of what was asked is not near it."""
_STATE_BYTES = 7
"""For each parameter that trains, what 8-bit moments save of 8, with room for their blocks."""


@dataclass(frozen=True)
class Change:
    """Other terms, and the request on them."""

    settings: dict[str, Any]
    """As keywords of `brim.plan`; what the user types."""
    request: Request
    because: str
    structure: Settings | None = None
    """The smallest structure, where it is known; else the last rung is tried."""
    is_searched: bool = False
    """Whether all structures are searched, as a plan on these terms would: what is shown is that plan."""


def nearest_that_fit(request: Request) -> list[Candidate]:
    """Configurations on other terms that fit. Of each, `reasons[0]` is the flags to add, and `reasons[1]` says what they do."""
    found: list[Candidate] = []
    for change in _changes(request):
        if len(found) == MOST_ANSWERS:
            break
        candidate = _tried(change)
        if candidate is not None:
            found.append(candidate)
    return found


def missing_bytes(request: Request) -> int:
    """How much more memory the smallest configuration of the request needs, margin included; 0 where it fits."""
    return max(0, _least(request)[0])


def _least(request: Request) -> tuple[int, Settings]:
    """Bytes that the smallest configuration lacks, and which it is."""
    options = [Option(request, settings, *_beside(request)) for settings in _smallest(request)]
    trace_ahead([pair for option in options if (pair := option.wanted(request.cuts[0])) is not None])
    found: list[tuple[int, Settings]] = []
    failure: BrimError | None = None
    for option in options:
        try:
            found.append((option.device_bytes(request.cuts[0]) - option.room_bytes, option.settings))
        except BrimError as error:
            failure = error  # a model without this attention
        option.keep()
    if not found and failure is not None:
        raise failure
    return min(found, key=lambda each: each[0])


def _beside(request: Request) -> tuple[Sampler, Any]:
    return Sampler(request), rates_of(request.where, request.host_cores)


def _smallest(request: Request) -> list[Settings]:
    """The last rung, in every precision and attention: which of them needs least is not the same everywhere."""
    last = rungs(request)[-1]
    space = structures_of(request.pinned, request.base, request.question.model, request.where, request.vary)
    known = [structure.settings for structure in space.structures if not structure.dominated_by]
    same = [each for each in known if replace(each, precision=last.precision, attention=last.attention) == last]
    found = list(dict.fromkeys((last, *same)))
    if may_chunk(request.pinned, request.base, request.question.model, request.where) and _is_head_large(request):
        found += [replace(each, loss="chunked") for each in found]
    return found


def _is_head_large(request: Request) -> bool:
    return logits_bytes(request, request.cuts[0].micro_batch) > LARGE_LOGITS * request.where.limit_bytes


def _tried(change: Change) -> Candidate | None:
    """The plan on these terms; for other hardware, with the smallest structure, which most often takes one trace."""
    request = change.request
    doing("nearest", flags=shlex.join(flags_of(change.settings)))
    try:
        if change.is_searched:
            best = search(request).best
            return _candidate(change, best) if best is not None else None
        settings = change.structure or rungs(request)[-1]
        option = Option(request, settings, *_beside(request))
        if too_large(request, settings) or not option.smallest_fits():
            return None
        option.trace()
        cut = option.fastest()
    except BrimError:
        return None
    if cut is None or not option.surely_fits(cut):
        return None
    made = _candidate(change, Pick(option, cut))
    option.keep()
    return made


def _candidate(change: Change, pick: Pick) -> Candidate:
    from brim.planner.plan import candidate_of

    request = change.request
    made = candidate_of(request, pick, request.learning_rate, pick, Found(pick))
    needed = _("{needed} of {limit}, with micro-batch {micro} and {margin} of margin.").format(
        needed=format_bytes(pick.option.device_bytes(pick.cut)),
        limit=format_bytes(request.where.limit_bytes),
        micro=pick.cut.micro_batch,
        margin=format_bytes(pick.option.margin.bytes),
    )
    settings = dict(change.settings)
    if "micro_batch" in settings:
        settings |= {"micro_batch": pick.cut.micro_batch, "accumulation": pick.cut.accumulation}
    return replace(made, reasons=(shlex.join(flags_of(settings)), sentences(change.because, needed)))


def _changes(request: Request) -> Iterator[Change]:
    """From the nearest to the farthest; what cannot help is left out."""
    extra: dict[str, Any] = {}
    for settings, because in _unpinned(request):
        change = _changed(request, {**extra, **settings}, because)
        if _holds(change.request):
            yield replace(change, is_searched="micro_batch" not in settings)
        else:
            extra |= settings  # It does not do alone: it goes with whatever comes next.
    terms = _changed(request, extra, "").request if extra else request
    for change in _other_terms(terms):
        yield replace(change, settings={**extra, **change.settings})


def _unpinned(request: Request) -> Iterator[tuple[dict[str, Any], str]]:
    """What was pinned, and leaves the step as it is when it is let go."""
    if request.micro_batch is not None or request.accumulation is not None:
        free: dict[str, Any] = {"micro_batch": None, "accumulation": None, "effective_batch": request.effective_batch}
        yield free, _("Smaller micro-batches, and more of them, make the same step.")
    if request.pinned.get("checkpointing") == "none":
        yield {"checkpointing": "full"}, _("Checkpointing computes activations again and makes the same step.")


def _other_terms(request: Request) -> Iterator[Change]:
    missing, smallest = _least(request)
    yield from _chunked(request, missing)
    yield from (replace(change, is_searched=True) for change in _other_recipe(request, missing))
    yield from _shorter(request, smallest)
    yield from _on_the_host(request)
    yield from _more_gpus(request)
    yield from _larger_gpu(request)


def _chunked(request: Request, missing: int) -> Iterator[Change]:
    """Where the search has not tried it: with the loss pinned, or on the CPU."""
    was_tried = may_chunk(request.pinned, request.base, request.question.model, request.where)
    is_possible = request.base.loss == "standard" and request.base.task == "causal-lm" and not was_tried
    if is_possible and missing < MOST_LOGITS_BYTES * logits_bytes(request, request.cuts[0].micro_batch) // LOGITS_BYTES:
        because = _("A chunked loss never holds all logits and makes the same step.")
        yield replace(_changed(request, {"loss": "chunked"}, because), is_searched=True)


def _shorter(request: Request, smallest: Settings) -> Iterator[Change]:
    """The longest multiple that fits, by halving; one trace knows most of them."""
    low, high = 0, -(-request.length // _MULTIPLE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _of_length(request, smallest, middle * _MULTIPLE) else (low, middle)
    change = _of_length(request, smallest, low * _MULTIPLE)
    if change is not None and low * _MULTIPLE * _SHORTEST_SHARE >= request.length:
        yield change


def _of_length(request: Request, smallest: Settings, length: int) -> Change | None:
    """None where it does not fit, or is no length."""
    if not length:
        return None
    change = _changed(request, {"seq_len": length}, _("Sequences of up to {length} tokens.").format(length=length))
    structure = replace(smallest, seq_len=length, target_len=change.request.base.target_len)
    option = Option(change.request, structure, *_beside(change.request))
    fits = not too_large(change.request, structure) and option.smallest_fits()
    return replace(change, structure=structure) if fits else None


def _other_recipe(request: Request, missing: int) -> Iterator[Change]:
    base = request.base
    if base.method == "full" and request.where.gpu is not None:
        saved = _STATE_BYTES * _parameters(request)
        if base.optimizer in {"adamw", "adamw-fused", "adamw-loop"} and missing < saved:
            yield _changed(request, {"optimizer": "adamw-8bit"}, _("Moments of 8 bits instead of 32."))
    if base.method == "full":
        yield _changed(request, {"method": "lora"}, _("Adapters train, and the model stays as it is."))
    if base.method in {"full", "lora", "lora-8bit"} and request.where.gpu is not None:
        yield _changed(request, {"method": "qlora"}, _("Adapters train, on a model of 4 bits."))


def _on_the_host(request: Request) -> Iterator[Change]:
    if request.host_bytes is None or request.where.gpu is None or request.base.offload != "none":
        return
    for offload, sharding in (("optimizer", "zero2"), ("parameters", "zero3")):
        because = _("The host's memory holds part of it, and the link to it is slow.")
        yield _changed(request, {"offload": offload, "sharding": sharding}, because)


def _more_gpus(request: Request) -> Iterator[Change]:
    """The fewest that do, each with a shard of everything."""
    gpu = request.where.gpu
    if gpu is None:
        return
    where = replace(request.where, count=None)
    for count in _COUNTS:
        if count <= request.base.gpus or count > request.effective_batch:
            continue
        named = {} if gpu.vendor == "unknown" or request.where.is_here else {"gpu": gpu.name}
        change = _changed(
            request,
            {**named, "gpus": count, "sharding": "fsdp"},
            _("{count} of these GPUs, each with a shard of the model.").format(count=count),
            where=where,
        )
        if _holds(change.request):
            yield change
            return


def _larger_gpu(request: Request) -> Iterator[Change]:
    """The smallest card of the catalogue that does it as it is."""
    mine = request.where.gpu
    if mine is None:
        return
    larger = [
        gpu for gpu in gpus() if gpu.backend == "cuda" and not gpu.is_laptop and gpu.usable_bytes > request.where.limit_bytes
    ]
    needs: dict[object, int] = {}
    for gpu in sorted(larger, key=lambda gpu: gpu.usable_bytes):
        where = find_where(gpu, None, None)
        assert where is not None
        said: dict[str, Any] = {"gpu": gpu.name}
        if request.base.gpus > 1:
            said["gpus"] = request.base.gpus
        change = _changed(
            request,
            said,
            _("The smallest card of the catalogue that holds it in half precision: {gpu}.").format(gpu=gpu.label),
            where=where,
        )
        if _holds(change.request, needs):
            yield change
            return


def _holds(request: Request, needs: dict[object, int] | None = None) -> bool:
    """Whether the smallest structure fits; `needs` keeps what cards of one kind need."""
    try:
        settings = rungs(request)[-1]
        if too_large(request, settings):
            return False
        where = request.where
        key = settings, where.target, where.outside(settings.ranks)
        needs = {} if needs is None else needs
        if key not in needs:
            needs[key] = Option(request, settings, *_beside(request)).device_bytes(request.cuts[0])
        return needs[key] <= request.room_bytes
    except BrimError:
        return False


def _parameters(request: Request) -> int:
    model = request.question.model
    return model.parameters() if isinstance(model, Model) else request.where.limit_bytes


def _changed(request: Request, settings: dict[str, Any], because: str, *, where: Where | None = None) -> Change:
    """The same question on other terms."""
    pinned = {**request.pinned, "micro_batch": request.micro_batch, "accumulation": request.accumulation}
    if where is not None:
        pinned["gpus"] = request.base.gpus
    inside = {name: value for name, value in settings.items() if name not in {"gpu", "effective_batch"}}
    is_asked = request.margin.because == _("as asked")
    made = make_request(
        request.question.model,
        where=where or request.where,
        effective_batch=request.effective_batch,
        data=request.data,
        samples=request.samples,
        epochs=request.epochs,
        drop_last=request.drop_last,
        host_memory=request.host_bytes,
        host_cores=request.host_cores,
        learning_rate=request.learning_rate,
        from_batch=request.from_batch,
        warmup_steps=request.warmup_steps,
        vary=tuple(request.vary),
        margin=request.margin.bytes if is_asked else None,
        step=request.question.step,
        cache=request.question.cache,
        **{**pinned, **inside},
    )
    kept: dict[str, Any] = {
        "effective_because": request.effective_because,
        "effective_source": request.effective_source,
        "shm_bytes": request.shm_bytes,
    }
    if where is None and request.measured is not None:
        # A probe speaks for its own device only.
        kept |= {"measured": request.measured, "margin": request.margin, "unmeasured_margin": request.unmeasured_margin}
    return Change(settings, replace(made, **kept), because)
