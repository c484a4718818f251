"""Settings that nothing reads: changing them has no effect. Printing a value, logging it or checking it is not reading it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from brim.audit.source.module import last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from brim.audit.found import Found
    from brim.audit.source.definitions import Definition
    from brim.audit.source.fixed import Relations
    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module
    from brim.audit.source.quantities import Quantity

_ORDER: tuple[Quantity, ...] = ("batch", "accumulation", "effective-batch", "eval-batch", "learning-rate", "workers", "pinning")
_TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(|DataLoader\(|manual_backward|training_step")
_OPTIMIZES = re.compile(r"\boptim\b|optimizers?\b|Adam|SGD|TrainingArguments")
_SHOWS = {
    "print", "rprint", "pprint", "rank_print", "rank0_print", "print_rank_0", "print0", "echo", "debug", "info", "warning", "warn",
    "critical", "log", "log_text", "add_text", "add_hparams", "log_hyperparams", "log_params", "log_param",
}  # fmt: skip
_WHOLE_CALLS = {"asdict", "vars", "model_dump", "to_dict", "astuple"}
_CONFIG = re.compile(r"^(\w*(cfg|config|args|conf|hparams|params)|self)$")


def check_unused(
    flow: Flow, users: dict[Quantity, list[Definition]], relations: Relations, reported: Collection[str]
) -> Iterator[Found]:
    """One finding for all unused settings of a class or dict."""
    by_name = {each.name: each for each in flow.project.modules}
    readings: dict[str, _Reading] = {}
    together: dict[int, list[Definition]] = {}
    trains: dict[str, bool] = {}
    for quantity in _ORDER:
        for definition in users.get(quantity, []):
            module = definition.module
            if module is None or definition.node is None or definition.name in reported or _is_handed_over(definition):
                continue
            if definition.value == "auto" or (quantity == "learning-rate" and not _OPTIMIZES.search(module.source.text)):
                continue
            program = [by_name[name] for name in sorted(relations.program_of(module)) if name in by_name]
            for each in program:
                if each.name not in readings:
                    readings[each.name] = _Reading(each)
                    trains[each.name] = _TRAINS.search(each.source.text) is not None
            if not any(trains.get(name) for name in relations.users_of(module)) or any(
                readings[each.name].is_whole for each in program
            ):
                continue
            if not any(readings[each.name].reads(definition) for each in program):
                together.setdefault(id(_group_of(definition)), []).append(definition)
    for unused in together.values():
        yield _found(unused)


def _found(unused: list[Definition]) -> Found:
    first = unused[0]
    assert first.module is not None
    assert first.node is not None
    names = ", ".join(dict.fromkeys(f"`{each.name}`" for each in unused))
    if names.count("`") == 2:
        text = _("Nothing reads {settings}: changing it has no effect.")
    else:
        text = _("Nothing reads {settings}: changing them has no effect.")
    last = max((each.node for each in unused if each.node is not None), key=lambda node: getattr(node, "lineno", 0))
    return first.module.found(
        "setting-unused",
        first.node,
        text.format(settings=names),
        until=last,
        confidence="medium",
        severity="low" if first.quantity in {"workers", "pinning"} else None,
    )


def _group_of(definition: Definition) -> ast.AST:
    """The class or the statement with the dict that a setting is defined in; a flag stands for itself."""
    assert definition.module is not None
    assert definition.node is not None
    if definition.owner is not None:
        return definition.owner
    return definition.node if definition.kind != "field" else definition.module.statement(definition.node)


def _is_handed_over(definition: Definition) -> bool:
    """Fields of a class that some library reads: a subclass of TrainingArguments, a pydantic settings object."""
    bases = {last_name(each) for each in definition.owner.bases} if definition.owner is not None else set()
    return any(base.endswith(("Arguments", "Config", "Settings", "Mixin", "Args")) for base in bases)


class _Reading:
    """The names that a module reads, in one walk."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._attributes: set[str] = set()
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._whole_names: set[str] = set()
        self.is_whole = False
        """Whether a config is handed on with all its fields: `asdict(config)`, `**vars(args)`."""
        for node in module.nodes:
            self._look(node)

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if node.attr == "__dict__" and not self._is_shown(node):
                self.is_whole = True
            elif not self._is_shown(node):
                self._attributes.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not self._is_shown(node):
            self._names.add(node.id)
            if not isinstance(self._module.parents.get(node), ast.Subscript | ast.Attribute):
                self._whole_names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parent = self._module.parents.get(node)
            is_target = isinstance(parent, ast.keyword) and parent.arg == "dest"
            if not (isinstance(parent, ast.Dict) and node in parent.keys) and not is_target and not self._is_shown(node):
                self._texts.add(node.value)
        elif isinstance(node, ast.Call):
            self._look_at_call(node)

    def _look_at_call(self, node: ast.Call) -> None:
        spread = [each.value for each in node.keywords if each.arg is None]
        whole = any(_CONFIG.match(last_name(each)) for each in spread) or last_name(node.func) in _WHOLE_CALLS
        if whole and not self._is_shown(node):
            self.is_whole = True

    def _is_shown(self, node: ast.AST) -> bool:
        """Whether a value is only printed, logged or checked here."""
        for each in self._module.above(node):
            if isinstance(each, ast.Assert):
                return True
            if isinstance(each, ast.Call) and (
                last_name(each.func) in _SHOWS or (self._module.dotted(each.func) or "").startswith("wandb.")
            ):
                return True
            if isinstance(each, ast.stmt):
                return False
        return False

    def reads(self, definition: Definition) -> bool:
        """Whether this module reads the setting."""
        name = definition.name
        if name in self._attributes or name in self._texts:
            return True
        if definition.owner is not None:
            return False
        return name in self._names or bool(_dict_names(definition) & self._whole_names)


def _dict_names(definition: Definition) -> set[str]:
    """The name of the dict that an entry stands in."""
    module, node = definition.module, definition.node
    if module is None or node is None or definition.kind != "field":
        return set()
    statement = module.statement(node)
    return {last_name(each) for each in statement.targets} - {""} if isinstance(statement, ast.Assign) else set()
