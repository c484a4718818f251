"""Values that ignore the config: a literal where the setting should stand."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from brim.audit.source.clamps import SHOWN, TAKERS, is_side_work
from brim.audit.source.definitions import Definition, is_config_class, is_config_name
from brim.audit.source.module import Function, keyword_of, last_name
from brim.audit.source.terms import ClassRef, Constant, Setting, Term, settings_in, walk
from brim.audit.source.unused import check_unused
from brim.audit.source.uses import WINDOW
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.flow import Flow
    from brim.audit.source.module import Module
    from brim.audit.source.quantities import Quantity
    from brim.audit.source.uses import Use
    from brim.records.findings import Severity

_RULES: dict[Quantity, str] = {
    "batch": "batch-hard-coded",
    "accumulation": "accumulation-hard-coded",
    "workers": "workers-hard-coded",
    "pinning": "pinning-off",
    "learning-rate": "learning-rate-hard-coded",
}
_LOW: set[Quantity] = {"workers", "pinning"}
_OPTIMIZERS = re.compile(r"(^|\.)(\w*Adam\w*|\w*SGD|\w*Adafactor|\w*Lion\w*|RMSprop|Adagrad)$")
_SERVER = {"port", "host"}
"""Fields of a config of a web server, whose workers and batches are others."""


class Relations:
    """Which modules belong to one program: those that one imports, and those that import it."""

    def __init__(self, flow: Flow) -> None:
        self._below: dict[str, set[str]] = {}
        for module in flow.project.modules:
            direct = set()
            for dotted in module.imports.values():
                place = flow.names.place(dotted, module)
                if place is not None:
                    direct.add(place[0].name)
            self._below[module.name] = direct
        self._programs: dict[str, set[str]] = {}
        self._attributes: dict[str, dict[str, set[str]]] = {}
        self._names: dict[str, set[str]] = {}
        self._made: dict[str, set[str]] = {}
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

    def attributes_of(self, module: Module) -> dict[str, set[str]]:
        """By the text of each object (`self.config`, `args`): the attributes that the module reads of it."""
        known = self._attributes.get(module.name)
        if known is None:
            known = self._attributes[module.name] = {}
            for node in module.nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    known.setdefault(chain(node.value), set()).add(node.attr)
        return known

    def users_of(self, module: Module) -> set[str]:
        """The names of the modules that import this one, over any number of steps, and its own."""
        return {name for name, below in self._closed.items() if module.name in below}

    def made_in(self, module: Module) -> set[str]:
        """The objects that the module makes by calling a class: `arguments = TrainingArguments(...)`."""
        known = self._made.get(module.name)
        if known is None:
            known = self._made[module.name] = {
                chain(target)
                for each in module.nodes
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and last_name(each.value.func)[:1].isupper()
                for target in each.targets
            }
        return known

    def has_config(self, module: Module) -> bool:
        """Whether a name in the module is one that configs have."""
        known = self._names.get(module.name)
        if known is None:
            known = {node.id for node in module.nodes if isinstance(node, ast.Name)}
            self._names[module.name] = known
        return any(is_config_name(name) for name in known)


def chain(node: ast.AST) -> str:
    """`self.config` as text; empty for what is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def check_fixed(flow: Flow) -> Iterator[Found]:
    """Literals in the place of settings, and settings without effect."""
    relations = Relations(flow)
    users: dict[Quantity, list[Definition]] = {}
    for definition in flow.definitions:
        if definition.quantity is not None and definition.module is not None and not _is_of_a_server(definition):
            users.setdefault(definition.quantity, []).append(definition)
    for setting in flow.settings.all():
        if setting.kind in {"key", "environment", "flag"} and setting.quantity is not None and _is_a_source(setting, relations):
            users.setdefault(setting.quantity, []).append(_as_definition(setting))
    literals = list(_Literals(flow, users, relations).check())
    yield from literals
    reported = {row.setting for each in literals for row in each.in_force}
    yield from check_unused(flow, users, relations, reported)


