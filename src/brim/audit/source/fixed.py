"""Values that ignore the config: a literal where the setting should stand, and settings that nobody reads."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from brim.audit.source.clamps import SHOWN
from brim.audit.source.definitions import Definition, is_config_name
from brim.audit.source.module import last_name
from brim.audit.source.statements import WINDOW
from brim.audit.source.terms import Constant, Setting, Term, settings_in, walk
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module
    from brim.audit.source.quantities import Quantity
    from brim.audit.source.statements import Use
    from brim.records.findings import Severity

_RULES: dict[Quantity, str] = {
    "batch": "batch-hard-coded",
    "accumulation": "accumulation-hard-coded",
    "workers": "workers-hard-coded",
    "pinning": "pinning-off",
}
_TAKES = re.compile(r"(DataLoader|TrainingArguments|SFTConfig|DPOConfig|Accelerator|Trainer|GradientAccumulationPlugin)$")
_TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(|DataLoader\(|manual_backward|training_step")
_WHOLE_CONFIG = re.compile(
    r"asdict\(|vars\(|__dict__|\*\*\s*\w*(cfg|config|args|conf|hparams|params)\b|parse_args_into_dataclasses|model_dump|to_dict\("
)


class Relations:
    """Which modules belong to one program: those that one imports, and those that import it."""

    def __init__(self, flow: Flow) -> None:
        self._below: dict[str, set[str]] = {}
        for module in flow.project.modules:
            direct = set()
            for dotted in module.imports.values():
                target = flow.resolve_module(dotted, module) or flow.resolve_module(dotted.rpartition(".")[0], module)
                if target is not None:
                    direct.add(target.name)
            self._below[module.name] = direct
        self._programs: dict[str, set[str]] = {}
        self._closed = {name: self._closure(name) for name in self._below}

    def _closure(self, name: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting += self._below.get(each, ())
        return seen

    def are_of_one_program(self, one: Module, other: Module) -> bool:
        """Whether some file imports both, or one the other."""
        return other.name in self.program_of(one)

    def imports(self, one: Module, other: Module, *, directly: bool = False) -> bool:
        """Whether one file imports the other, or what imports it."""
        return other.name in (self._below if directly else self._closed)[one.name]

    def program_of(self, module: Module) -> set[str]:
        """The names of all modules that run together with this one."""
        known = self._programs.get(module.name)
        if known is None:
            known = {name for below in self._closed.values() if module.name in below for name in below}
            self._programs[module.name] = known
        return known


def check_fixed(flow: Flow) -> Iterator[Found]:
    """Literals in the place of settings, and settings without effect."""
    relations = Relations(flow)
    users: dict[Quantity, list[Definition]] = {}
    for definition in flow.definitions:
        if definition.quantity is not None and definition.module is not None:
            users.setdefault(definition.quantity, []).append(definition)
    for setting in flow.settings():
        if setting.kind in {"key", "environment", "flag"} and setting.quantity is not None:
            users.setdefault(setting.quantity, []).append(_as_definition(setting))
    literals = list(_literals(flow, users, relations))
    yield from literals
    told = {row.setting for each in literals for row in each.in_force}
    yield from (each for name, each in _unused(flow, users, relations) if name not in told)


def _as_definition(setting: Setting) -> Definition:
    """A setting that is only known from where it is read: a key of a YAML file that is not here."""
    line = getattr(setting.node, "lineno", 1)
    return Definition(
        name=setting.name, quantity=setting.quantity, kind="key", value=setting.value, file=setting.module.source.file, line=line,
        module=setting.module,
    )  # fmt: skip


def _defined_for(
    module: Module, quantity: Quantity, users: dict[Quantity, list[Definition]], relations: Relations, flow: Flow
) -> Definition | None:
    """The setting that a literal in this module should have been."""
    for definition in users.get(quantity, []):
        if definition.module is not None and _is_at_hand(definition, module, relations, flow):
            return definition
    return None


def _is_at_hand(definition: Definition, module: Module, relations: Relations, flow: Flow) -> bool:
    """Whether the module knows the setting's config: it is its own, it reads other settings of it, or the script that has it imports it."""
    assert definition.module is not None
    if definition.module is module:
        return True
    if not relations.are_of_one_program(module, definition.module) or definition.kind == "key":
        return False
    if definition.owner is not None and definition.owner.name in module.imports:
        return True
    siblings = {each.name for each in flow.definitions if each.owner is definition.owner and each.module is definition.module}
    siblings |= _field_names(definition)
    read = {each.attr for each in ast.walk(module.tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load)}
    has_config = any(is_config_name(each.id) for each in ast.walk(module.tree) if isinstance(each, ast.Name))
    known = len(siblings & read)
    if has_config and (known >= 2 or (known == 1 and relations.imports(module, definition.module))):
        return True
    return relations.imports(definition.module, module, directly=True) and "__main__" in definition.module.source.text


