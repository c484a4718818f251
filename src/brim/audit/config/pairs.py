"""Configs that are read together and say different things.

Who wins was read in the sources: the Trainer compares its arguments with DeepSpeed's file and stops at the first difference
(transformers/integrations/deepspeed.py, `fill_match`); accelerate stops where its own file repeats what a `deepspeed_config_file` says
(accelerate/utils/dataclasses.py, `_deepspeed_config_checks`); of accelerate's precision and the Trainer's, the Trainer's is in force
(transformers/training_args.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from brim.audit.config.kinds import TRAINER_KINDS, Config
from brim.audit.config.reading import Entry, shown
from brim.audit.config.view import view_of
from brim.locale import _
from brim.records.findings import Confidence, InForce, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.config.code_names import CodeNames
    from brim.audit.config.links import Pair
    from brim.audit.found import Found

RULE = "config-pair-disagrees"
_MATCHED: Final = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.eps": ("adam_epsilon",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
}
"""Of DeepSpeed's keys, those that the Trainer wants equal to its own; lists and what only the run knows left out."""
_TRAINER_DEFAULTS: Final = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
"""transformers/training_args.py; in force where a Transformers file says nothing."""
_REPEATED: Final = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""Keys of accelerate's `deepspeed_config` that may not stand beside a `deepspeed_config_file`."""


@dataclass(frozen=True)
class _Difference:
    """Two keys for one thing."""

    mine: Entry | None
    my_key: str
    my_value: Any
    other: Entry
    other_key: str


def check(pair: Pair, code: CodeNames) -> Iterator[Found]:
    """What two configs say differently. Arguments that the code passes itself do not have their defaults."""
    if pair.one.kind in TRAINER_KINDS and pair.other.kind == "deepspeed":
        yield from _trainer_and_deepspeed(pair, code)
    if pair.one.kind in TRAINER_KINDS and pair.other.kind == "accelerate":
        yield from _trainer_and_accelerate(pair)


def check_accelerate(config: Config) -> Iterator[Found]:
    """An accelerate file that names a DeepSpeed file and repeats what that file says."""
    file = config.get("deepspeed_config.deepspeed_config_file")
    if config.kind != "accelerate" or file is None or not isinstance(file.value, str) or file.value == "none":
        return
    repeated = [entry for name in _REPEATED if (entry := config.get(f"deepspeed_config.{name}")) is not None]
    precision = config.get("mixed_precision")
    if precision is not None and precision.value is not None:
        repeated.append(precision)
    if repeated:
        text = _("Beside deepspeed_config_file stands what {file} says: {keys}. accelerate refuses to start.")
        keys = ", ".join(entry.last_name for entry in repeated)
        edits = tuple(edit for entry in repeated for edit in entry.delete())
        yield config.found(RULE, repeated[0], text.format(keys=keys, file=file.value), edits=edits)


def _trainer_and_deepspeed(pair: Pair, code: CodeNames) -> Iterator[Found]:
    for key, names in _MATCHED.items():
        other = pair.other.get(key)
        if other is None or not _is_number(other.value):
            continue
        difference = _differs(pair.one, names, other, key)
        if difference is not None and (difference.mine is not None or not code.passes(difference.my_key)):
            yield _stops(pair, difference)
    yield from _precision(pair)


def _differs(config: Config, names: tuple[str, ...], other: Entry, key: str) -> _Difference | None:
    for name in names:
        mine = config.get(name)
        if mine is not None:
            same = not _is_number(mine.value) or float(mine.value) == float(other.value)
            return None if same else _Difference(mine, name, mine.value, other, key)
    default = _TRAINER_DEFAULTS.get(names[0]) if config.kind == "transformers" else None
    if default is None or default == other.value:
        return None
    return _Difference(None, names[0], default, other, key)


def _stops(pair: Pair, difference: _Difference) -> Found:
    """The Trainer names both values and stops; a Transformers file that says nothing has the default."""
    said = {
        "key": difference.my_key,
        "value": shown(difference.my_value),
        "other": difference.other_key,
        "there": shown(difference.other.value),
        "file": pair.other.file,
    }
    if difference.mine is None:
        text = _(
            "{key} is not set here, so it is {value}, and {other} in {file} is {there}: the Trainer stops before the first step."
        )
    else:
        text = _("{key} is {value}, and {other} in {file} is {there}: the Trainer stops before the first step.")
    if not pair.is_named:
        text = _("{key} is {value}, and {other} in {file}, beside it, is {there}: read together, the Trainer stops.")
    entry = difference.mine or pair.one.get("deepspeed") or next(iter(pair.one.entries.values()))
    edits = difference.other.set_to("auto") if pair.is_named else ()
    severity: Severity | None = None if pair.is_named else "low"  # whether the two are used together is not known
    return pair.one.found(RULE, entry, text.format(**said), confidence=_sure(pair, difference), severity=severity, edits=edits)


def _sure(pair: Pair, difference: _Difference) -> Confidence:
    if not pair.is_named:
        return "low"
    return "high" if difference.mine is not None else "medium"


def _precision(pair: Pair) -> Iterator[Found]:
    """Half precision that one file switches on and the other does not."""
    for word in ("bf16", "fp16"):
        mine, other = pair.one.get(word), pair.other.get(f"{word}.enabled")
        if mine is None or other is None or not isinstance(mine.value, bool) or not isinstance(other.value, bool):
            continue
        if mine.value != other.value:
            yield _stops(pair, _Difference(mine, word, mine.value, other, f"{word}.enabled"))


def _trainer_and_accelerate(pair: Pair) -> Iterator[Found]:
    mine, other = view_of(pair.one), view_of(pair.other)
    sure: Confidence = "high" if pair.is_named else "medium"
    if mine.precision is not None and other.precision is not None and mine.precision.value != other.precision.value:
        # Off in the arguments does not switch off what accelerate's environment says.
        in_force = other.precision.value if mine.precision.value == "fp32" else mine.precision.value
        text = _("{key} asks for {mine} and mixed_precision in {file} for {other}: {in_force} is used.")
        message = text.format(
            key=mine.precision.entry.last_name,
            mine=mine.precision.value,
            other=other.precision.value,
            file=pair.other.file,
            in_force=in_force,
        )
        row = InForce(setting="mixed_precision", set=shown(other.precision.value), in_force=shown(in_force))
        severity: Severity | None = "high" if pair.is_named else None
        yield pair.one.found(RULE, mine.precision.entry, message, confidence=sure, severity=severity, in_force=(row,))
    if pair.other.get("deepspeed_config.deepspeed_config_file") is not None:
        return
    for one, two in ((mine.accumulation, other.accumulation), (mine.clipping, other.clipping)):
        if one is None or two is None or not _is_number(one.value) or not _is_number(two.value):
            continue
        if float(one.value) != float(two.value):
            yield _stops(pair, _Difference(one.entry, one.entry.last_name, one.value, two.entry, two.entry.last_name))
    yield from _processes(pair)


def _processes(pair: Pair) -> Iterator[Found]:
    """Flags of the config go over accelerate's file (trl's launcher passes them on)."""
    mine, other = pair.one.get("num_processes"), pair.other.get("num_processes")
    if mine is None or other is None or not _is_number(mine.value) or not _is_number(other.value) or mine.value == other.value:
        return
    text = _("num_processes is {mine} here and {other} in {file}: the effective batch is {mine} times that of one process.")
    message = text.format(mine=mine.value, other=other.value, file=pair.other.file)
    row = InForce(setting="num_processes", set=other.value, in_force=mine.value)
    yield pair.one.found(RULE, mine, message, confidence="medium", in_force=(row,))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