def _is_of_a_server(definition: Definition) -> bool:
    return bool(_SERVER & _field_names(definition))


def _is_a_source(setting: Setting, relations: Relations) -> bool:
    """Whether reading it shows that somebody can set it: not `training_args.learning_rate`, which the code itself has made."""
    node, module = setting.node, setting.module
    if not isinstance(node, ast.Attribute):
        return isinstance(node, ast.expr)
    base = chain(node.value)
    if setting.kind == "key" and (not any(map(is_config_name, base.split("."))) or "train" in base.lower()):
        return False
    return base not in relations.made_in(module)


def _as_definition(setting: Setting) -> Definition:
    """A setting that is only known from where it is read: a key of a YAML file that is not here."""
    line = getattr(setting.node, "lineno", 1)
    return Definition(
        name=setting.name, quantity=setting.quantity, kind="key", value=setting.value, file=setting.module.source.file, line=line,
        module=setting.module,
    )  # fmt: skip


def _is_at_hand(definition: Definition, module: Module, relations: Relations, flow: Flow) -> bool:
    """Whether the module knows the setting's config: it is its own, it reads other settings of it, or the script that has it imports it."""
    assert definition.module is not None
    if definition.module is module:
        return True
    if not relations.are_of_one_program(module, definition.module) or definition.kind == "key":
        return False
    if definition.owner is not None and definition.owner.name in module.imports:
        return True
    siblings = _siblings(definition, flow)
    known = len(siblings & set().union(*relations.attributes_of(module).values()))
    is_close = known >= 2 or (known == 1 and relations.imports(module, definition.module))
    if is_close and relations.has_config(module):
        return True
    return relations.imports(definition.module, module, directly=True) and "__main__" in definition.module.source.text


_TEST_FILE = re.compile(r"(^|\.)(tests?|testing|test_utils|test_\w*|\w*_test|conftest)(\.|$)")