_TEST_FILE = re.compile(r"(^|\.)(tests?|testing|test_utils|test_\w*|\w*_test|conftest)(\.|$)")


def _literals(flow: Flow, users: dict[Quantity, list[Definition]], relations: Relations) -> Iterator[Found]:
    taking = [use for use in flow.uses if use.quantity in _RULES and (_TAKES.search(use.call) or use.call == WINDOW)]
    honoured = {(use.quantity, use.module.name) for use in taking if not use.is_for_evaluation and _is_settable(use.term)}
    seen: set[int] = set()
    for use in taking:
        if use.is_for_evaluation and use.quantity != "pinning":
            continue
        literal = fixed_value(use.term)
        if literal is None or id(literal.node) in seen:
            continue
        if _TEST_FILE.search(use.module.name):
            continue
        definition = _defined_for(use.module, use.quantity, users, relations, flow)
        programs = relations.program_of(use.module)
        is_honoured = any((use.quantity, name) in honoured for name in programs)
        value = literal.value
        found = None
        if definition is not None and not is_honoured and definition.node is not literal.node:
            found = _ignored(use, literal, definition, flow)
        elif definition is None and (value is False if use.quantity == "pinning" else use.quantity == "workers" and value == 0):
            found = _off(use, literal)
        if found is not None:
            seen.add(id(literal.node))
            yield found


def _is_settable(term: Term) -> bool:
    return any(each.is_the_users for each in settings_in(term))


def fixed_value(term: Term) -> Setting | Constant | None:
    """The number of a value that no setting can change; None if one can, or if it is not known."""
    if isinstance(term, Constant):
        return term if isinstance(term.value, int | float) else None
    if isinstance(term, Setting):
        return term if term.kind == "constant" and isinstance(term.value, int | float) else None
    return None


def _ignored(use: Use, literal: Setting | Constant, definition: Definition, flow: Flow) -> Found | None:
    quantity = use.quantity
    value = literal.value
    if quantity == "pinning" and value is not False:
        return None
    module = literal.module
    edits = _edits(literal, definition, flow)
    text = _("{value} is written into the code, so {setting} ({file}:{line}) has no effect on it.")
    shown: tuple[Any, ...] = SHOWN[quantity]
    own = definition.value
    if isinstance(own, int | float) and own not in shown:
        shown = tuple(sorted([*shown, own]))
    return module.found(
        _RULES[quantity],
        literal.node,
        text.format(value=f"`{value}`", setting=definition.name, file=definition.file, line=definition.line),
        in_force=tuple(InForce(setting=definition.name, set=each, in_force=value) for each in shown if each != value),
        edits=edits,
        is_safe=bool(edits),
    )


def _off(use: Use, literal: Setting | Constant) -> Found:
    """`num_workers=0` or `pin_memory=False` in a script that has no setting for it."""
    severity: Severity = "low"
    if use.quantity == "pinning":
        text = _("Pinning is switched off by hand: copies to a GPU then wait for the host.")
        edits: tuple[Edit, ...] = ()
    else:
        text = _("No workers: every batch is prepared in the training process, while the device waits.")
        edits = ()
    row = InForce(setting=use.target, set=None, in_force=literal.value)
    return literal.module.found(
        _RULES[use.quantity], literal.node, text, confidence="medium", severity=severity, in_force=(row,), edits=edits
    )


def _edits(literal: Setting | Constant, definition: Definition, flow: Flow) -> tuple[Edit, ...]:
    """The literal replaced by the setting, where the same function already reads the config under some name."""
    node, module = literal.node, literal.module
    if not isinstance(node, ast.expr):
        return ()
    holder = _holder(module, node, definition, flow)
    return () if holder is None else (module.replace(node, f"{holder}.{definition.name}"),)


