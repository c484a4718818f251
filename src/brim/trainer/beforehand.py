"""What can be known to go wrong before there are tokens and a plan, and wishes that cannot come true."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Literal

from brim.errors import UnsupportedError, UsageError
from brim.locale import _, sentences
from brim.planner.reasons import too_few
from brim.sizes import format_bytes
from brim.trainer import disk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from brim.records import Plan, RunCard
    from brim.trainer.request import TrainRequest
    from brim.workload.settings import Settings

_ALL = "all"
"""Of `--report-to`, in transformers' words: every one that is installed."""


def device_here(asked: Literal["cpu", "cuda"] | None) -> Literal["cpu", "cuda"]:
    """What this machine trains on: as asked, else its GPU, else its CPU."""
    if asked == "cpu":
        return "cpu"
    from brim.machine.detect import detect

    if detect().accelerators:
        return "cuda"
    if asked == "cuda":
        raise UsageError(_("--device cuda, and no GPU is found here."), hint=_("Leave --device out, or take --device cpu."))
    return "cpu"


def refuse_beforehand(request: TrainRequest, usual: Settings, device: str) -> None:
    """What no tokens and no plan are needed to know."""
    from brim.trainer.loading import refuse_what_cannot_train

    if request.report_to:
        _refuse_unknown_trackers(request.report_to)
    adam = [name for name in ("adam_beta1", "adam_beta2", "adam_epsilon") if name in request.asked]
    if adam and "adamw" not in usual.optimizer:
        text = _("{options}: these belong to AdamW, and the optimizer is {optimizer}.")
        flags = ", ".join("--" + name.replace("_", "-") for name in adam)
        raise UsageError(text.format(options=flags, optimizer=usual.optimizer))
    refuse_what_cannot_train(request.model, usual, device=device, from_scratch=request.from_scratch)


def warnings_of(plan: Plan) -> list[str]:
    """What the plan warns of and the card does not say itself: of several processes, the plan knows one and its share."""
    known = set(too_few(plan.workload.samples or plan.workload.effective_batch, plan.workload.effective_batch))
    return [warning for warning in plan.warnings if warning not in known]


def too_long_a_warmup(steps: int, total: int, rate: float) -> Iterator[str]:
    """A learning rate that is never reached."""
    if steps > total:
        text = _("Warm-up takes {warmup} steps, and there are {total}: the learning rate never reaches {rate}.")
        yield text.format(warmup=steps, total=total, rate=rate)


def too_little_disk(card: RunCard, folder: Path) -> Iterator[str]:
    """Free space that checkpoints and the trained model will not fit into; an error where the disk is smaller than the model."""
    model, checkpoint = bytes_on_disk(card)
    free, total = disk.free_bytes(folder), shutil.disk_usage(disk.existing(folder)).total
    facts = {
        "folder": folder, "free": format_bytes(free), "total": format_bytes(total),
        "model": format_bytes(model), "checkpoint": format_bytes(checkpoint),
    }  # fmt: skip
    if total < model:
        text = _("The trained model takes about {model}, and the disk of {folder} has {total} in all.")
        raise UsageError(text.format(**facts), hint=_("Give a folder on another disk with -o."))
    # While one is written, those that are kept are still there.
    saves = -(-card.total_steps // card.options.save_steps)
    count = min(card.options.keep + 1, saves)
    sizes = _("A checkpoint takes about {checkpoint} and the trained model {model}, and {folder} has {free} free.")
    if free < checkpoint + model:
        then = _("Not both of them fit: free some space, or give another folder with -o.")
        yield sentences(sizes.format(**facts), then)
    elif free < count * checkpoint + model:
        then = _(
            "With --keep {keep}, {count} checkpoints are there at once, so later saves will fail: free some space, or give --keep 1."
        )
        yield sentences(sizes.format(**facts), then.format(keep=card.options.keep, count=count))


def bytes_on_disk(card: RunCard) -> tuple[int, int]:
    """Of the trained model, and of a checkpoint: the same weights, and the optimizer's state."""
    settings = card.settings
    if settings.method == "full":
        model = card.total_parameters * (2 if settings.precision in {"bf16", "fp16"} else 4)
    else:
        model = card.trainable_parameters * 4
    state = card.predicted.by_kind.get("optimizer", 0) if card.predicted is not None else 0
    return model, model + state * (card.world_size if card.is_sharded else 1)


def _refuse_unknown_trackers(words: Sequence[str]) -> None:
    """A word that transformers does not know, or whose package is not here."""
    from transformers.integrations import integration_utils

    integrations: Any = integration_utils
    known, here = integrations.INTEGRATION_TO_CALLBACK, set(integrations.get_available_reporting_integrations())
    for word in words:
        if word == _ALL or word in here:
            continue
        if word not in known:
            raise UsageError(
                _("--report-to {word} is nothing that transformers reports to.").format(word=word),
                hint=_("There are {names}, all and none.").format(names=", ".join(sorted(known))),
            )
        raise UnsupportedError(
            _("--report-to {word} needs a package that is not installed.").format(word=word),
            hint=_("Install {word}, or leave it out: `brim watch` and `brim report` need nothing.").format(word=word),
        )
