"""Where a project's settings are defined: dataclass fields, command-line flags, config classes, YAML and JSON keys, launchers."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from brim.audit.source.module import Function, Module, Source, keyword_of, last_name
from brim.audit.source.quantities import Quantity, quantity_of
from brim.audit.source.terms import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.source.project import Project

_CONFIG_CLASS = re.compile(r"config|cfg|args|arguments|settings|options|hparams|hyper|params", re.IGNORECASE)
_LARGEST_CONFIG_BYTES = 200_000


@dataclass(frozen=True, eq=False)
class Definition:
    """A setting as the project defines it."""

    name: str
    quantity: Quantity | None
    kind: Kind
    value: Any
    file: str
    line: int
    module: Module | None = None
    node: ast.AST | None = None
    owner: ast.ClassDef | None = None
    spelling: str = ""
    """Of a flag: as it is typed, where that is not its name."""


@dataclass
class Definitions:
    """All of a project, by name."""

    by_name: dict[str, list[Definition]] = field(default_factory=dict)

    def add(self, definition: Definition) -> None:
        """Keep one more."""
        self.by_name.setdefault(definition.name, []).append(definition)

    def find(self, name: str, module: Module | None = None, owner: ast.ClassDef | None = None) -> Definition | None:
        """The definition of a name: of that class, else of that file, else the first."""
        found = self.by_name.get(name, [])
        for wanted in (
            [each for each in found if owner is not None and each.owner is owner],
            [each for each in found if module is not None and each.module is module],
        ):
            if wanted:
                return wanted[0]
        return found[0] if found else None

    def together_with(self, definition: Definition) -> list[Definition]:
        """Those of the same class, or, without one, of the same file."""
        if self._together is None:
            self._together = {}
            for each in self:
                self._together.setdefault((id(each.owner), id(each.module)), []).append(each)
        return self._together.get((id(definition.owner), id(definition.module)), [])

    _together: dict[tuple[int, int], list[Definition]] | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[Definition]:
        for found in self.by_name.values():
            yield from found


def definitions_of(project: Project) -> Definitions:
    """Everything that a user can set."""
    found = Definitions()
    for module in project.modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and is_config_class(node):
                _fields(found, module, node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                _flag(found, module, node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and is_config_name(last_name(node.targets[0])):
                _entries(found, module, node.value)
    for source in project.configs:
        _keys(found, source)
    return found


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class gets its `__init__` from its fields."""
    names = {last_name(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}
    bases = {last_name(each) for each in node.bases}
    return bool(
        names & {"dataclass", "define", "attrs", "s", "frozen", "pydantic_dataclass"}
        or bases & {"BaseModel", "BaseSettings", "NamedTuple"}
        or any(base.endswith(("TrainingArguments", "SFTConfig")) for base in bases)
    )


def is_config_class(node: ast.ClassDef) -> bool:
    """Whether a class holds settings: a dataclass, or one whose name says so."""
    return is_dataclass(node) or bool(_CONFIG_CLASS.search(node.name))


def names_a_config(node: ast.AST, module: Module) -> bool:
    """Whether a dict literal is a config, by the name that it gets or the function that returns it."""
    for each in module.above(node):
        if isinstance(each, ast.Assign):
            return any(is_config_name(last_name(target)) for target in each.targets)
        if isinstance(each, ast.Call) and last_name(each.func) in {
            "SimpleNamespace",
            "Namespace",
            "ConfigDict",
            "EasyDict",
            "edict",
            "Munch",
        }:
            return True
        if isinstance(each, Function):
            return is_config_name(each.name) or "default" in each.name
    return False


def is_config_name(name: str) -> bool:
    """Whether a name is one that configs have."""
    if "kwargs" in name.lower():
        return False
    return bool(_CONFIG_CLASS.search(name)) or name in {"C", "CFG", "HP", "hp", "opt", "opts", "conf"}


def literal(node: ast.AST | None) -> Any:
    """The value of a literal, `field(default=8)` and `-1` included; None if it is none."""
    if isinstance(node, ast.Call) and last_name(node.func) in {"field", "Field", "Factory"}:
        default = keyword_of(node, "default")
        return literal(default.value if default else node.args[0] if node.args else None)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool):
        return node.value
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(value := literal(node.operand), int | float)
    ):
        return -value
    return None


def _fields(found: Definitions, module: Module, owner: ast.ClassDef) -> None:
    for statement in owner.body:
        target: ast.expr | None = None
        value: ast.expr | None = None
        if isinstance(statement, ast.AnnAssign):
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Name) or (quantity := quantity_of(target.id)) is None:
            continue
        found.add(
            Definition(
                name=target.id, quantity=quantity, kind="field", value=literal(value), file=module.source.file,
                line=statement.lineno, module=module, node=statement, owner=owner,
            )
        )  # fmt: skip


def _flag(found: Definitions, module: Module, call: ast.Call) -> None:
    """Argparse's `add_argument`, click's `option`, absl's `DEFINE_integer`."""
    name = last_name(call.func)
    if name not in {"add_argument", "option", "Option", "DEFINE_integer", "DEFINE_float", "DEFINE_bool", "add"}:
        return
    words = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = [each for each in words if each.startswith("--")] or words[:1]
    target = keyword_of(call, "dest")
    spelled = target.value.value if target and isinstance(target.value, ast.Constant) else flags[0] if flags else ""
    if not isinstance(spelled, str) or (quantity := quantity_of(spelled.lstrip("-"))) is None:
        return
    default = keyword_of(call, "default")
    value = (
        literal(default.value) if default else literal(call.args[1]) if name.startswith("DEFINE") and len(call.args) > 1 else None
    )
    found.add(
        Definition(
            name=spelled.lstrip("-").replace("-", "_"), quantity=quantity, kind="flag", value=value, file=module.source.file,
            line=call.lineno, module=module, node=call, spelling=(flags[0] if flags else "").lstrip("-").replace("-", "_"),
        )
    )  # fmt: skip


def _entries(found: Definitions, module: Module, node: ast.Dict) -> None:
    """The entries of a dict that is a config."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(value, ast.Dict):
            _entries(found, module, value)
        name, known = literal(key), literal(value)
        if isinstance(name, str) and known is not None and (quantity := quantity_of(name)) is not None:
            found.add(
                Definition(
                    name=name, quantity=quantity, kind="field", value=known, file=module.source.file, line=value.lineno,
                    module=module, node=value,
                )
            )  # fmt: skip


_KEY_LINE = re.compile(r"""^\s*["']?(?P<key>[\w.-]+)["']?\s*[:=]\s*(?P<value>[^#,]*)""")


def _keys(found: Definitions, source: Source) -> None:
    """Keys of YAML, JSON and TOML, line by line: enough to say where a value is set, in files of any dialect."""
    if len(source.text) > _LARGEST_CONFIG_BYTES:
        return
    for number, line in enumerate(source.text.splitlines(), start=1):
        match = _KEY_LINE.match(line)
        if match is None or (quantity := quantity_of(match["key"])) is None:
            continue
        found.add(
            Definition(
                name=match["key"].replace("-", "_"), quantity=quantity, kind="key", value=_scalar(match["value"]),
                file=source.file, line=number,
            )
        )  # fmt: skip


def _scalar(text: str) -> Any:
    text = text.strip().strip(",").strip()
    try:
        value = json.loads(text.lower() if text in {"True", "False"} else text)
    except (ValueError, RecursionError):
        return text.strip("\"'") or None
    return value if isinstance(value, int | float | str | bool) else None
