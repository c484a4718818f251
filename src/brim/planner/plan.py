"""`brim.plan`: from a workload and a machine to one recommended configuration, the alternatives, and the reasons."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from brim.machine.records import Accelerator, Machine
from brim.planner.host import HostSide, host_side
from brim.planner.nearest import missing_bytes, nearest_that_fit
from brim.planner.padding import report
from brim.planner.reasons import assumptions_of, hints_of, reasons_of, warnings_of
from brim.planner.request import Request, make_request
from brim.planner.scaling import scaling_of
from brim.planner.schedule import follow_up
from brim.planner.search import Found, Pick, host_bytes, search
from brim.records import Candidate, DataReport, Plan, SpeedPrediction
from brim.version import __version__
from brim.workload.lengths import fixed_lengths
from brim.workload.records import Workload
from brim.workload.settings import settings_to_name

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from brim.machine.records import GPU
    from brim.records import Advice, Measurement
    from brim.records.predictions import Source
    from brim.workload.lengths import Lengths
    from brim.workload.reading import Given
    from brim.workload.resolve import Model

_INTEGER_BYTES = 8
_TENSORS_OF_A_BATCH = 3
"""Token ids, mask and labels."""
_LOGITS_SHARE = 0.25
"""Of the host's free memory, what the logits of one step of evaluation may take there."""


def plan(
    model: str | os.PathLike[str] | Model,
    *,
    gpu: GPU | str | None = None,
    memory: int | str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    effective_batch: int | None = None,
    data: Given | Lengths | None = None,
    tokenizer: str | None = None,
    columns: Mapping[str, str] | None = None,
    samples: int | None = None,
    epochs: float = 1.0,
    drop_last: bool = False,
    host_memory: int | str | None = None,
    host_cores: float | None = None,
    learning_rate: float | None = None,
    from_batch: int | None = None,
    warmup_steps: int | None = None,
    link: str | None = None,
    noise_scale: float | None = None,
    vary: tuple[str, ...] | str = (),
    margin: str | float | None = None,
    probe: str | os.PathLike[str] | Measurement | None = None,
    apply: bool = False,
    trust_remote_code: bool = False,
    cache: bool = True,
    **settings: Any,
) -> Plan:
    """Choose the fastest configuration that fits, at exactly the effective batch that was asked for.

    `settings` are the fields of `brim.Settings`; what is given is pinned, the rest is chosen. Another optimizer, method, precision of the
    weights, or offload are tried only where `vary` names them. `margin` (`"5%"`, `"1GiB"`) stays free of the memory. `data` gives the real
    lengths; without it every sequence has `seq_len` tokens. With `from_batch`, the batch that the recipe was tuned for, the plan says how
    learning rate, beta2 and warm-up should follow; `apply` puts the learning rate into the configuration. `probe` is the result of
    `brim probe`, or its file: measured bytes and seconds then stand for the models', on the device that was measured. For several GPUs the
    plan has a curve over their number: `link` names the wires between nodes (`"infiniband-ndr*8"`, `"ethernet-10"`), `noise_scale` is that
    of the gradient in sequences, for the guide to the batch.
    """
    began = time.perf_counter()
    request = make_request(
        model,
        gpu=gpu,
        memory=memory,
        device=device,
        effective_batch=effective_batch,
        data=data,
        tokenizer=tokenizer,
        columns=columns,
        samples=samples,
        epochs=epochs,
        drop_last=drop_last,
        host_memory=host_memory,
        host_cores=host_cores,
        learning_rate=learning_rate,
        from_batch=from_batch,
        warmup_steps=warmup_steps,
        link=link,
        noise_scale=noise_scale,
        vary=vary,
        margin=margin,
        probe=probe,
        trust_remote_code=trust_remote_code,
        cache=cache,
        **settings,
    )
    made = plan_request(request, apply=apply, curve=True)
    return replace(made, elapsed_seconds=round(time.perf_counter() - began, 3))


