"""The search: every structure that could win is traced, the fastest slice of it that fits is found, and the fastest of all is the plan.

A structure is passed over, and counted, where another one is known to be at least as good, where its weights alone are more than there
is, or where it would be slower than the best even with all memory of the world. The best is therefore the best of the whole space, by the
planner's own model; and since more memory only ever adds configurations, it never gets slower with more memory.

Times that differ by less than the model's own error are not told apart: of such configurations the simplest is the plan (DDP before an
engine that shards, no offload), and a chunked loss, of which every micro-batch takes a trace of its own, is tried only where it could gain
more than that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from brim.activity import doing
from brim.errors import BrimError
from brim.locale import _
from brim.memory.ahead import trace_ahead
from brim.planner.host import offload_fits
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.space import may_chunk, structures_of
from brim.step.cuts import Cut
from brim.workload.resolve import Model

if TYPE_CHECKING:
    from brim.planner.request import Request
    from brim.workload.settings import Settings

_ENGINES = ("zero1", "zero2", "zero3", "fsdp")
_WEIGHT_BYTES = {"fp32": 4.0, "amp-bf16": 4.0, "amp-fp16": 4.0, "bf16": 2.0, "fp16": 2.0}
_BASE_BYTES = {"lora": 2.0, "qlora": 0.5, "lora-8bit": 1.0}
_ADAM_STATE = 2.0
_SPREADS_WEIGHTS = ("zero3", "fsdp")
_CHOICES = ("checkpointing", "attention", "sharding", "precision", "optimizer", "method", "offload", "loss")
TIME_ERROR = 0.10
"""Of a predicted time: the median error over published runs was 9 percent (docs/gpu.md)."""
LARGE_LOGITS = 0.10
"""Of the limit: from here on a chunked loss is worth a look."""
LOGITS_BYTES = 10
"""For each logit of a micro-batch, at the peak: half precision, float32, and the gradient of that."""
MOST_LOGITS_BYTES = 20
"""The same, at most: as the model makes it, in float32, its softmax and both gradients are 16; the allocator's rounding made it 17."""
_OFFLOADED_BYTES = 16
"""Per parameter on the host: float32 weight, gradient and two moments (DeepSpeed's own estimators, zero/stage_1_and_2.py and stage3.py)."""
_PAGED_BYTES = 2
_SMALLER = (0.5, 0.25)
_MOST_TRIES = 3
"""Structures that are looked at for each, in the order of what they could reach."""


@dataclass(frozen=True)
class Pick:
    """A structure with a cut that fits."""

    option: Option
    cut: Cut

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.option.seconds(self.cut)


@dataclass
class Found:
    """What a search came to."""

    best: Pick | None
    others: list[Pick] = field(default_factory=list)
    """For every choice the fastest that chooses otherwise, fastest first."""
    options: list[Option] = field(default_factory=list)
    """All structures that were traced."""
    considered: int = 0
    passed_over: dict[str, int] = field(default_factory=dict)
    """Reasons, and how many configurations each spared."""


def search(request: Request) -> Found:
    """Find the fastest configuration that fits."""
    space = structures_of(request.pinned, request.base, request.question.model, request.where, request.vary)
    found = Found(None)
    sampler, rates = Sampler(request), rates_of(request.where, request.host_cores)
    failure: BrimError | None = None
    for structure in space.structures:
        found.considered += len(request.cuts)
        was_probed = request.was_probed(structure.settings)  # what ran is known to, whatever is predicted of it and of others
        reason = "" if was_probed else structure.dominated_by or too_large(request, structure.settings)
        if reason:
            found.passed_over[reason] = found.passed_over.get(reason, 0) + len(request.cuts)
            continue
        found.options.append(Option(request, structure.settings, sampler, rates))
    trace_ahead([pair for option in found.options if (pair := option.wanted()) is not None])
    refused: dict[object, BrimError] = {}
    for option in list(found.options):
        try:
            if option.settings.attention in refused:
                raise refused[option.settings.attention]
            option.trace()
        except BrimError as error:
            failure = error
            if option.settings.attention is not None:
                refused[option.settings.attention] = error  # the model has no such attention, whatever else is chosen
            found.options.remove(option)
            found.passed_over[str(error)] = found.passed_over.get(str(error), 0) + len(request.cuts)
    if not found.options and failure is not None:
        raise failure
    _choose(found)
    chunked = _with_chunked_loss(request, found)
    if chunked:
        found.options += chunked
        found.considered += len(chunked) * len(request.cuts)
        _choose(found)
    for option in found.options:
        option.keep()
    return found


