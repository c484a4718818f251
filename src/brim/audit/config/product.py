"""The product of a DeepSpeed or axolotl config: micro-batch x accumulation x processes against the batch that the file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.config.kinds import Config
    from brim.audit.found import Edit, Found

RULE = "config-product"
_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"


def check(config: Config, world: int | None, *, is_named: bool = False) -> Iterator[Found]:
    """`world`: processes, where they are known. `is_named`: accelerate or the Trainer reads this DeepSpeed file."""
    if config.kind == "axolotl":
        yield from _axolotl(config, world)
    if config.kind != "deepspeed" or any(config.value(name) == "auto" for name in (_TRAIN, _MICRO, _ACCUMULATION)):
        return
    if any(config.get(name) is not None for name in ("tensor_parallel", "sequence_parallel_size", "pipeline")):
        world = None  # then not every process has a batch of its own
    train, micro, accumulation = config.whole(_TRAIN), config.whole(_MICRO), config.whole(_ACCUMULATION)
    if is_named and config.get(_ACCUMULATION) is None:
        accumulation = 1  # accelerate's DeepSpeedPlugin, through which the Trainer goes too, puts it there
    if train is None or (micro is None and accumulation is None and world is None):
        return
    if micro is not None and accumulation is not None:
        yield from _three(config, train, micro, accumulation, world)
    else:
        yield from _rounded(config, train, micro or 1, accumulation or 1, world)


def _three(config: Config, train: int, micro: int, accumulation: int, world: int | None) -> Iterator[Found]:
    entry = config.entries[_TRAIN]
    if world is None:
        if train % (micro * accumulation):
            text = _(
                "train_batch_size is {train}, and {micro} x {accumulation} = {product} for each process: no number of processes makes "
                "them equal, and DeepSpeed stops."
            )
            message = text.format(train=train, micro=micro, accumulation=accumulation, product=micro * accumulation)
            yield config.found(RULE, entry, message, in_force=(InForce(setting=_TRAIN, set=train, in_force=None),))
        return
    product = micro * accumulation * world
    if product != train:
        text = _(
            "train_batch_size is {train}, and {micro} x {accumulation} x {world} processes = {product}: DeepSpeed stops before the first "
            "step."
        )
        message = text.format(train=train, micro=micro, accumulation=accumulation, world=world, product=product)
        yield config.found(RULE, entry, message, in_force=_row(train, world), edits=_mend(config, train, micro, world))


def _rounded(config: Config, train: int, micro: int, accumulation: int, world: int | None) -> Iterator[Found]:
    """Two of three: DeepSpeed divides for the third, rounds down, and then stops because the product is another."""
    each = micro * accumulation * (world or 1)
    if train % each:
        text = _(
            "train_batch_size is {train}, which {each} does not divide: DeepSpeed rounds the missing figure down, and stops."
        )
        message = text.format(train=train, each=each)
        yield config.found(RULE, config.entries[_TRAIN], message, in_force=_row(train, world))


def _row(train: int, world: int | None) -> tuple[InForce, ...]:
    when = "" if world is None else f"world_size == {world}"
    return (InForce(setting=_TRAIN, set=train, in_force=None, when=when),)


def _mend(config: Config, train: int, micro: int, world: int) -> tuple[Edit, ...]:
    """The batch that was named is kept where accumulation can make it."""
    entry = config.get(_ACCUMULATION)
    return entry.set_to(train // (micro * world)) if entry is not None and train % (micro * world) == 0 else ()


def _axolotl(config: Config, world: int | None) -> Iterator[Found]:
    """How axolotl reads it: batch_size is divided by the micro-batch, rounded down, and multiplied by the processes again."""
    batch, micro = config.whole("batch_size"), config.whole("micro_batch_size")
    if batch is None or micro is None or config.whole(_ACCUMULATION) is not None:
        return
    in_force = micro * (batch // micro) * (world or 1)
    if in_force == batch or batch < micro:
        return
    text = _("batch_size is {batch}, and {micro} x {accumulation} x {world} processes = {product} is in force.")
    message = text.format(batch=batch, micro=micro, accumulation=batch // micro, world=world or 1, product=in_force)
    row = InForce(setting="batch_size", set=batch, in_force=in_force)
    yield config.found(RULE, config.entries["batch_size"], message, in_force=(row,))
