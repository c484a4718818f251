"""The config audit: every config that is recognised, alone, with those that belong to it, and on the card that is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.audit.config import auto, cancels, card, dead_keys, pairs, prediction, product
from brim.audit.config.code_names import CodeNames
from brim.audit.config.kinds import TRAINER_KINDS, Config, recognise
from brim.audit.config.links import link, processes
from brim.audit.config.reading import Broken, refuse_broken
from brim.errors import ConfigError, UsageError
from brim.extras import INSTALL, missing
from brim.locale import _
from brim.machine.catalogue import GPUChoice, find_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from brim.audit.config.links import Pair
    from brim.audit.found import Found
    from brim.audit.source.module import Source

_MOST_PREDICTED: Final = 4
"""A prediction takes seconds; a folder of examples should not take minutes."""
_MOST_NAMED: Final = 8


def examine_configs(
    configs: Sequence[Source],
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    predict: bool = True,
    has_trainer: bool | None = None,
    code: CodeNames | None = None,
    notes: list[str] | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Iterator[Found]:
    """What the config files of a project get wrong. Files of other kinds are passed over.

    `gpu` and `gpus` say where the run will be; without them nothing is said of cards, and of processes only what the files say.
    `model` and `seq_len` stand in where a file says none. `has_trainer`: whether the code uses the Hugging Face Trainer; None: not
    known. `code`: the project's own code, which may read or change keys. `notes` receives what could not be read or predicted, and
    `tell` what takes a moment.
    """
    said: list[str] = [] if notes is None else notes
    known = [config for source in configs for config in recognise(source, said)]
    found = link(known)
    choice = _choice(gpu, said)
    world = gpus or (choice.count if choice is not None and choice.count > 1 else None)
    around = _Around(world, has_trainer, code or CodeNames())
    for config in known:
        yield from _alone(config, found, around)
        if choice is not None:
            yield from card.check(config, choice.gpu)
    for pair in found:
        yield from pairs.check(pair, around.code)
    if not predict:
        return
    if choice is not None:
        wish = _Wish(choice, world, model, seq_len)
        yield from _predicted(known, found, wish, said, tell)
    elif known and (model or seq_len):
        said.append(_("No memory was predicted: no card is named. Give one with --gpu."))


def passed_over(named: Iterable[Source]) -> list[str]:
    """A config that was named and is none must not look as if it were right, and one that is broken ends it."""
    notes: list[str] = []
    for each in named:
        try:
            refuse_broken(each)
        except Broken as error:
            text = _("{file} cannot be read in line {line}: {why}.")
            raise ConfigError(text.format(file=each.file, line=error.line, why=error.why)) from error
        if not recognise(each, []):
            notes.append(_("{file} is no training config that doctor knows, and was passed over.").format(file=each.file))
    return notes


@dataclass(frozen=True)
class _Around:
    """What is known beside the configs."""

    world: int | None
    has_trainer: bool | None
    code: CodeNames


def _alone(config: Config, found: list[Pair], around: _Around) -> Iterator[Found]:
    users = [pair.one for pair in found if pair.other is config and pair.is_named]
    # A product whose factors the code sets is not the file's.
    if config.kind != "deepspeed" or not any(around.code.stores(name) for name in product.DEEPSPEED_FACTORS):
        yield from product.check(config, around.world or processes(config, found), users=users)
    is_trained = around.has_trainer if not any(user.kind in TRAINER_KINDS for user in users) else True
    yield from auto.check(config, has_trainer=is_trained, code=around.code)
    yield from pairs.check_accelerate(config)
    yield from cancels.check(config, around.code)
    yield from dead_keys.check(config, around.code)


def _choice(gpu: str | None, notes: list[str]) -> GPUChoice | None:
    if gpu is None:
        return None
    try:
        return find_gpu(gpu)
    except UsageError as error:
        notes.append(str(error))
        return None


@dataclass(frozen=True)
class _Wish:
    """What a prediction is made for, where the files do not say it."""

    choice: GPUChoice
    world: int | None
    model: str | None
    seq_len: int | None


def _predicted(
    known: list[Config], found: list[Pair], wish: _Wish, notes: list[str], tell: Callable[[str], None]
) -> Iterator[Found]:
    if known and missing():
        notes.append(_("Memory is not predicted by the base installation. For predictions: {command}").format(command=INSTALL))
        return
    trained = [config for config in known if config.kind in TRAINER_KINDS]
    # A file of DeepSpeed or accelerate has no figure of its own; where nothing else is there, that is said.
    for config in trained[:_MOST_PREDICTED] or [config for config in known if config.inside is None][:1]:
        tell(_("Predicting memory for {file} ...").format(file=config.file))
        ranks = wish.world or processes(config, found)
        yield from prediction.check(config, wish.choice.gpu, ranks=ranks, model=wish.model, seq_len=wish.seq_len, notes=notes)
    left = [config.file for config in trained[_MOST_PREDICTED:]]
    if left:
        text = _("At most {most} configs are predicted at once. Not predicted: {files}.")
        notes.append(
            text.format(most=_MOST_PREDICTED, files=", ".join(left[:_MOST_NAMED]) + (", ..." if left[_MOST_NAMED:] else ""))
        )