def _with_chunked_loss(request: Request, found: Found) -> list[Option]:
    """Of the structures that were traced, with a chunked loss, those that could be faster than the best by more than the error of times."""
    micro_batch = found.best.cut.micro_batch if found.best is not None else request.cuts[0].micro_batch
    large = logits_bytes(request, micro_batch) > LARGE_LOGITS * request.where.limit_bytes
    if not large or not may_chunk(request.pinned, request.base, request.question.model, request.where):
        return []
    most_seconds = found.best.seconds * (1 - TIME_ERROR) if found.best is not None else inf
    smallest = request.cuts[0]
    saved = logits_bytes(request, smallest.micro_batch) * MOST_LOGITS_BYTES // LOGITS_BYTES
    hopeful = [
        option
        for option in found.options
        if option.bound() < most_seconds and option.device_bytes(smallest) - saved <= option.room_bytes
    ]
    chunked = [option.with_settings(replace(option.settings, loss="chunked")) for option in hopeful]
    trace_ahead([pair for option in chunked if (pair := option.wanted()) is not None])
    traced = []
    for option in chunked:
        try:
            option.trace()
        except BrimError as error:  # a model without a plain head
            found.passed_over[str(error)] = found.passed_over.get(str(error), 0) + len(request.cuts)
        else:
            traced.append(option)
    return traced


def logits_bytes(request: Request, micro_batch: int) -> int:
    """About what the logits of a micro-batch take at their peak; 0 where the vocabulary is not known."""
    config = request.question.config or {}
    vocabulary = (config.get("text_config") or config).get("vocab_size")
    if request.base.task != "causal-lm" or not isinstance(vocabulary, int):
        return 0
    return LOGITS_BYTES * vocabulary * request.length * micro_batch


def _choose(found: Found) -> None:
    """The best of all first; then, for every choice, the best that chooses otherwise: what that would cost and save."""
    by_bound = sorted(found.options, key=Option.bound)
    while True:
        doing("compare", count=found.considered)
        finder = _Finder()
        best = _best(by_bound, finder)
        if best is None:
            return
        best = _simplest(best, by_bound, finder)
        others = sorted([*_alternatives(best, by_bound, finder), *_smaller(best)], key=lambda pick: pick.seconds)
        # A bound let them pass; what is shown is looked at itself.
        trace_ahead([pair for pick in (best, *others) if (pair := pick.option.wanted(pick.cut)) is not None])
        if best.option.surely_fits(best.cut):
            found.best, found.others = best, [pick for pick in others if pick.option.surely_fits(pick.cut)]
            return


def _best(by_bound: list[Option], finder: _Finder) -> Pick | None:
    best: Pick | None = None
    for option in by_bound:
        if best is not None and option.bound() >= best.seconds:
            break
        pick = finder.pick(option)
        if pick is not None and (best is None or pick.seconds < best.seconds):
            best = pick
    return best


def _simplest(best: Pick, by_bound: list[Option], finder: _Finder) -> Pick:
    """The simplest that is as fast as the best, as far as times can be told apart, and differs from it in nothing else."""
    most_seconds = best.seconds * (1 + TIME_ERROR)
    simpler = [
        option
        for option in by_bound
        if _complexity(option.settings) < _complexity(best.option.settings)
        and _but_for_engine(option.settings) == _but_for_engine(best.option.settings)
        and option.bound() <= most_seconds
    ]
    picks = [pick for option in simpler if (pick := finder.pick(option)) is not None and pick.seconds <= most_seconds]
    return min(picks, key=lambda pick: (_complexity(pick.option.settings), pick.seconds), default=best)


def _complexity(settings: Settings) -> tuple[bool, bool]:
    return settings.offload != "none", settings.sharding not in {None, "none", "ddp"}


