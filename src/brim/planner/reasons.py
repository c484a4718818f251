"""Why a configuration stands where it stands: every choice with a because, in the order in which a person would ask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from brim.errors import BrimError
from brim.locale import _
from brim.memory.compatibility import check
from brim.planner.search import LARGE_LOGITS, TIME_ERROR, logits_bytes
from brim.planner.space import may_chunk
from brim.sizes import format_bytes
from brim.speed import constants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.planner.host import HostSide
    from brim.planner.request import Request
    from brim.planner.search import Found, Pick
    from brim.records import MemoryPrediction


def reasons_of(
    request: Request, pick: Pick, best: Pick | None, found: Found, memory: MemoryPrediction, host: HostSide
) -> Iterator[str]:
    """Sentences about one configuration; about the best in full, about others what they cost and save against it."""
    if best is not None and pick is not best:
        yield _against(pick, best)
        return
    yield _why_slices(request, pick)
    yield _why_micro_batch(request, pick)
    text = _("{needed} predicted and {margin} that stay free are within {limit}. The margin: {because}.")
    if pick.option.is_probed:
        text = _("{needed} by what was measured and {margin} that stay free are within {limit}. The margin: {because}.")
    yield text.format(
        needed=format_bytes(memory.peak_device_bytes),
        margin=format_bytes(pick.option.margin.bytes),
        limit=format_bytes(request.where.limit_bytes),
        because=pick.option.margin.because,
    )
    yield from _why_choices(request, pick, found)
    yield from host.reasons


def _against(pick: Pick, best: Pick) -> str:
    more = pick.seconds / best.seconds - 1
    bytes_less = best.option.device_bytes(best.cut) - pick.option.device_bytes(pick.cut)
    change = (_("{size} less memory") if bytes_less >= 0 else _("{size} more memory")).format(size=format_bytes(abs(bytes_less)))
    if more < 0:
        text = _("{share:.1%} faster than the plan, within the error of predicted times, and less simple; {change}.")
        return text.format(share=-more, change=change)
    return _("{share:.1%} slower than the best, {change}.").format(share=more, change=change)


def _why_slices(request: Request, pick: Pick) -> str:
    cut, ranks = pick.cut, request.base.ranks
    if cut.is_even and ranks == 1:
        text = _("{micro} x {accumulation} = {effective} sequences in every step: exactly the effective batch, {because}.")
    elif cut.is_even:
        text = _(
            "{micro} x {accumulation} x {ranks} = {effective} sequences in every step: exactly the effective batch, {because}."
        )
    else:
        text = _(
            "{accumulation} micro-batches of at most {micro} on each GPU sum to {effective}: exactly the effective batch, {because}; they "
            "differ in size, and every token weighs the same."
        )
    return text.format(
        micro=cut.micro_batch,
        accumulation=cut.accumulation,
        ranks=ranks,
        effective=request.effective_batch,
        because=request.effective_because,
    )


def _why_micro_batch(request: Request, pick: Pick) -> str:
    option, cut = pick.option, pick.cut
    if request.micro_batch is not None and request.micro_batch != cut.micro_batch:
        return _("Micro-batches of up to {asked} were asked for; as many equal ones are of {micro}.").format(
            asked=request.micro_batch, micro=cut.micro_batch
        )
    if len(request.cuts) == 1:
        return _("The slices are as they were asked for.")
    larger = next((each for each in request.cuts if each.micro_batch > cut.micro_batch), None)
    if larger is None:
        return _("One micro-batch holds the whole share of a GPU: nothing is accumulated.")
    if not option.fits(larger):
        return _("Micro-batch {larger}, the next size that needs fewer micro-batches, does not fit.").format(
            larger=larger.micro_batch
        )
    share = option.seconds(larger) / pick.seconds - 1
    return _("Micro-batch {larger} would fit, and is predicted {share:.1%} slower.").format(
        larger=larger.micro_batch, share=share
    )


def _why_choices(request: Request, pick: Pick, found: Found) -> Iterator[str]:
    """What the nearest other value of each free choice would do."""
    settings = pick.option.settings
    if "checkpointing" not in request.pinned:
        yield _why_checkpointing(pick, found)
    if "precision" not in request.pinned and request.where.gpu is not None:
        if settings.precision == "amp-fp16":
            yield _("amp-fp16: {gpu} has no bfloat16.").format(gpu=request.where.label)
        elif settings.precision == "amp-bf16":
            yield _("amp-bf16: tensor cores at full speed, float32 weights where they train, and no loss scaling.")
        elif settings.precision == "fp32" and not any(other.option.settings.precision != "fp32" for other in found.others):
            yield _("fp32: with half-precision products nothing fits, because the weights are then held twice.")
    if "attention" not in request.pinned and request.where.gpu is not None:
        if pick.option.attention == "flash2":
            yield _why_flash2(pick, found)
        elif not request.where.gpu.flash_attention:
            yield _("{attention} ({kernel}): flash attention needs compute capability 8.0, and {gpu} is older.").format(
                attention=pick.option.attention, kernel=pick.option.attention_kernel, gpu=request.where.label
            )
        else:
            yield _("{attention}: flash2 needs the package flash-attn, so it is planned only with --attention flash2.").format(
                attention=pick.option.attention
            )
    if "optimizer" not in request.pinned and settings.optimizer == "adamw-fused":
        yield _("adamw-fused: the update of AdamW in one kernel, without temporaries.")
    if "loss" not in request.pinned and settings.loss == "chunked":
        yield _why_chunked(pick, found)
    if "sharding" not in request.pinned and settings.ranks > 1:
        yield _why_sharding(pick, found)


def _why_checkpointing(pick: Pick, found: Found) -> str:
    mine = pick.option.settings.checkpointing
    rivals = [other for other in found.others if other.option.settings.checkpointing != mine]
    if mine == "none":
        if rivals:
            return _(
                "No checkpointing: it fits without, and computing activations again would cost {share:.0%} more time."
            ).format(share=rivals[0].seconds / pick.seconds - 1)
        return _("No checkpointing: it fits without.")
    if rivals:
        return _("Checkpointing: without it only micro-batch {micro} fits, which takes {share:.1%} more time.").format(
            micro=rivals[0].cut.micro_batch, share=rivals[0].seconds / pick.seconds - 1
        )
    return _("Checkpointing: without it nothing fits.")


def _why_flash2(pick: Pick, found: Found) -> str:
    rival = next((other for other in found.others if other.option.attention == "sdpa"), None)
    if rival is None:
        return _("flash2: the package flash-attn is installed here.")
    return _("flash2: the package flash-attn is installed here. sdpa is predicted to be {share:.1%} slower.").format(
        share=rival.seconds / pick.seconds - 1
    )


def _why_chunked(pick: Pick, found: Found) -> str:
    rivals = [other for other in found.others if other.option.settings.loss == "standard"]
    if not rivals:
        return _("Chunked loss: the same step without the logits of all tokens; with the standard loss nothing fits.")
    rival = rivals[0]
    return _(
        "Chunked loss: the same step without the logits of all tokens; the standard loss fits with micro-batch {micro} in {precision}, and "
        "takes {share:.0%} more time."
    ).format(micro=rival.cut.micro_batch, precision=rival.option.settings.precision, share=rival.seconds / pick.seconds - 1)


def _why_sharding(pick: Pick, found: Found) -> str:
    mine = pick.option.settings.sharding
    rivals = [other for other in found.others if other.option.settings.sharding != mine]
    rival = next((other for other in rivals if other.option.settings.sharding == "ddp"), rivals[0] if rivals else None)
    if rival is None:
        return _("{sharding}: the fastest engine of those that fit.").format(sharding=mine)
    fastest = min(rivals, key=lambda other: other.seconds)
    if fastest.seconds < pick.seconds:
        return _(
            "{sharding}: the simplest. {other} is predicted {share:.1%} faster, less than the error of predicted times ({error:.0%})."
        ).format(
            sharding=mine, other=fastest.option.settings.sharding, share=1 - fastest.seconds / pick.seconds, error=TIME_ERROR
        )
    return _("{sharding}: {other} is predicted {share:.1%} slower.").format(
        sharding=mine, other=rival.option.settings.sharding, share=rival.seconds / pick.seconds - 1
    )


def hints_of(request: Request, best: Pick | None) -> Iterator[str]:
    """What was not allowed, or not tried, and would help."""
    logits = logits_bytes(request, best.cut.micro_batch if best is not None else request.cuts[0].micro_batch)
    loss = best.option.settings.loss if best is not None else request.base.loss
    was_tried = may_chunk(request.pinned, request.base, request.question.model, request.where)
    if loss == "standard" and not was_tried and logits > LARGE_LOGITS * request.where.limit_bytes:
        yield _(
            "The logits of a micro-batch take about {size}. --loss chunked never holds them all and leaves the step as it is."
        ).format(size=format_bytes(logits))
    gpu = request.where.gpu
    is_fp32 = best is not None and best.option.settings.precision == "fp32" and "precision" not in request.pinned
    if is_fp32 and gpu is not None and gpu.bf16 and request.base.method == "full":
        yield _(
            "fp32 leaves the tensor cores idle. --vary precision allows bfloat16 weights, which are half as large and many times as fast."
        )


def assumptions_of(request: Request, found: Found) -> Iterator[str]:
    """What was not said, and what the prediction rests on."""
    from brim.memory.assumptions import assumptions
    from brim.memory.obtain import Obtained

    yield from request.assumptions
    option = found.best.option if found.best is not None else next(iter(found.options), None)
    if option is not None:
        question = request.question
        obtained = Obtained(trace=None, facts=option.facts)  # type: ignore[arg-type]
        # What the plan chose is no assumption.
        given = replace(question.given, sharding=option.settings.sharding)
        yield from assumptions(given, option.settings, question.where, question.config, obtained)
    gpu, measured = request.where.gpu, request.measured
    if measured is not None and option is not None:
        yield from measured.assumptions(option.settings)
    if measured is not None and measured.scale is not None:
        pass  # said with what was measured
    elif gpu is not None and gpu.bandwidth_bytes_per_second is None:
        yield _("Nothing is known of this card's speed: times are for comparing configurations only.")
    elif gpu is not None:
        yield _(
            "Times come from the data sheet and published efficiencies, not from a measurement: trust their order more than their size."
        )
    else:
        yield _("Times are for a CPU of the usual kind: trust their order more than their size.")
    if request.base.nodes > 1 and request.link is None:
        text = _("{link} between nodes, all links of a node together: no --link was given.")
        yield text.format(link=constants.NODE_LINK)
    if request.base.ranks > 1 and found.best is not None and gpu is not None:
        yield _(
            "On other numbers of GPUs the structure of the plan is kept and its slices are chosen anew; a plan for that number may find a "
            "better one."
        )
    if request.lengths is not None and not request.lengths.are_equal:
        yield _("Times are for micro-batches of equal counts, sorted by length inside the step; brim's own slicing pads less.")
    yield _("The loader keeps up: waiting for data is not counted.")


def warnings_of(request: Request, best: Pick | None) -> Iterator[str]:
    """What runs, and is seldom wanted."""
    if request.measured is not None:
        yield from request.measured.warnings()
    settings = best.option.settings if best is not None else request.base
    if request.base.ranks == 1 and (request.link is not None or request.noise_scale is not None):
        yield _("--link and --noise-scale are for the curve of several GPUs, and this plan is for one: they change nothing.")
    try:
        yield from check(settings, request.question.config, request.where.gpu)
    except BrimError:
        return
    if request.samples is not None:
        yield from too_few(request.samples, request.effective_batch)


def too_few(samples: int, effective_batch: int) -> Iterator[str]:
    """An effective batch that the data cannot fill."""
    if samples < effective_batch:
        text = _(
            "Effective batch {effective:,}: the data has {samples:,} sequences, so every step holds all of them and no more."
        )
        yield text.format(effective=effective_batch, samples=samples)
