"""The config audit: every config that is recognised, alone, with those that belong to it, and on the card that is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from brim.audit.config import auto, cancels, card, dead_keys, pairs, prediction, product
from brim.audit.config.kinds import TRAINER_KINDS, Config, recognise
from brim.audit.config.links import link, processes
from brim.errors import UsageError
from brim.locale import _
from brim.machine.catalogue import find_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from brim.audit.config.links import Pair
    from brim.audit.found import Found
    from brim.audit.source.module import Source
    from brim.machine.catalogue import GPUChoice

_MOST_PREDICTED: Final = 4
"""A prediction takes seconds; a folder of examples should not take minutes."""


def examine_configs(
    configs: Sequence[Source],
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    model: str | None = None,
    predict: bool = True,
    has_trainer: bool | None = None,
    notes: list[str] | None = None,
) -> Iterator[Found]:
    """What the config files of a project get wrong. Files of other kinds are passed over.

    `gpu` and `gpus` say where the run will be; without them nothing is said of cards, and of processes only what the files say.
    `model` stands in where a file names none. `has_trainer`: whether the code uses the Hugging Face Trainer; None: not known.
    `notes` receives what could not be read or predicted.
    """
    said: list[str] = [] if notes is None else notes
    known = [config for source in configs for config in recognise(source, said)]
    found = link(known)
    choice = _choice(gpu, said)
    world = gpus or (choice.count if choice is not None and choice.count > 1 else None)
    for config in known:
        yield from _alone(config, found, world, has_trainer)
        if choice is not None:
            yield from card.check(config, choice.gpu)
    for pair in found:
        yield from pairs.check(pair)
    if predict and choice is not None:
        yield from _predicted(known, found, choice, world, model, said)


def _alone(config: Config, found: list[Pair], world: int | None, has_trainer: bool | None) -> Iterator[Found]:
    users = [pair.one for pair in found if pair.other is config and pair.is_named]
    yield from product.check(config, world or processes(config, found), is_named=bool(users))
    is_trained = has_trainer if not any(user.kind in TRAINER_KINDS for user in users) else True
    yield from auto.check(config, has_trainer=is_trained)
    yield from pairs.check_accelerate(config)
    yield from cancels.check(config)
    yield from dead_keys.check(config)


def _choice(gpu: str | None, notes: list[str]) -> GPUChoice | None:
    if gpu is None:
        return None
    try:
        return find_gpu(gpu)
    except UsageError as error:
        notes.append(str(error))
        return None


def _predicted(
    known: list[Config], found: list[Pair], choice: GPUChoice, world: int | None, model: str | None, notes: list[str]
) -> Iterator[Found]:
    trained = [config for config in known if config.kind in TRAINER_KINDS]
    if len(trained) > _MOST_PREDICTED:
        text = _("The memory of {count} configs was not predicted: name fewer files at once.")
        notes.append(text.format(count=len(trained) - _MOST_PREDICTED))
    for config in trained[:_MOST_PREDICTED]:
        ranks = world or processes(config, found)
        yield from prediction.check(config, choice.gpu, ranks=ranks, model=model, notes=notes)
