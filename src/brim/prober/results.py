"""The record of a probe, and where finished ones are kept: by model, recipe, data, device and versions."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from brim.errors import BrimError
from brim.locale import _
from brim.machine.host import cache_folder, host
from brim.machine.records import Accelerator, Machine
from brim.records import DataReport, Measurement
from brim.version import __version__
from brim.workload.records import Workload
from brim.workload.resolve import Model

if TYPE_CHECKING:
    from pathlib import Path

    from brim.prober.request import ProbeRequest

_LIBRARIES: Final = ("torch", "transformers", "peft", "bitsandbytes")
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def record(request: ProbeRequest, **found: Any) -> Measurement:
    """Everything about one probe."""
    largest = found.get("largest")
    settings, size = request.settings, largest.micro_batch if largest is not None else 1
    return Measurement(
        workload=_workload(request, size),
        machine=_machine(request),
        settings=replace(settings, micro_batch=size, accumulation=_accumulation(request, size)),
        device=request.device,
        objective=request.objective,
        limit_bytes=request.where.limit_bytes,
        margin_bytes=request.margin_bytes,
        data=_data(request),
        assumptions=tuple(_assumptions(request)),
        versions=versions(),
        **{**found, "warnings": (*request.warnings, *found.get("warnings", ()))},
    )


def _accumulation(request: ProbeRequest, size: int) -> int:
    return request.accumulation if request.effective_batch is None else -(-request.effective_batch // size)


def find(request: ProbeRequest) -> Measurement | None:
    """What was measured before, if asking again would ask the same."""
    path = _path(request)
    if not path.exists():
        return None
    try:
        found = Measurement.read(path)
    except BrimError:  # damaged, or of another brim: measured again
        return None
    # The same model may lie elsewhere, or have another name.
    return replace(found, workload=replace(found.workload, model=_name(request)))


def keep(request: ProbeRequest, measurement: Measurement) -> None:
    """For the next time. What cannot be written is not kept."""
    path = _path(request)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        measurement.write(path)
    except (OSError, BrimError):
        return


def versions() -> dict[str, str]:
    """Of all that decides what a trial takes."""
    found = {"brim": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _path(request: ProbeRequest) -> Path:
    lengths = request.lengths
    settings = {name: value for name, value in asdict(request.settings).items() if name != "micro_batch"}
    question = {
        "model": dict(request.question.config or {}),
        "settings": settings,
        "device": request.device,
        "gpu": request.where.name,
        # What is free of a card differs from minute to minute: all of it is one question.
        "limit": request.where.limit_bytes if request.is_cpu or request.limit_was_asked else "all",
        "margin": request.margin_bytes / request.where.limit_bytes,
        "processor": host().processor,
        "cores": host().cores,
        "environment": {name: os.environ.get(name) for name in _THREADS},
        "emulated": os.environ.get("BRIM_CARD"),  # times on an emulated card are not those of a real one
        "objective": request.objective,
        "effective_batch": request.effective_batch,
        "start": request.start,
        "trials": (request.max_trials, request.time_limit),
        "lengths": None
        if lengths is None
        else hashlib.sha256(lengths.tokens.tobytes() + lengths.target_tokens.tobytes()).hexdigest(),
        "versions": versions(),
    }
    text = json.dumps(question, sort_keys=True, default=str)
    return cache_folder() / "probe" / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"


def _name(request: ProbeRequest) -> str:
    model = request.question.model
    return model.given if isinstance(model, Model) else request.name


def _data(request: ProbeRequest) -> DataReport | None:
    lengths = request.data
    if lengths is None or request.lengths is None:
        return None
    seen = request.lengths.tokens
    return DataReport(
        source=lengths.source,
        sequences=request.lengths.n,
        tokens=int((seen + request.lengths.target_tokens).sum()),
        counted_by=lengths.counted_by,
        exact=lengths.exact,
        mean_tokens=float(seen.mean()),
        median_tokens=int(np.median(seen)),
        p95_tokens=int(np.quantile(seen, 0.95)),
        longest_tokens=int(lengths.tokens.max()),
        cut=int((lengths.tokens > request.longest.length).sum()) if lengths.documents is None else 0,
    )


def _workload(request: ProbeRequest, size: int) -> Workload:
    settings, lengths = request.settings, request.lengths
    return Workload(
        model=_name(request),
        task=settings.task or "causal-lm",
        effective_batch=request.effective_batch or size * request.accumulation,
        max_length=request.longest.length,
        target_length=settings.target_len,
        lengths=lengths.histogram() if lengths is not None else (),
        samples=lengths.n if lengths is not None else None,
        padded=settings.padded,
        method=settings.method,
        lora_rank=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        lora_targets=settings.lora_targets,
        lora_dtype=settings.lora_dtype,
        base_dtype=settings.base_dtype,
        freeze=settings.freeze,
        optimizer=settings.optimizer,
        loss=settings.loss,
        max_grad_norm=settings.max_grad_norm,
    )


def _machine(request: ProbeRequest) -> Machine:
    gpu = request.where.gpu
    here = () if gpu is None else (Accelerator(index=0, gpu=gpu, total_bytes=request.total_bytes or request.where.limit_bytes),)
    return Machine(accelerators=here, host=host(), origin="detected")


def _assumptions(request: ProbeRequest) -> list[str]:
    said = list(request.where.assumptions)
    said.append(_("Weights are fresh ones: memory and time do not depend on their values."))
    if request.effective_batch is None and request.accumulation == 1:
        said.append(
            _("A step is one micro-batch, because no --effective-batch was given; with accumulation the largest may be smaller.")
        )
    if request.lengths is None:
        text = _("Every sequence has {length} tokens: no --data was given.")
        if request.given.get("seq_len") is None:
            text = _("Every sequence has {length} tokens, as is usual: neither --seq-len nor --data was given.")
        said.append(text.format(length=request.longest.length))
    elif not request.lengths.exact:
        said.append(_("The lengths are guessed from characters: give --tokenizer to be sure."))
    return said
