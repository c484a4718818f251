"""A probe's file as the ground of a plan: read it, take its device, and refuse what it cannot speak for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import UsageError
from brim.locale import _
from brim.memory.where import Where, find_where
from brim.records import Measurement
from brim.step.measured import check_plausible
from brim.workload.cards import find_card
from brim.workload.resolve import Model, find_model
from brim.workload.settings import DEFAULT_RANK, Settings

if TYPE_CHECKING:
    from brim.machine.records import GPU
    from brim.memory.estimate import Question

Probe = str | os.PathLike[str] | Measurement

_ALWAYS = ("task", "freeze", "loss")
_OF_ADAPTERS = ("lora_rank", "lora_dropout", "lora_targets", "lora_dtype", "base_dtype")
_ADAMW = {"adamw-fused": "adamw", "adamw-loop": "adamw"}
"""The same update in other kernels."""


def read_probe(probe: Probe) -> Measurement:
    """The measurement of a file, or as it is; refused where nothing ran in it, and where its figures cannot be."""
    found = probe if isinstance(probe, Measurement) else Measurement.read(Path(probe))
    check_plausible(found)
    if any(trial.verdict == "ok" for trial in found.trials):
        return found
    text = _("Nothing ran in this probe of {model}, so it says nothing about what fits.")
    hint = _("Probe again with more memory or shorter sequences, or plan without --probe.")
    if not found.complete:
        text = _(
            "The probe of {model} ended before any size had run: its time or its trials were used up, or it was interrupted."
        )
        hint = _("Probe again with more time or more trials, or plan without --probe.")
    raise UsageError(text.format(model=found.workload.model), hint=hint)


def where_probed(
    measurement: Measurement, gpu: GPU | str | None, memory: int | str | None, device: Literal["cpu", "cuda"] | None
) -> Where:
    """The device of the probe, with its limit; memory that is said wins, another kind of device is refused."""
    card = _card_of(measurement)
    said = find_where(gpu, memory, device) if gpu is not None or device == "cpu" else None
    is_other = said is not None and (said.gpu and said.gpu.name) != (card and card.name)
    if is_other or (device == "cuda" and card is None):
        ours = _name(said.gpu) if said is not None else _("a GPU")
        text = _("The probe ran on {theirs}, and the plan is for {ours}: one says nothing about the other.")
        raise UsageError(text.format(theirs=_name(card), ours=ours), hint=_hint())
    limit = memory if memory is not None else _limit_of(measurement, card)
    where = find_where(card, limit, "cpu" if card is None else None)
    assert where is not None
    note = _("The device is that of the probe: {device}.").format(device=_name(card))
    is_named = said is not None or device is not None
    return replace(
        where, count=said.count if said is not None else None, assumptions=(*where.assumptions, *(() if is_named else (note,)))
    )


def with_length(measurement: Measurement, settings: dict[str, Any], *, has_data: bool) -> dict[str, Any]:
    """Where no length was said and no data have one: that of the probe."""
    if has_data or settings.get("seq_len") is not None:
        return settings
    workload = measurement.workload
    known = {"seq_len": workload.max_length}
    if workload.target_length is not None and settings.get("target_len") is None:
        known["target_len"] = workload.target_length
    return settings | known


def check_same(measurement: Measurement, question: Question, vary: frozenset[str]) -> None:
    """Refuse a probe of another model or another recipe, or of shorter sequences."""
    workload, ours = measurement.workload, question.settings
    if isinstance(question.model, Model) and not _is_same_model(question.model, workload.model):
        text = _("The probe is of {theirs}, and the plan of {ours}.")
        raise UsageError(text.format(theirs=workload.model, ours=question.model.given), hint=_hint())
    theirs = _settings_of(measurement)
    names = [*_ALWAYS, *(() if "method" in vary else ("method", *_OF_ADAPTERS))]
    for name in names:
        _check_equal(name, getattr(theirs, name), getattr(ours, name))
    if "optimizer" not in vary:
        mine, other = (_ADAMW.get(each.optimizer, each.optimizer) for each in (ours, theirs))
        _check_equal("optimizer", other, mine)
    for name, probed, asked in (
        ("seq_len", workload.max_length, ours.seq_len or 0),
        ("target_len", workload.target_length or 0, ours.target_len or 0),
    ):
        if asked > probed:
            text = _("The probe measured sequences of up to {probed} tokens, and the plan has {asked}.")
            flag = "--" + name.replace("_", "-")
            hint = _("Probe again with {flag} {asked}, or plan with {flag} {probed}.")
            raise UsageError(text.format(probed=probed, asked=asked), hint=hint.format(flag=flag, asked=asked, probed=probed))


def check_structure(measurement: Measurement, ours: Settings) -> None:
    """Refuse a question about one structure where another one was probed."""
    if measurement.settings is None:
        return
    for name in ("precision", "checkpointing", "attention", "optimizer", "sharding", "offload", "gpus", "nodes"):
        _check_equal(name, usual(measurement.settings, name), usual(ours, name))


def usual(settings: Settings, name: str) -> Any:
    """A setting, where it was not said what is usual."""
    value = getattr(settings, name)
    if name == "sharding":
        return value or ("ddp" if settings.ranks > 1 else "none")
    return "sdpa" if name == "attention" and value is None else value


def _settings_of(measurement: Measurement) -> Settings:
    """The recipe of the probe as settings."""
    workload = measurement.workload
    return Settings(
        task=workload.task,
        method=workload.method,
        lora_rank=workload.lora_rank or (DEFAULT_RANK if workload.method != "full" else None),
        lora_dropout=workload.lora_dropout,
        lora_targets=workload.lora_targets,
        lora_dtype=workload.lora_dtype,
        base_dtype=workload.base_dtype,
        freeze=workload.freeze,
        optimizer=workload.optimizer,
        loss=workload.loss,
    )


def structure_of(measurement: Measurement, ours: Settings) -> Settings:
    """How the step of the probe was run, with everything filled in; a module of one's own has no settings, and is run as asked."""
    probed = measurement.settings or replace(ours, accumulation=2)
    return replace(
        probed,
        task=measurement.workload.task,
        seq_len=measurement.workload.max_length,
        target_len=measurement.workload.target_length,
        lora_rank=probed.lora_rank or (DEFAULT_RANK if probed.method != "full" else None),
        sharding=usual(probed, "sharding"),
    )


