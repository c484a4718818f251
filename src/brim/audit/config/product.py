"""The product of a config: micro-batch x accumulation x processes against the batch that the file names, and factors that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.audit.config.kinds import ARGUMENT_KINDS, TRAINER_KINDS
from brim.audit.config.view import view_of
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.audit.config.kinds import Config, Kind
    from brim.audit.config.reading import Entry
    from brim.audit.found import Edit, Found

RULE = "config-product"
_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
DEEPSPEED_FACTORS: Final = (_TRAIN, _MICRO, _ACCUMULATION)
_ARGUMENTS: Final = ("per_device_train_batch_size", _ACCUMULATION)
_FACTORS: Final[dict[Kind, tuple[str, ...]]] = {
    **dict.fromkeys(ARGUMENT_KINDS, _ARGUMENTS),
    "axolotl": ("micro_batch_size", _ACCUMULATION, "batch_size"),
    "deepspeed": DEEPSPEED_FACTORS,
}
_TAKES_TEXT: Final = frozenset({"trl", "axolotl"})
"""Whose parsers turn the text of a number into the number."""


def check(config: Config, world: int | None, *, users: Sequence[Config] = ()) -> Iterator[Found]:
    """`world`: processes, where they are known. `users`: the configs that name this DeepSpeed file, of accelerate or the Trainer."""
    broken = list(_no_factors(config))
    yield from broken
    if config.kind == "axolotl":
        yield from _axolotl(config, world)
    if config.kind != "deepspeed" or any(each.severity is None for each in broken) or config.value(_TRAIN) == "auto":
        return
    if any(config.get(name) is not None for name in ("tensor_parallel", "sequence_parallel_size", "pipeline")):
        world = None  # then not every process has a batch of its own
    train, micro, accumulation = config.whole(_TRAIN), _filled(config, _MICRO, users), _filled(config, _ACCUMULATION, users)
    if train is None or any(
        config.value(name) == "auto" and not of for name, of in ((_MICRO, micro), (_ACCUMULATION, accumulation))
    ):
        return
    if users and config.get(_ACCUMULATION) is None:
        accumulation = 1  # accelerate's DeepSpeedPlugin, through which the Trainer goes too, puts it there
    if micro is None and accumulation is None and world is None:
        return
    if micro is not None and accumulation is not None:
        yield from _three(config, train, micro, accumulation, world)
    else:
        yield from _rounded(config, train, micro or 1, accumulation or 1, world)


def _filled(config: Config, name: str, users: Sequence[Config]) -> int | None:
    """The figure, with the Trainer's own in the place of "auto"."""
    if config.value(name) != "auto":
        return config.whole(name)
    user = next((each for each in users if each.kind in TRAINER_KINDS), None)
    if user is None:
        return None
    view = view_of(user)
    said = view.micro_batch if name == _MICRO else view.accumulation
    if said is None:
        return None if user.kind == "axolotl" else (8 if name == _MICRO else 1)  # transformers/training_args.py
    return said.value if isinstance(said.value, int) and said.value > 0 else None


def _no_factors(config: Config) -> Iterator[Found]:
    """Factors that are below 1, or are text."""
    for name in _FACTORS.get(config.kind, ()):
        entry = config.get(name)
        if entry is None or isinstance(entry.value, bool):
            continue
        if isinstance(entry.value, int | float) and entry.value < 1:
            text = _("{key} is {value}, and nothing can be multiplied or divided by that: it must be 1 or more.")
            yield config.found(RULE, entry, text.format(key=name, value=entry.value))
        elif _is_number_as_text(entry) and config.kind not in _TAKES_TEXT:
            yield _text(config, entry, name)
    stage = config.get("zero_optimization.stage")
    if config.kind == "deepspeed" and stage is not None and _is_number_as_text(stage):
        text = _(
            '{key} is the text "{value}": DeepSpeed takes it for the number, and accelerate and the Trainer, which compare it with a '
            "number, do not see that stage."
        )
        message = text.format(key="zero_optimization.stage", value=stage.value)
        yield config.found(RULE, stage, message, severity="medium", edits=stage.set_to(int(stage.value)))


def _is_number_as_text(entry: Entry) -> bool:
    return isinstance(entry.value, str) and entry.value.strip().isdecimal() and len(entry.value) < 10


def _text(config: Config, entry: Entry, name: str) -> Found:
    text = _(
        '{key} is the text "{value}" and not the number, because it stands in quotes: {tool} compares it with numbers, and stops.'
    )
    message = text.format(key=name, value=entry.value, tool=config.label)
    return config.found(RULE, entry, message, confidence="medium", edits=entry.set_to(int(entry.value)))


def _three(config: Config, train: int, micro: int, accumulation: int, world: int | None) -> Iterator[Found]:
    entry = config.entries[_TRAIN]
    if world is None:
        if train % (micro * accumulation):
            text = _(
                "train_batch_size is {train}, and {micro} x {accumulation} = {product} for each process: no number of processes makes "
                "them equal, and DeepSpeed stops."
            )
            message = text.format(train=train, micro=micro, accumulation=accumulation, product=micro * accumulation)
            yield config.found(RULE, entry, message)
        return
    product = micro * accumulation * world
    if product != train:
        text = _(
            "train_batch_size is {train}, and {micro} x {accumulation} x {world} processes = {product}: DeepSpeed stops before the first "
            "step."
        )
        message = text.format(train=train, micro=micro, accumulation=accumulation, world=world, product=product)
        yield config.found(RULE, entry, message, edits=_mend(config, train, micro, world))


def _rounded(config: Config, train: int, micro: int, accumulation: int, world: int | None) -> Iterator[Found]:
    """Two of three: DeepSpeed divides for the third, rounds down, and then stops because the product is another."""
    each = micro * accumulation * (world or 1)
    if train % each:
        text = _(
            "train_batch_size is {train}, which {each} does not divide: DeepSpeed rounds the missing figure down, and stops."
        )
        message = text.format(train=train, each=each)
        yield config.found(RULE, config.entries[_TRAIN], message)


def _mend(config: Config, train: int, micro: int, world: int) -> tuple[Edit, ...]:
    """The batch that was named is kept where accumulation can make it."""
    entry = config.get(_ACCUMULATION)
    if entry is None or entry.value == "auto" or train % (micro * world):
        return ()
    return entry.set_to(train // (micro * world))


def _axolotl(config: Config, world: int | None) -> Iterator[Found]:
    """How axolotl reads it: batch_size is divided by the micro-batch, rounded down, and multiplied by the processes again."""
    batch, micro = config.whole("batch_size"), config.whole("micro_batch_size")
    if batch is None or micro is None or config.whole(_ACCUMULATION) is not None:
        return
    in_force = micro * (batch // micro) * (world or 1)
    if in_force == batch or batch < micro:
        return
    text = _("batch_size is {batch}; axolotl trains with {micro} x {accumulation} x {world} processes = {product}.")
    message = text.format(batch=batch, micro=micro, accumulation=batch // micro, world=world or 1, product=in_force)
    row = InForce(setting="batch_size", set=batch, in_force=in_force)
    yield config.found(RULE, config.entries["batch_size"], message, severity="high", in_force=(row,))
