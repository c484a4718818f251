"""Measurements as a probe would write them, made from a truth that the test knows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import brim
from brim.machine.catalogue import find_gpu
from brim.machine.records import Accelerator, Host, Machine
from brim.records import AffineFit, Measurement, Proven, ShapePoint, Trial
from brim.sizes import GIB, MIB
from brim.step.budget import ShapeCost
from brim.workload.records import Workload
from brim.workload.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRUTH = ShapeCost(fixed=200 * MIB, per_token=20_000, per_squared_length=8)
SECONDS = ShapeCost(fixed=0.01, per_token=2e-5, per_squared_length=1e-9)
HOST = Host(memory_bytes=16 * GIB, available_bytes=12 * GIB, cores=4.0, affinity_cores=4, shm_free_bytes=4 * GIB)


def cpu() -> Machine:
    """Four cores and no card."""
    return Machine(host=HOST)


def gpu_machine(name: str) -> Machine:
    """One card of the catalogue."""
    gpu = find_gpu(name).gpu
    return Machine(accelerators=(Accelerator(index=0, gpu=gpu, total_bytes=gpu.memory_bytes),), host=HOST)


def measurement(
    *,
    model: str = "tiny",
    length: int = 512,
    target: int | None = None,
    ran: Sequence[int] = (4, 12, 16),
    failed: Sequence[int] = (),
    shapes: Sequence[tuple[int, ...]] = (),
    bytes_of: Callable[..., Any] = TRUTH,
    seconds_of: Callable[..., Any] = SECONDS,
    limit_bytes: int | None = 600 * MIB,
    margin_bytes: int = 20 * MIB,
    device: str = "cpu",
    machine: Machine | None = None,
    settings: Settings | None = None,
    effective_batch: int = 64,
    **changes: Any,
) -> Measurement:
    """Trials of the sizes `ran` and `failed` at the longest length, and points at other shapes; settings are the plan's usual."""
    lengths = (length,) if target is None else (length, target)
    settings = settings or Settings(accumulation=2)
    task: Any = settings.task or ("seq2seq" if target is not None else "causal-lm")

    def is_among_others(size: int) -> bool:
        return settings.accumulation > 1 or size < effective_batch

    trials = [replace(_trial(size, lengths, bytes_of, seconds_of), accumulates=is_among_others(size)) for size in ran]
    trials += [
        Trial(micro_batch=size, max_length=length, verdict="out-of-memory", phase="backward", accumulates=is_among_others(size))
        for size in failed
    ]
    proven = [
        Proven(micro_batch=trial.micro_batch, tokens_per_second=1000.0, peak_bytes=trial.peak_device_bytes or 0)
        for trial in trials
        if trial.verdict == "ok"
    ]
    made = Measurement(
        workload=Workload(
            model=model, task=task, effective_batch=effective_batch, max_length=length, target_length=target, method=settings.method,
            lora_rank=settings.lora_rank, lora_targets=settings.lora_targets, lora_dtype=settings.lora_dtype,
            base_dtype=settings.base_dtype, freeze=settings.freeze, optimizer=settings.optimizer, loss=settings.loss,
            padded=settings.padded, max_grad_norm=settings.max_grad_norm,
        ),
        machine=machine or cpu(),
        settings=replace(settings, task=task, seq_len=length, target_len=target, micro_batch=max(ran, default=1)),
        device=device,
        limit_bytes=limit_bytes,
        margin_bytes=margin_bytes,
        trials=tuple(trials),
        points=tuple(replace(_point(shape, bytes_of, seconds_of), accumulates=is_among_others(shape[0])) for shape in shapes),
        largest=max(proven, key=lambda each: each.micro_batch, default=None),
        fastest=max(proven, key=lambda each: each.micro_batch, default=None),
        fit=line(trials),
    )  # fmt: skip
    return replace(made, **changes)


def line(trials: Sequence[Trial]) -> AffineFit | None:
    """Through the smallest and the largest trial, and how far the others are from it."""
    known = sorted((each.micro_batch, each.peak_device_bytes) for each in trials if each.peak_device_bytes is not None)
    if len(known) < 2:
        return None
    (low, least), (high, most) = known[0], known[-1]
    slope = (most - least) / (high - low)
    residual = max(abs(peak - least - slope * (size - low)) for size, peak in known)
    return AffineFit(base_bytes=least - slope * low, bytes_per_sequence=slope, residual_bytes=residual)


def grid(counts: Sequence[int] = (1, 2, 4, 8), lengths: Sequence[int] = (128, 256, 384)) -> list[tuple[int, ...]]:
    """Every count at every length."""
    return list(product(counts, lengths))


def _trial(size: int, lengths: tuple[int, ...], bytes_of: Callable[..., Any], seconds_of: Callable[..., Any]) -> Trial:
    peak, seconds = int(bytes_of(size, *lengths)), float(seconds_of(size, *lengths))
    return Trial(
        micro_batch=size, max_length=lengths[0], verdict="ok", steps=2, peak_allocated_bytes=peak, peak_reserved_bytes=peak,
        peak_device_bytes=peak, micro_batch_seconds=seconds, update_seconds=0.02, step_seconds=2 * seconds + 0.02,
        tokens_per_second=1000.0,
    )  # fmt: skip


def _point(shape: tuple[int, ...], bytes_of: Callable[..., Any], seconds_of: Callable[..., Any]) -> ShapePoint:
    count, length, *targets = shape
    return ShapePoint(
        sequences=count, length=length, target_length=targets[0] if targets else 0, peak_bytes=int(bytes_of(*shape)),
        seconds=float(seconds_of(*shape)),
    )  # fmt: skip


LENGTH = 256
"""Of the sequences of `probe_of`."""


@cache
def predicted(model: str, size: int, accumulation: int = 2, gpu: str | None = None) -> int:
    """What is predicted of the structure that is probed here."""
    where: dict[str, Any] = {"device": "cpu", "memory": GIB} if gpu is None else {"gpu": gpu, "precision": "amp-fp16"}
    return brim.estimate(model, micro_batch=size, seq_len=LENGTH, accumulation=accumulation, **where).peak_device_bytes


def probe_of(model: str, factor: float = 1.1, *, gpu: str | None = None, accumulation: int = 2, **changes: Any) -> Measurement:
    """A device that takes `factor` times what is predicted of it."""
    where: dict[str, Any] = {} if gpu is None else {"device": "cuda:0", "machine": gpu_machine(gpu)}
    given: dict[str, Any] = {
        "model": model,
        "length": LENGTH,
        "ran": (4, 8),
        "bytes_of": lambda size, _length: factor * predicted(model, size, accumulation, gpu),
        "settings": Settings(accumulation=accumulation, precision="fp32" if gpu is None else "amp-fp16"),
        "effective_batch": 64 if accumulation > 1 else 1,
        "limit_bytes": GIB,
        **where,
        **changes,
    }
    return measurement(**given)