def _card_of(measurement: Measurement) -> GPU | None:
    """None: the CPU."""
    kind, _colon, index = measurement.device.partition(":")
    if kind in {"", "cpu"} or not measurement.machine.accelerators:
        return None
    known = {each.index: each.gpu for each in measurement.machine.accelerators}
    return known.get(int(index) if index.isdecimal() else 0, measurement.machine.accelerators[0].gpu)


def _limit_of(measurement: Measurement, card: GPU | None) -> int:
    """As the probe knew it; else what the largest that ran took."""
    if measurement.limit_bytes is not None:
        return measurement.limit_bytes
    peaks = [trial.peak_device_bytes for trial in measurement.trials if trial.verdict == "ok"]
    known = max((peak for peak in peaks if peak is not None), default=0)
    return known or (card.usable_bytes if card is not None else 0)


def _name(card: GPU | None) -> str:
    return card.label if card is not None else _("the CPU")


def _check_equal(name: str, theirs: Any, ours: Any) -> None:
    if theirs == ours:
        return
    flag = "--" + name.replace("_", "-")
    text = _("The probe ran with {flag} {theirs}, and the plan is for {flag} {ours}.")
    hint = _("Plan with {flag} {theirs}, or probe again with {flag} {ours}.")
    said = {"flag": flag, "theirs": _word(theirs), "ours": _word(ours)}
    raise UsageError(text.format(**said), hint=hint.format(**said))


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or _("nothing")
    return str(value) if value is not None else _("nothing")


def _hint() -> str:
    return _("Probe what the plan is for, or leave --probe out.")


def _is_same_model(model: Model, name: str) -> bool:
    """By name, by place, or by config: the same model may be named in several ways."""
    if name in {model.given, model.name}:
        return True
    path = Path(name).expanduser()
    is_known = find_card(name) is not None or path.exists()
    return is_known and model.config is not None and find_model(name).config == model.config
