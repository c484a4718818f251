"""What can be known to go wrong before there are tokens and a plan, and wishes that cannot come true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from brim.errors import UnsupportedError, UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def too_long_a_warmup(steps: int, total: int, rate: float) -> Iterator[str]:
    """A learning rate that is never reached."""
    if steps > total:
        text = _("Warm-up takes {warmup} steps, and there are {total}: the learning rate never reaches {rate}.")
        yield text.format(warmup=steps, total=total, rate=rate)


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