class _Literals:
    """Looks for literals that stand where a setting of the program should."""

    def __init__(self, flow: Flow, users: dict[Quantity, list[Definition]], relations: Relations) -> None:
        self._flow, self._users, self._relations = flow, users, relations
        self._at_hand: dict[tuple[str, Quantity], Definition | None] = {}
        self._holders: dict[tuple[int, int], str | None] = {}

    def check(self) -> Iterator[Found]:
        """Every literal once."""
        taking = [use for use in self._flow.uses if use.quantity in _RULES and _takes(use)]
        honoured = {(use.quantity, use.module.name) for use in taking if not use.is_for_evaluation and _is_settable(use.term)}
        seen: set[int] = set()
        for use in taking:
            literal = fixed_value(use.term, use.quantity)
            if literal is None or id(literal.node) in seen or not self._is_candidate(use, literal):
                continue
            definition = self._defined_for(use.module, use.quantity)
            is_honoured = any((use.quantity, name) in honoured for name in self._relations.program_of(use.module))
            found = None
            if definition is None:
                found = _off(use, literal)
            elif not is_honoured and definition.node is not literal.node and not _is_of_a_demo(literal, definition):
                found = self._ignored(use, literal, definition)
            if found is not None:
                seen.add(id(literal.node))
                yield found

    def _is_candidate(self, use: Use, literal: Setting | Constant) -> bool:
        if use.is_for_evaluation and use.quantity != "pinning":
            return False
        if _TEST_FILE.search(use.module.name) or is_side_work(use):
            return False
        return not self._is_the_setting(use, literal)

    def _is_the_setting(self, use: Use, literal: Setting | Constant) -> bool:
        """`DPOConfig(batch_size=4)`, of the project's own DPOConfig, or a field of such a class."""
        owner = literal.module.enclosing(literal.node, ast.ClassDef)
        if owner is not None and is_config_class(owner) and literal.module.statement(literal.node) in owner.body:
            return True
        known = self._flow.evaluator.meaning(use.call, use.module, literal.node)
        return isinstance(known, ClassRef) and is_config_class(known.owner)

    def _defined_for(self, module: Module, quantity: Quantity) -> Definition | None:
        """The setting that a literal in this module should have been."""
        key = (module.name, quantity)
        if key not in self._at_hand:
            self._at_hand[key] = next(
                (
                    each
                    for each in self._users.get(quantity, [])
                    if each.module is not None and _is_at_hand(each, module, self._relations, self._flow)
                ),
                None,
            )
        return self._at_hand[key]

    def _ignored(self, use: Use, literal: Setting | Constant, definition: Definition) -> Found | None:
        quantity, value, own = use.quantity, literal.value, definition.value
        if quantity == "pinning" and value is not False:
            return None
        shown: tuple[Any, ...] = SHOWN[quantity]
        if isinstance(own, int | float) and own not in shown:
            shown = tuple(sorted([*shown, own]))
        holder = self._holder(literal, definition)
        edits = _edits(literal, definition, holder)
        text = _("{taker} always uses {value}; `{setting}` ({file}:{line}) is ignored.").format(
            taker=_taker(use),
            value=value,
            setting=f"{holder}.{definition.name}" if holder else definition.name,
            file=definition.file,
            line=definition.line,
        )
        severity: Severity | None = "low" if quantity in _LOW else None
        if severity is None and (not isinstance(own, int | float) or own == value):
            severity = "medium"  # nothing differs yet
        return literal.module.found(
            _RULES[quantity],
            literal.node,
            text,
            severity=severity,
            in_force=tuple(InForce(setting=definition.name, set=each, in_force=value) for each in shown if each != value),
            edits=edits,
            is_safe=bool(edits),
        )

    def _holder(self, literal: Setting | Constant, definition: Definition) -> str | None:
        """The expression that holds the config at this place: `self.config`, `args`. Only one that surely has the attribute."""
        node, module = literal.node, literal.module
        function = module.enclosing(node, ast.FunctionDef, ast.AsyncFunctionDef)
        scope: ast.AST = module.tree if function is None else function
        key = (id(scope), id(definition))
        if key not in self._holders:
            self._holders[key] = self._find_holder(scope, node, module, definition)
        return self._holders[key]

    def _find_holder(self, scope: ast.AST, node: ast.AST, module: Module, definition: Definition) -> str | None:
        known = _siblings(definition, self._flow)
        allowed = _members(definition, self._flow)
        names = [chain(each.value) for each in ast.walk(scope) if isinstance(each, ast.Attribute)
                 and isinstance(each.ctx, ast.Load) and each.attr in known and each.lineno <= getattr(node, "lineno", 0)]  # fmt: skip
        arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs] if isinstance(scope, Function) else []
        owner = definition.owner.name if definition.owner is not None else ""
        annotated = [
            each.arg for each in arguments if each.annotation is not None and owner and last_name(each.annotation) == owner
        ]
        if annotated:
            return annotated[0]
        read = self._relations.attributes_of(module)
        for name in dict.fromkeys(names):
            if name and (name != "self" or definition.owner is None) and (read[name] <= allowed or definition.name in read[name]):
                return name
        return None


def _takes(use: Use) -> bool:
    if use.quantity == "learning-rate":
        name = use.call.rpartition(".")[2]
        return name.endswith(("TrainingArguments", "SFTConfig", "DPOConfig")) or _OPTIMIZERS.search(use.call) is not None
    return use.call == WINDOW or TAKERS.search(use.call) is not None


def _is_settable(term: Term) -> bool:
    return any(each.is_the_users for each in settings_in(term))


def fixed_value(term: Term, quantity: Quantity | None = None) -> Setting | Constant | None:
    """The number of a value that no setting can change; None if one can, or if it is not known. Only pinning is true or false."""
    is_fixed = isinstance(term, Constant) or (isinstance(term, Setting) and term.kind == "constant")
    if not is_fixed or not isinstance(term, Constant | Setting) or not isinstance(term.value, int | float):
        return None
    return term if isinstance(term.value, bool) == (quantity == "pinning") else None


