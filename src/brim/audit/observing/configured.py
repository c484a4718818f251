"""What the script was asked for, and by whom: brim's own flag, the frameworks, the script's flags, its source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from brim.locale import _
from brim.records.observations import BatchInForce, Configured

Event = dict[str, Any]

_WHOLE: Final = (
    "effective_batch", "effective_batch_size", "global_batch_size", "global_batch", "total_batch_size", "global_train_batch_size",
)  # fmt: skip
_MICRO: Final = (
    "per_device_train_batch_size", "per_gpu_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch",
    "batch_size_per_gpu", "batch_size_per_device", "per_device_batch_size", "device_batch_size", "train_batch_size", "batch_size",
    "batchsize", "batch", "bs",
)  # fmt: skip
_ACCUMULATION: Final = (
    "gradient_accumulation_steps", "gradient_accumulation", "grad_accumulation_steps", "grad_accum_steps", "grad_accum",
    "accumulation_steps", "accumulate_grad_batches", "accum_steps", "accum_iter", "accumulation", "gas",
)  # fmt: skip
_OTHER_PARTS: Final = frozenset(
    {"eval", "evaluation", "val", "valid", "validation", "test", "pred", "predict", "infer", "inference"}
)
"""In the name of a flag: its number is not the training's."""
_FLAG: Final = re.compile(r"(?:--?)?(?:[\w-]+\.)*([A-Za-z][\w-]*)=(\d+)|--?(?:[\w-]+\.)*([A-Za-z][\w-]*)")


@dataclass(frozen=True)
class Clues:
    """What a run says of itself."""

    arguments: Sequence[str]
    """The command line of the script's interpreter."""
    settings: Sequence[Event]
    """Facts and loaders, as the observer wrote them."""
    ranks: int


def configured(clues: Clues, seen: BatchInForce | None, asked: int | None) -> Configured | None:
    """What was asked for, by whoever says it first; None where nobody does."""
    if asked is not None:
        return Configured(effective_batch=asked, source="--effective-batch")
    return _by_arguments(clues) or _by_deepspeed(clues) or _by_parts(clues, seen)


def flags(arguments: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Flags with whole numbers, and how they were typed: `--batch-size 64`, `--batch_size=64`, `train.batch_size=64`."""
    found: dict[str, tuple[int, str]] = {}
    for place, word in enumerate(arguments):
        match = _FLAG.fullmatch(word)
        if match is None:
            continue
        if _OTHER_PARTS & set(re.split(r"[-._]", word.partition("=")[0].lower())):
            continue
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        value = match[2] if match[1] else following
        if value.isdigit() and int(value) > 0:
            typed = word if match[1] else f"{word} {value}"
            name = (match[1] or match[3]).lower().replace("-", "_")
            # `model.batch_size` does not overrule `train.batch_size`.
            if "train." not in found.get(name, (0, ""))[1]:
                found[name] = (int(value), typed)
    return found


def _by_arguments(clues: Clues) -> Configured | None:
    fact = _fact(clues, "transformers.TrainingArguments")
    if fact is None or not fact.get("micro_batch"):
        return None
    micro, accumulation = (
        int(fact["micro_batch"]) * max(1, int(fact.get("gpus") or 1)),
        max(1, int(fact.get("accumulation") or 1)),
    )
    return _product(micro, accumulation, clues.ranks, "transformers.TrainingArguments", fact.get("where"))


def _by_deepspeed(clues: Clues) -> Configured | None:
    fact = _fact(clues, "deepspeed.initialize")
    if fact is None or not fact.get("effective_batch"):
        return None
    return Configured(
        effective_batch=int(fact["effective_batch"]), micro_batch=fact.get("micro_batch"), accumulation=fact.get("accumulation"),
        ranks=clues.ranks, source="deepspeed", where=fact.get("where"),
    )  # fmt: skip


def _by_parts(clues: Clues, seen: BatchInForce | None) -> Configured | None:
    """By the script's flags, with the accumulation of a framework that was told one."""
    given = flags(clues.arguments)
    whole = _first(given, _WHOLE)
    if whole is not None:
        return Configured(effective_batch=given[whole][0], source=given[whole][1])
    micro, accumulated = _first(given, _MICRO), _first(given, _ACCUMULATION)
    fact = _fact(clues, "accelerate.Accelerator", "lightning.Trainer")
    accumulation = given[accumulated][0] if accumulated else int(fact["accumulation"]) if fact else None
    if micro is None:
        return None if fact is None else _by_loader(clues, fact)
    if accumulation is None and _is_divided(given[micro][0], seen):
        return Configured(effective_batch=given[micro][0], source=given[micro][1])
    is_assumed = accumulation is None
    if accumulation is None:
        # Nobody says how often it accumulates. Where the micro-batch is as it was asked for, nothing speaks against what was seen.
        accumulation = seen.accumulation if seen is not None and seen.micro_batch == given[micro][0] else 1
    names = [given[name][1] for name in (micro, accumulated) if name] + ([str(fact["of"])] if fact and not accumulated else [])
    found = _product(given[micro][0], accumulation, _sharing(clues, fact), ", ".join(names), None)
    return replace(found, accumulation=None) if is_assumed else found


def _is_divided(number: int, seen: BatchInForce | None) -> bool:
    """Whether the flag is a total that the script divides among its ranks. With accumulation the same product would be a coincidence."""
    return seen is not None and seen.ranks > 1 and seen.accumulation == 1 and seen.sequences == number


def _by_loader(clues: Clues, fact: Event) -> Configured | None:
    """A framework that is told the accumulation, and a loader that is told the batch."""
    batches = fed(clues.settings)
    if not batches:
        return None
    source = _("{framework} and the DataLoader").format(framework=fact["of"])
    return _product(batches[0], max(1, int(fact["accumulation"])), _sharing(clues, fact), source, fact.get("where"))


def fed(settings: Sequence[Event]) -> list[int]:
    """The batches of the loaders that feed the training."""
    trains = {event["loader"] for event in settings if event["kind"] == "trains"}
    loaders = [event for event in settings if event["kind"] == "loader" and event["loader"] in trains]
    return [int(event["batch_size"]) for event in loaders if event["batch_size"]]


def _sharing(clues: Clues, fact: Event | None) -> int:
    """By how many a loader's batch is multiplied: accelerate's split_batches divides it among the ranks instead."""
    return 1 if fact is not None and fact.get("is_split") else clues.ranks


def _fact(clues: Clues, *names: str) -> Event | None:
    """The last one: what a script makes twice, it means the second time."""
    return next((event for event in reversed(clues.settings) if event["kind"] == "fact" and event["of"] in names), None)


def _first(given: Mapping[str, tuple[int, str]], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in given), None)


def _product(micro: int, accumulation: int, ranks: int, source: str, where: str | None) -> Configured:
    return Configured(
        effective_batch=micro * accumulation * ranks,
        micro_batch=micro,
        accumulation=accumulation,
        ranks=ranks,
        source=source,
        where=where,
    )