def plan_request(request: Request, *, apply: bool = False, curve: bool = False) -> Plan:
    """The plan of a question that is complete; with `curve`, and for several GPUs, what other numbers of them would do."""
    found = search(request)
    advice = advice_of(request, found)
    rate = request.learning_rate
    if apply and rate is not None:
        rate = next((each.then for each in advice if each.setting == "learning_rate"), rate)
    best = found.best
    shown = [candidate_of(request, pick, rate, best, found) for pick in ([best] if best else []) + found.others]
    alternatives = shown[1:] if best is not None else nearest_that_fit(request)
    scaling = scaling_of(request, found) if curve else None
    for option in found.options:
        option.keep()
    return Plan(
        workload=workload_of(request, found),
        machine=machine_of(request),
        fits=best is not None,
        best=shown[0] if best is not None else None,
        alternatives=tuple(alternatives),
        considered=found.considered,
        margin_bytes=request.margin.bytes,
        missing_bytes=missing_bytes(request) if best is None else 0,
        data=data_of(request, best),
        scaling=scaling,
        advice=advice,
        hints=tuple(hints_of(request, best)),
        sources=sources_of(request, best),
        assumptions=tuple(assumptions_of(request, found)),
        warnings=tuple(warnings_of(request, best)),
        brim_version=__version__,
    )


def sources_of(request: Request, best: Pick | None) -> dict[str, Source]:
    """Where each setting of the answer came from."""
    settings = best.option.settings if best is not None else request.base
    sliced = {"micro_batch": request.micro_batch, "accumulation": request.accumulation}
    searched = {"checkpointing", "attention", *(("precision", "optimizer", "loss") if request.where.gpu is not None else ())}
    searched |= {"sharding"} if settings.ranks > 1 else set()
    found: dict[str, Source] = {"effective_batch": request.effective_source}
    for name in settings_to_name(settings, request.pinned):
        is_chosen = name in searched or name in sliced or getattr(settings, name) != getattr(request.base, name)
        if name in request.pinned or sliced.get(name) is not None:
            found[name] = "given"
        else:
            found[name] = "plan" if is_chosen else "default"
    if request.data is not None and request.length == int(request.data.tokens.max()):
        found["seq_len"] = "data"
    return found


def candidate_of(request: Request, pick: Pick, rate: float | None, best: Pick | None, found: Found) -> Candidate:
    """A pick as a record."""
    settings, cut = pick.option.settings, pick.cut
    memory = pick.option.prediction(cut)
    host = host_of(request, pick)
    return Candidate(
        micro_batch=cut.micro_batch,
        accumulation=cut.accumulation,
        world_size=settings.ranks,
        effective_batch=request.effective_batch,
        slices=cut.slices,
        eval_batch=eval_batch_of(request, pick),
        precision=settings.precision,
        checkpointing=settings.checkpointing,
        attention=cast("Any", pick.option.attention if pick.option.attention != "none" else "sdpa"),
        optimizer=settings.optimizer,
        method=settings.method,
        loss=settings.loss,
        sharding=settings.sharding or "none",
        offload=settings.offload,
        num_workers=host.num_workers,
        pin_memory=host.pin_memory,
        prefetch_factor=host.prefetch_factor,
        learning_rate=rate,
        memory=memory,
        speed=speed_of(request, pick),
        reasons=tuple(reasons_of(request, pick, best, found, memory, host)),
    )


def speed_of(request: Request, pick: Pick) -> SpeedPrediction:
    """Seconds of a step and of an epoch."""
    step = pick.seconds
    steps = request.steps_per_epoch
    epoch = None
    if steps is not None and request.samples is not None:
        epoch = step * (steps if request.drop_last else request.samples / request.effective_batch)
    return SpeedPrediction(
        step_seconds=step,
        tokens_per_second=request.effective_batch * request.mean_tokens / step,
        epoch_seconds=epoch,
        steps_per_epoch=steps,
    )