def _holder(module: Module, node: ast.expr, definition: Definition, flow: Flow) -> str | None:
    """The expression under which the config is known here: `self.config`, `args`."""
    function = module.enclosing(node, ast.FunctionDef, ast.AsyncFunctionDef)
    known = {each.name for each in flow.definitions if each.owner is definition.owner and each.module is definition.module}
    known |= _field_names(definition)
    for scope in (function, module.tree if function is None else None):
        if scope is None:
            continue
        for each in ast.walk(scope):
            if isinstance(each, ast.Attribute) and each.attr in known and isinstance(each.ctx, ast.Load):
                holder = module.text_of(each.value)
                if (
                    re.fullmatch(r"[\w.]+", holder)
                    and (holder != "self" or definition.owner is None)
                    and each.lineno <= node.lineno
                ):
                    return holder
    return None


def _field_names(definition: Definition) -> set[str]:
    if definition.owner is None:
        return set()
    return {
        each.target.id for each in definition.owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _unused(flow: Flow, users: dict[Quantity, list[Definition]], relations: Relations) -> Iterator[tuple[str, Found]]:
    by_name = {each.name: each for each in flow.project.modules}
    for quantity in ("batch", "accumulation", "workers", "pinning", "eval-batch", "effective-batch"):
        for definition in users.get(quantity, []):
            module = definition.module
            if module is None or definition.node is None or _is_handed_over(definition):
                continue
            program = [by_name[name] for name in relations.program_of(module) if name in by_name]
            texts = [each.source.text for each in program]
            if not any(_TRAINS.search(text) for text in texts) or any(_WHOLE_CONFIG.search(text) for text in texts):
                continue
            if any(_is_read(each, definition) or _is_unpacked(each, definition) for each in program):
                continue
            text = _("{setting} can be set, and nothing reads it: whatever you set has no effect.")
            found = module.found("setting-unused", definition.node, text.format(setting=definition.name), confidence="medium")
            yield definition.name, found


def _is_handed_over(definition: Definition) -> bool:
    """Fields of a class that some library reads: a subclass of TrainingArguments, a pydantic settings object."""
    bases = {last_name(each) for each in definition.owner.bases} if definition.owner is not None else set()
    return any(base.endswith(("Arguments", "Config", "Settings", "Mixin", "Args")) for base in bases)


def _is_read(module: Module, definition: Definition) -> bool:
    name = definition.name
    if name not in module.source.text:
        return False
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.Constant) and node.value == name and not isinstance(module.parents.get(node), ast.Dict):
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and definition.owner is None:
            return True
    return False


def _is_unpacked(module: Module, definition: Definition) -> bool:
    """Whether the dict that holds the setting is handed on whole: `Arguments(**SETTINGS)`, `{**SETTINGS, ...}`."""
    if definition.module is None or definition.node is None:
        return False
    table = definition.module.parents.get(definition.node)
    while isinstance(table, ast.Dict | ast.keyword | ast.Call):
        table = definition.module.parents.get(table)
    if not isinstance(table, ast.Assign):
        return False
    names = {last_name(each) for each in table.targets}
    handed_on = [each.value for each in ast.walk(module.tree) if isinstance(each, ast.keyword) and each.arg is None]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Dict):
            handed_on += [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
    return any(last_name(each) in names for each in handed_on)


def check_evaluation(flow: Flow) -> Iterator[Found]:
    """An evaluation batch that is computed from the training batch."""
    seen: set[int] = set()
    for use in flow.uses:
        if not (use.quantity == "eval-batch" or (use.is_for_evaluation and use.quantity == "batch")):
            continue
        settings = settings_in(use.term)
        tied = [each for each in settings if each.quantity == "batch"]
        is_computed = any(getattr(each, "what", "") in {"*", "//", "/"} for each in walk(use.term))
        if not tied or not is_computed or any(each.quantity == "eval-batch" for each in settings) or id(use.node) in seen:
            continue
        if not any(isinstance(each, ast.BinOp) for each in ast.walk(use.node)):
            continue  # it is computed elsewhere, and reported there
        seen.add(id(use.node))
        text = _(
            "The evaluation batch is computed from {setting}: whoever turns one turns both, and evaluation has its own peak of memory."
        )
        yield use.module.found("eval-batch-tied", use.node, text.format(setting=tied[0].name), confidence="medium")