def _is_of_a_demo(literal: Setting | Constant, definition: Definition) -> bool:
    """Whether a literal stands in the `__main__` block of a file whose config is a class that nothing parses: nobody can set it."""
    module = literal.module
    if definition.kind != "field" or module.enclosing(literal.node, ast.FunctionDef, ast.AsyncFunctionDef) is not None:
        return False
    blocks = [each for each in module.above(literal.node) if isinstance(each, ast.If) and "__name__" in module.text_of(each.test)]
    return bool(blocks) and "parse" not in module.text_of(blocks[0])


def _taker(use: Use) -> str:
    if use.call == WINDOW:
        return _("The loop")
    name = use.call.rpartition(".")[2]
    return _("The {name}").format(name=name) if name.endswith(("Loader", "Trainer", "Sampler")) else name


def _off(use: Use, literal: Setting | Constant) -> Found | None:
    """`num_workers=0` or `pin_memory=False` in a script that has no setting for it."""
    if use.quantity == "pinning" and literal.value is False:
        text = _("pin_memory=False: each copy to the GPU blocks the training process.")
    elif use.quantity == "workers" and literal.value == 0:
        text = _("num_workers=0: the training process loads each batch itself while the GPU waits.")
    else:
        return None
    row = InForce(setting=use.target, set=None, in_force=literal.value)
    return literal.module.found(_RULES[use.quantity], literal.node, text, confidence="medium", severity="low", in_force=(row,))


def _edits(literal: Setting | Constant, definition: Definition, holder: str | None) -> tuple[Edit, ...]:
    """The literal replaced by the setting, unless that is what it is assigned to."""
    node, module = literal.node, literal.module
    if holder is None or not isinstance(node, ast.expr):
        return ()
    text = f"{holder}.{definition.name}"
    around = module.parents.get(node)
    if isinstance(around, ast.Assign) and text in {chain(each) for each in around.targets}:
        return ()
    return (module.replace(node, text),)


def _siblings(definition: Definition, flow: Flow) -> set[str]:
    """The names of the settings that are defined together with this one."""
    known = {each.name for each in flow.definitions.together_with(definition)}
    return known | _field_names(definition)


def _members(definition: Definition, flow: Flow) -> set[str]:
    """Every attribute that the object with this setting has: of its class and the classes above, or of its parser."""
    assert definition.module is not None
    if definition.owner is not None:
        return _members_of_class(definition.owner, definition.module, flow, set())
    if definition.kind != "flag":
        return set()
    flags: set[str] = set()
    for node in ast.walk(definition.module.tree):
        if isinstance(node, ast.Call) and last_name(node.func) in {"add_argument", "option", "add"}:
            target = keyword_of(node, "dest")
            words = [target.value] if target is not None else node.args
            texts = [each.value for each in words if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            flags |= {each.lstrip("-").replace("-", "_") for each in texts}
    return flags


def _members_of_class(owner: ast.ClassDef, module: Module, flow: Flow, seen: set[str]) -> set[str]:
    found = {each.name for each in owner.body if isinstance(each, Function)}
    for each in owner.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign):
            found |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    for base in owner.bases:
        known = flow.evaluator.reference_of(base, module)
        if isinstance(known, ClassRef) and known.owner.name not in seen:
            seen.add(known.owner.name)
            found |= _members_of_class(known.owner, known.module, flow, seen)
    return found


def _field_names(definition: Definition) -> set[str]:
    if definition.owner is None:
        return set()
    return {
        each.target.id for each in definition.owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


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
            "The evaluation batch size is computed from {setting}: changing one changes both, and evaluation has its own memory peak."
        )
        yield use.module.found("eval-batch-tied", use.node, text.format(setting=tied[0].name), confidence="medium")