def host_of(request: Request, pick: Pick) -> HostSide:
    """Workers, prefetching and pinning beside this configuration."""
    settings = pick.option.settings
    tokens = pick.cut.micro_batch * (request.length + (request.base.target_len or 0))
    is_cpu = request.where.gpu is None
    held = host_bytes(settings, pick.option.total_parameters)
    side = host_side(
        available_bytes=request.host_bytes,
        cores=request.host_cores,
        ranks=settings.gpus,
        batch_bytes=tokens * _INTEGER_BYTES * _TENSORS_OF_A_BATCH,
        shm_bytes=request.shm_bytes,
        held_bytes=held,
        device="cpu" if is_cpu else "cuda",
    )
    return side if request.measured is None else request.measured.loader(side, settings.gpus)


def eval_batch_of(request: Request, pick: Pick) -> int:
    """As large as the micro-batch, whose forward is known to fit; less where the logits that are gathered on the host would fill it."""
    size = request.base.eval_batch or pick.cut.micro_batch
    if request.base.eval_batch is not None or request.host_bytes is None or request.base.task == "classification":
        return size
    config = request.question.config or {}
    vocabulary = (config.get("text_config") or config).get("vocab_size")
    if not isinstance(vocabulary, int):
        return size
    one = vocabulary * (request.base.target_len or request.length) * 4 * pick.option.settings.gpus
    return max(1, min(size, int(_LOGITS_SHARE * request.host_bytes / one)))


def workload_of(request: Request, found: Found) -> Workload:
    """The promise: nothing of the machine is in it, but where the recipe itself was allowed to vary."""
    base = found.best.option.settings if found.best is not None else request.base
    lengths = request.lengths
    return Workload(
        model=request.question.name,
        task=base.task or "causal-lm",
        effective_batch=request.effective_batch,
        max_length=request.length,
        target_length=base.target_len,
        lengths=lengths.histogram() if lengths is not None else (),
        samples=request.samples,
        epochs=request.epochs,
        padded=base.padded,
        method=base.method,
        lora_rank=base.lora_rank,
        lora_alpha=base.lora_alpha,
        lora_dropout=base.lora_dropout,
        lora_targets=base.lora_targets,
        lora_dtype=base.lora_dtype,
        base_dtype=base.base_dtype,
        freeze=base.freeze,
        optimizer=base.optimizer,
        loss=base.loss,
        learning_rate=request.learning_rate,
        warmup_steps=request.warmup_steps,
        max_grad_norm=base.max_grad_norm,
    )


def machine_of(request: Request) -> Machine:
    """The machine that the plan is for."""
    where, settings = request.where, request.base
    accelerators: tuple[Accelerator, ...] = ()
    if where.gpu is not None:
        accelerators = tuple(
            Accelerator(index=index, gpu=where.gpu, total_bytes=where.limit_bytes) for index in range(settings.gpus)
        )
    if request.measured is not None:
        return replace(
            request.measured.measurement.machine,
            accelerators=accelerators,
            nodes=settings.nodes,
            origin="recorded",
            notes=where.assumptions,
        )
    return Machine(
        accelerators=accelerators,
        nodes=settings.nodes,
        origin="detected" if where.is_here or where.gpu is None else "catalogue",
        notes=where.assumptions,
    )


def data_of(request: Request, best: Pick | None) -> DataReport | None:
    """What is known of the data."""
    lengths = request.data
    if lengths is None:
        if request.samples is None:
            return None
        lengths = fixed_lengths(request.samples, request.length, request.base.target_len)
    count = lengths.cut(request.length, request.base.target_len).n
    return report(
        lengths,
        max_length=request.length,
        target_length=request.base.target_len,
        effective_batch=min(request.effective_batch, count),
        micro_batch=min(best.cut.micro_batch if best is not None else 1, request.effective_batch),
        ranks=request.base.ranks if request.effective_batch <= count else 1,
    )


def advice_of(request: Request, found: Found) -> tuple[Advice, ...]:
    """How the recipe should follow the batch."""
    if request.from_batch is None:
        return ()
    optimizer = found.best.option.settings.optimizer if found.best is not None else request.base.optimizer
    return follow_up(
        from_batch=request.from_batch,
        to_batch=request.effective_batch,
        optimizer=optimizer,
        learning_rate=request.learning_rate,
        warmup_steps=request.warmup_steps,
    )
