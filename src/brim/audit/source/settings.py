"""What a project is set to, as far as reading can tell: the numbers whose product a user takes for the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from brim.audit.source.statements import WINDOW
from brim.audit.source.terms import settings_in

if TYPE_CHECKING:
    from brim.audit.source.flow import Flow
    from brim.audit.source.quantities import Quantity
    from brim.audit.source.statements import Use
    from brim.audit.source.terms import Setting

_TAKERS = ("DataLoader", "TrainingArguments", "SFTConfig", "Accelerator", "Trainer")


@dataclass(frozen=True)
class SetTo:
    """A setting, its number, and where that is written."""

    name: str
    value: int
    file: str
    line: int


@dataclass(frozen=True)
class SetInSource:
    """The settings behind the training batch; None where the code says nothing, or does not say the number."""

    batch: SetTo | None = None
    accumulation: SetTo | None = None


def configured(flow: Flow) -> SetInSource:
    """What the training loader's batch and the loop's accumulation are set to, before the code changes them."""
    return SetInSource(batch=_set_to(flow, "batch"), accumulation=_set_to(flow, "accumulation"))


def _set_to(flow: Flow, quantity: Quantity) -> SetTo | None:
    taken = [use for use in flow.uses if use.quantity == quantity and not use.is_for_evaluation and _is_taken(use)]
    candidates = [each for use in taken for each in settings_in(use.term) if each.quantity == quantity and _number(each)]
    candidates += [each for each in flow.settings() if each.quantity == quantity and each.is_the_users and _number(each)]
    # What a user is meant to set comes before a number that somebody wrote into the code, which for the accumulation does not count.
    chosen = next((each for each in candidates if each.is_the_users), None)
    if chosen is None and quantity == "batch":
        chosen = candidates[0] if candidates else None
    if chosen is None:
        return None
    file, line = chosen.set_at or (chosen.module.source.file, getattr(chosen.node, "lineno", 1))
    return SetTo(chosen.name, int(chosen.value), file, line)


def _is_taken(use: Use) -> bool:
    return use.call == WINDOW or use.call.rpartition(".")[2] in _TAKERS


def _number(setting: Setting) -> bool:
    return isinstance(setting.value, int) and not isinstance(setting.value, bool) and setting.value > 0
