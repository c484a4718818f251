"""What a project is set to, as far as reading can tell: the numbers whose product a user takes for the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brim.audit.source.quantities import quantity_of
from brim.audit.source.terms import Setting, settings_in
from brim.audit.source.uses import WINDOW

if TYPE_CHECKING:
    import ast

    from brim.audit.source.definitions import Definitions
    from brim.audit.source.flow import Flow
    from brim.audit.source.launchers import Launches
    from brim.audit.source.module import Module
    from brim.audit.source.quantities import Quantity
    from brim.audit.source.terms import Kind
    from brim.audit.source.uses import Use

_TAKERS = ("DataLoader", "TrainingArguments", "SFTConfig", "Accelerator", "Trainer")


class Settings:
    """The settings of a project that its code reads."""

    def __init__(self, definitions: Definitions, launches: Launches) -> None:
        self._definitions = definitions
        self._launches = launches
        self._known: dict[tuple[Any, ...], Setting] = {}

    def at(
        self,
        name: str,
        module: Module,
        node: ast.AST,
        *,
        kind: Kind,
        value: Any = None,
        owner: ast.ClassDef | None = None,
        place: ast.AST | None = None,
    ) -> Setting:
        """The setting of that name, the same object for the same place."""
        key = (name, kind, id(node) if kind in {"constant", "default", "parameter"} else id(owner or place))
        found = self._known.get(key)
        if found is None:
            defined = self._definitions.find(name, module, owner) if kind in {"flag", "key", "field"} else None
            if defined is not None and kind in {"flag", "key"}:
                kind = defined.kind
            if value is None and defined is not None:
                value = defined.value
            at = (defined.file, defined.line) if defined is not None else None
            launched = self._launches.value_of(name, module) if kind in {"flag", "environment", "key", "field"} else None
            if launched is None and defined is not None and defined.spelling:
                launched = self._launches.value_of(defined.spelling, module)
            if launched is not None:
                value, at = launched.value, (launched.file, launched.line)
            found = Setting(module, node, name, quantity_of(name), kind, value, at)
            self._known[key] = found
        return found

    def all(self) -> list[Setting]:
        """Every setting that was met."""
        return list(self._known.values())


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
    candidates += [each for each in flow.settings.all() if each.quantity == quantity and each.is_the_users and _number(each)]
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
