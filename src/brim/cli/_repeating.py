"""The commands that would do it again, from the records of what was done."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from brim.workload.reading import sources_in
from brim.workload.records import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from brim.records import Emulation, Measurement, Observation, Plan, RunCard, Verification

_TOKENIZER: Final = "tokenizer "
_FLAGS: Final = {
    "task": "--task", "method": "--method", "lora_rank": "--lora-rank", "lora_alpha": "--lora-alpha", "lora_dropout": "--lora-dropout",
    "lora_dtype": "--lora-dtype", "base_dtype": "--base-dtype",
    "loss": "--loss", "max_length": "--seq-len", "target_length": "--target-len", "effective_batch": "--effective-batch",
}  # fmt: skip
"""Of both verbs; what is at its default is not said."""
_FLAGS_OF_PLAN: Final = {"epochs": "--epochs", "learning_rate": "--learning-rate", "warmup_steps": "--warmup-steps"}
_ALWAYS: Final = frozenset({"max_length", "effective_batch"})
_DEFAULTS: Final = {field.name: field.default for field in fields(Workload)}


def commands_of(
    *,
    run: RunCard | None = None,
    plan: Plan | None = None,
    probe: Measurement | None = None,
    verification: Verification | None = None,
    observation: Observation | None = None,
    emulation: Emulation | None = None,
    folder: Path | None = None,
) -> tuple[str, ...]:
    """What was typed, where that is written down; else what asks the same question."""
    found: list[list[str]] = []
    if run is not None:
        found.append(list(run.command) or ["brim", "train", run.model, "--data", run.data.source, "-o", str(folder)])
    elif plan is not None:
        found.append(["brim", "plan", plan.workload.model, *_plan_words(plan)])
    elif probe is not None:
        found.append(["brim", "probe", probe.workload.model, *_probe_words(probe)])
    elif verification is not None:
        found.append(["brim", "verify", verification.model])
    if emulation is not None:
        # A card of which only the memory was given has a name of its own, which the catalogue does not know.
        name = str(emulation.memory_bytes) if emulation.gpu.startswith("gpu-") else emulation.gpu
        card = f"{name}*{emulation.gpus}" if emulation.gpus > 1 else name
        options = ["--full"] if emulation.steps_requested is None else ["--steps", str(emulation.steps_requested)]
        options += ["--compute"] if emulation.compute else []
        found.append(
            ["brim", "emulate", "--gpu", card, "--memory", str(emulation.memory_bytes), *options, "--", *emulation.command]
        )
    if observation is not None:
        found.append(["brim", "observe", "--", *observation.command])
    if folder is not None:
        found += [["brim", "doctor", str(folder)], ["brim", "report", str(folder)]]
    return tuple(shlex.join(words) for words in found)


def _plan_words(plan: Plan) -> Iterator[str]:
    workload, machine = plan.workload, plan.machine
    yield from _workload_words(workload, {**_FLAGS, **_FLAGS_OF_PLAN})
    yield from _data_words(plan)
    if workload.samples is not None and not (plan.data is not None and plan.data.source):
        yield from ("--samples", str(workload.samples))
    if machine.accelerators:
        count = len(machine.accelerators)
        yield from ("--gpu", machine.accelerators[0].gpu.name + (f"*{count}" if count > 1 else ""))
        yield from ("--nodes", str(machine.nodes)) if machine.nodes > 1 else ()
        if plan.scaling is not None:
            yield from ("--link", plan.scaling.between.name) if machine.nodes > 1 else ()
            noise = plan.scaling.batches.noise_scale
            yield from ("--noise-scale", f"{noise:g}") if noise is not None else ()
        return
    yield from ("--device", "cpu")
    memory = plan.best.memory if plan.best is not None else None
    yield from ("--memory", str(memory.limit_bytes)) if memory is not None else ()


def _probe_words(probe: Measurement) -> Iterator[str]:
    yield from _workload_words(probe.workload, _FLAGS)
    yield from _data_words(probe)
    if probe.settings is not None:
        for flag, value, default in (
            ("--precision", probe.settings.precision, "fp32"),
            ("--optimizer", probe.settings.optimizer, "adamw"),
            ("--checkpointing", probe.settings.checkpointing, "none"),
            ("--attention", probe.settings.attention, None),
        ):
            yield from (flag, value) if value not in (None, default) else ()
    yield from ("--objective", probe.objective) if probe.objective != "fastest" else ()
    yield from ("--device", "cpu") if probe.device == "cpu" else ()
    yield from ("--memory", str(probe.limit_bytes)) if probe.limit_bytes is not None else ()


def _workload_words(workload: Workload, flags: dict[str, str]) -> Iterator[str]:
    for name, flag in flags.items():
        value: Any = getattr(workload, name)
        if value is not None and (name in _ALWAYS or value != _DEFAULTS[name]):
            yield from (flag, f"{value:g}" if isinstance(value, float) else str(value))
    yield from ("--lora-targets", ",".join(workload.lora_targets)) if workload.lora_targets else ()
    for pattern in workload.freeze:
        yield from ("--freeze", pattern)
    if workload.max_grad_norm != 1.0:
        yield from ("--max-grad-norm", "0" if workload.max_grad_norm is None else f"{workload.max_grad_norm:g}")
    yield from () if workload.padded else ("--unpadded",)


def _data_words(record: Plan | Measurement) -> Iterator[str]:
    if record.data is None or not record.data.source:
        return
    for source in sources_in(record.data.source):
        yield from ("--data", source)
    if record.data.counted_by.startswith(_TOKENIZER):
        yield from ("--tokenizer", record.data.counted_by.removeprefix(_TOKENIZER))