def _but_for_engine(settings: Settings) -> Settings:
    return replace(settings, offload="none", sharding=None)


class _Finder:
    """The fastest cut of each structure, found once; structures that differ little begin where others ended."""

    def __init__(self) -> None:
        self._picks: dict[int, Pick | None] = {}
        self._ended: dict[object, int] = {}

    def pick(self, option: Option) -> Pick | None:
        if id(option) not in self._picks:
            alike = option.settings.checkpointing, option.settings.method, option.settings.loss
            cut = option.fastest(self._ended.get(alike))
            if option.fitting is not None:
                self._ended[alike] = option.fitting
            self._picks[id(option)] = Pick(option, cut) if cut is not None else None
        return self._picks[id(option)]


def _alternatives(best: Pick, by_bound: list[Option], finder: _Finder) -> list[Pick]:
    found: dict[int, Pick] = {}
    for name in _CHOICES:
        mine = getattr(best.option.settings, name)
        others = [option for option in by_bound if getattr(option.settings, name) != mine]
        if name == "sharding":
            others.sort(key=lambda option: option.settings.sharding != "ddp")  # what most people would compare with
        picks = (finder.pick(option) for option in others[:_MOST_TRIES])
        pick = next((pick for pick in picks if pick is not None), None)
        if pick is not None:
            found[id(pick)] = pick
    return list(found.values())


def _smaller(best: Pick) -> list[Pick]:
    """The same with smaller slices: what less memory would cost."""
    cuts = best.option.request.cuts
    wanted = [next(cut for cut in cuts if cut.micro_batch >= best.cut.micro_batch * share) for share in _SMALLER]
    return [Pick(best.option, cut) for cut in dict.fromkeys(wanted) if 1 < cut.micro_batch < best.cut.micro_batch]


def too_large(request: Request, settings: Settings) -> str:
    """Why it cannot fit, by its weights alone, or why the host cannot hold what it offloads; empty if it may."""
    model = request.question.model
    if not isinstance(model, Model) or model.config is None:
        return ""
    if request.was_probed(settings):
        return ""
    parameters = model.parameters()
    if not host_allows(request, settings):
        return _("the host has no room for what would be offloaded")
    if settings.offload != "none":
        return ""
    if request.where.gpu is not None and _least_bytes(settings, parameters) > request.room_bytes:
        return _("the weights alone are more than the card holds")
    return ""


def host_allows(request: Request, settings: Settings) -> bool:
    """Whether the host holds what the settings keep there; a host that is not known holds nothing, unless it was asked for."""
    model = request.question.model
    if not isinstance(model, Model) or model.config is None:
        return True
    needed = host_bytes(settings, model.parameters())
    is_pinned = "offload" in request.pinned or (settings.offload == "none" and "optimizer" in request.pinned)
    if not needed or (is_pinned and request.host_bytes is None):
        return True
    return offload_fits(needed, request.host_bytes, settings.gpus)


def _least_bytes(settings: Settings, parameters: int) -> float:
    """Below what any step of this kind needs."""
    if settings.method == "full":
        if settings.freeze:
            return 0.0
        each = _WEIGHT_BYTES[settings.precision]
        if settings.sharding in _ENGINES:
            each = 2.0 if settings.precision != "fp32" else 4.0
        elif settings.optimizer in {"adamw", "adamw-fused", "adamw-loop"}:
            each *= 1 + _ADAM_STATE
    else:
        each = 4.0 if settings.method == "lora" and settings.precision == "fp32" else _BASE_BYTES[settings.method]
    return each * parameters / (settings.ranks if settings.sharding in _SPREADS_WEIGHTS else 1)


def host_bytes(settings: Settings, parameters: int) -> int:
    """What offloading keeps on one host for all its GPUs: float32 weights and moments, and the half-precision weights themselves."""
    paged = (
        _PAGED_BYTES * parameters * settings.gpus if settings.optimizer == "paged-adamw-8bit" and settings.method == "full" else 0
    )
    if settings.offload == "none":
        return paged
    each = _OFFLOADED_BYTES if settings.method == "full" else 0
    return paged + (each + (2 if settings.offload == "parameters" else 0)) * parameters // settings.nodes
