"""Expressions to terms: what a name, an attribute, a call or a comparison stands for at one place of the code."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Protocol

from brim.audit.source.definitions import is_config_class, literal, names_a_config
from brim.audit.source.module import Function, Module, last_name
from brim.audit.source.quantities import quantity_of
from brim.audit.source.terms import (
    Apply,
    Choice,
    ClassRef,
    Constant,
    Filtered,
    FunctionRef,
    Instance,
    Mapping,
    ModuleRef,
    Namespace,
    Opaque,
    Setting,
    Several,
    Term,
)

if TYPE_CHECKING:
    from brim.audit.source.names import Names
    from brim.audit.source.settings import Settings
    from brim.audit.source.state import Frame, Layer
    from brim.audit.source.terms import Kind
    from brim.audit.source.uses import Uses

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_MOST_ELEMENTS = 32


class Calls(Protocol):
    """Whatever goes through the code that an expression reaches."""

    def call(self, node: ast.Call, frame: Frame) -> Term:
        """The term of a call."""

    def run(self, reference: FunctionRef, args: list[Term], keywords: dict[str, Term], node: ast.AST, frame: Frame) -> Term:
        """Call one of the project's functions."""

    def globals_of(self, module: Module) -> Layer[str]:
        """The names of a module's own level."""

    def written_elsewhere(self, base: Instance, owner: ast.ClassDef, name: str, frame: Frame) -> Term | None:
        """An attribute that only another method sets (`setup` of Lightning, `prepare`)."""


class Evaluator:
    """Reads expressions: what each stands for at the place that has been reached."""

    calls: Calls

    def __init__(self, names: Names, settings: Settings, uses: Uses) -> None:
        self._names, self._settings, self._uses = names, settings, uses
        self.read: dict[tuple[Term, str], Term] = {}
        """Attributes as they were read before."""

    def value(self, node: ast.expr | None, frame: Frame) -> Term:
        """The term of an expression."""
        if node is None:
            return Constant(frame.module, frame.module.tree, None)
        if isinstance(node, ast.Call):
            return self.calls.call(node, frame)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            return self._other(node, frame)
        found = method(node, frame)
        assert isinstance(found, Term)
        return found

    def _other(self, node: ast.expr, frame: Frame) -> Term:
        """Something that is not followed; what stands in it still is, for the calls in it."""
        inputs = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                inputs.append(self.value(child, frame))
            elif isinstance(child, ast.comprehension):
                inputs.append(self.value(child.iter, frame))
                self._hide(child.target, frame)
        return Opaque(frame.module, node, _short(frame.module, node), tuple(inputs))

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: Frame) -> Term:
        if isinstance(node, ast.ListComp | ast.GeneratorExp) and (filtered := self._filtered(node, frame)) is not None:
            return filtered
        for generator in node.generators:
            self.value(generator.iter, frame)
            self._hide(generator.target, frame)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        inputs = tuple(self.value(part, frame) for part in parts)
        return Opaque(frame.module, node, _short(frame.module, node), inputs)

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def _filtered(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Term | None:
        """`[size for size in ALLOWED if size <= batch_size]`."""
        first = node.generators[0]
        name = first.target.id if isinstance(first.target, ast.Name) else None
        if len(node.generators) != 1 or not first.ifs or name is None or last_name(node.elt) != name:
            return None
        several = self.value(first.iter, frame)
        if not isinstance(several, Several) or len(several.elements) > _MOST_ELEMENTS:
            return None
        turning = Setting(frame.module, first.target, name, None, "default")
        frame.state.names[name] = turning
        tests = tuple(self.value(each, frame) for each in first.ifs)
        condition = tests[0] if len(tests) == 1 else Apply(frame.module, node, "and", tests)
        return Filtered(frame.module, node, several.elements, turning, condition)

    def _hide(self, target: ast.expr, frame: Frame) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                frame.state.names[each.id] = Opaque(frame.module, each, each.id)

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Term:
        return Opaque(frame.module, node, "lambda")

    def _constant(self, node: ast.Constant, frame: Frame) -> Term:
        return Constant(frame.module, node, node.value)

    def _name(self, node: ast.Name, frame: Frame) -> Term:
        found = frame.state.names.get(node.id)
        if found is None and frame.globals is not None:
            found = frame.globals.get(node.id)
        if found is None and node.id in frame.module.imports:
            found = self.reference(frame.module.imports[node.id], frame.module, frame.module.tree)
        return found if found is not None else Opaque(frame.module, node, node.id)

    def reference(self, dotted: str, module: Module, node: ast.AST) -> Term | None:
        """What an imported dotted name stands for, if it is of the project."""
        place = self._names.place(dotted, module)
        if place is None:
            return None
        owner, name = place
        return self.calls.globals_of(owner).get(name) if name else ModuleRef(module, node, owner)

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Term:
        return self.attribute(self.value(node.value, frame), node.attr, node, frame)

    def attribute(self, base: Term, name: str, node: ast.AST, frame: Frame) -> Term:
        """`base.name`, by what the code has done to it so far, else by what its class says, else by its name."""
        known = frame.state.heap.get((base, name)) or self.read.get((base, name))
        if known is not None:
            return known
        found: Term | None = None
        if isinstance(base, ModuleRef):
            own = self.calls.globals_of(base.target)
            found = own.get(name) or self.reference(f"{base.target.name}.{name}", base.target, node)
        elif isinstance(base, Instance):
            found = self.of_class(base, base.owner, name, node, frame)
        elif isinstance(base, ClassRef):
            found = self.of_class(None, base.owner, name, node, frame)
        elif isinstance(base, Mapping):
            found = base.items.get(name)
        elif isinstance(base, Choice):
            found = self._of_choice(base, name, node, frame)
        if found is None:
            found = self.by_name(name, base, node, frame)
        if isinstance(found, Opaque | Setting | Instance | Namespace):
            # Read again, it is the same thing: what the code does to it later must be seen under both.
            self.read[(base, name)] = found
        return found

    def _of_choice(self, base: Choice, name: str, node: ast.AST, frame: Frame) -> Term | None:
        sides = [
            self.attribute(each, name, node, frame) for each in (base.then, base.otherwise) if not isinstance(each, Constant)
        ]
        return sides[0] if sides else None

    def by_name(self, name: str, base: Term, node: ast.AST, frame: Frame) -> Term:
        """An attribute of something unknown: a setting if its name says so."""
        quantity = quantity_of(name)
        around = frame.module.parents.get(node)
        is_method = isinstance(around, ast.Call) and around.func is node
        if quantity is None or is_method or name == "model_max_length" or not _may_hold_settings(base):
            return Opaque(frame.module, node, _short(frame.module, node), (base,))
        return self._settings.at(name, frame.module, node, kind="flag" if isinstance(base, Namespace) else "key")

    def of_class(
        self,
        base: Instance | None,
        owner: ast.ClassDef,
        name: str,
        node: ast.AST,
        frame: Frame,
        seen: set[ast.ClassDef] | None = None,
    ) -> Term | None:
        """An attribute that the class gives: a field, a property, a method; of its bases too."""
        module = self._names.homes[owner]
        seen = set() if seen is None else seen
        if owner in seen:
            return None
        seen.add(owner)
        for statement in owner.body:
            if isinstance(statement, Function) and statement.name == name:
                reference = FunctionRef(module, statement, statement, base)
                is_property = any(last_name(each) in {"property", "cached_property"} for each in statement.decorator_list)
                return self.calls.run(reference, [], {}, node, frame) if is_property and base is not None else reference
            target: ast.expr | None = statement.target if isinstance(statement, ast.AnnAssign) else None
            value = statement.value if isinstance(statement, ast.AnnAssign | ast.Assign) else None
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id == name:
                return self._field(module, owner, statement, name, value)
        for parent in owner.bases:
            inherited = self.reference_of(parent, module)
            if isinstance(inherited, ClassRef) and inherited.owner is not owner:
                found = self.of_class(base, inherited.owner, name, node, frame, seen)
                if found is not None:
                    return found
        return self.calls.written_elsewhere(base, owner, name, frame) if base is not None else None

    def reference_of(self, node: ast.expr, module: Module) -> Term | None:
        """The class or function of the project that a name in this module means."""
        dotted = module.dotted(node)
        return self.meaning(dotted, module, node) if dotted is not None else None

    def meaning(self, dotted: str, module: Module, node: ast.AST) -> Term | None:
        """What a dotted name means in a module: something of its own, or imported."""
        return self.calls.globals_of(module).get(dotted) or self.reference(dotted, module, node)

    def _field(self, module: Module, owner: ast.ClassDef, statement: ast.stmt, name: str, value: ast.expr | None) -> Term | None:
        if quantity_of(name) is not None:
            if is_config_class(owner):
                return self._settings.at(name, module, statement, kind="field", value=literal(value), owner=owner)
            return self._settings.at(name, module, value or statement, kind="constant", value=literal(value))
        known = literal(value)
        return None if known is None or value is None else Constant(module, value, known)

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Term:
        base = self.value(node.value, frame)
        index = literal(node.slice)
        if isinstance(index, str):
            if frame.module.dotted(node.value) == "os.environ":
                return self._settings.at(index, frame.module, node, kind="environment")
            return self.attribute(base, index, node, frame)
        if isinstance(index, int) and frame.module.dotted(node.value) == "sys.argv":
            return self._settings.at(f"argv[{index}]", frame.module, node, kind="flag")
        call = node.value
        if isinstance(index, int) and isinstance(call, ast.Call) and last_name(call.func) == "sorted" and len(call.args) == 1:
            several = self.value(call.args[0], frame)
            if isinstance(several, Several) and not call.keywords and -len(several.elements) <= index < len(several.elements):
                return Apply(frame.module, node, f"sorted{index}", several.elements)
        if isinstance(index, int) and isinstance(base, Filtered):
            return Apply(frame.module, node, f"pick{index}", (base,))
        if isinstance(index, int) and isinstance(base, Several) and -len(base.elements) <= index < len(base.elements):
            return base.elements[index]
        return Opaque(frame.module, node, _short(frame.module, node), (base, self.value(node.slice, frame)))

    def _binop(self, node: ast.BinOp, frame: Frame) -> Term:
        operands = (self.value(node.left, frame), self.value(node.right, frame))
        return Apply(frame.module, node, _BINARY.get(type(node.op), "?"), operands)

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Term:
        operand = self.value(node.operand, frame)
        if isinstance(node.op, ast.USub) and isinstance(operand, Constant) and isinstance(operand.value, int | float):
            return Constant(frame.module, node, -operand.value)
        what = {ast.Not: "not", ast.USub: "neg"}.get(type(node.op), "?")
        return Apply(frame.module, node, what, (operand,))

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Term:
        what = "or" if isinstance(node.op, ast.Or) else "and"
        return Apply(frame.module, node, what, tuple(self.value(each, frame) for each in node.values))

    def _compare(self, node: ast.Compare, frame: Frame) -> Term:
        terms = [self.value(each, frame) for each in (node.left, *node.comparators)]
        pairs = [
            Apply(frame.module, node, _COMPARED.get(type(op), "?"), (left, right))
            for op, left, right in zip(node.ops, terms, terms[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else Apply(frame.module, node, "and", tuple(pairs))

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Term:
        condition = self.value(node.test, frame)
        return Choice(frame.module, node, condition, self.value(node.body, frame), self.value(node.orelse, frame))

    def _namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Term:
        term = self.value(node.value, frame)
        self.bind(node.target, term, frame)
        return term

    def bind(self, target: ast.expr, term: Term, frame: Frame) -> None:
        """Assign, without a use of its own."""
        if isinstance(target, ast.Name):
            frame.state.names[target.id] = term
        elif isinstance(target, ast.Attribute):
            frame.state.heap[(self.value(target.value, frame), target.attr)] = term
        elif isinstance(target, ast.Subscript) and isinstance(key := literal(target.slice), str):
            frame.state.heap[(self.value(target.value, frame), key)] = term
        elif isinstance(target, ast.Tuple | ast.List):
            known = term.elements if isinstance(term, Several) else ()
            for index, each in enumerate(target.elts):
                if isinstance(each, ast.Starred):
                    break
                self.bind(each, known[index] if index < len(known) else Opaque(frame.module, each, "part", (term,)), frame)

    def _tuple(self, node: ast.Tuple | ast.List, frame: Frame) -> Term:
        return Several(frame.module, node, tuple(self.value(each, frame) for each in node.elts))

    _list = _tuple

    def _dict(self, node: ast.Dict, frame: Frame) -> Term:
        items: dict[str, Term] = {}
        mapping = Mapping(frame.module, node, items)
        for key, value in zip(node.keys, node.values, strict=True):
            term = self.value(value, frame)
            name = literal(key)
            if key is None and isinstance(term, Mapping):
                items.update(term.items)
            elif isinstance(name, str):
                items[name] = self.in_mapping(name, term, value, frame)
                self._uses.keep_named(name, items[name], value, frame)
        return mapping

    def in_mapping(self, name: str, term: Term, node: ast.expr, frame: Frame) -> Term:
        """A literal under a key such as "batch_size" is a setting of a dict config."""
        if isinstance(term, Constant) and quantity_of(name) is not None and isinstance(term.value, int | float):
            kind: Kind = "field" if names_a_config(node, frame.module) else "constant"
            return self._settings.at(name, frame.module, node, kind=kind, value=term.value)
        return term

    def _starred(self, node: ast.Starred | ast.Await, frame: Frame) -> Term:
        return self.value(node.value, frame)

    _await = _starred

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Term:
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self.value(each.value, frame)
        return Opaque(frame.module, node, "text")


def _may_hold_settings(base: Term) -> bool:
    """Not everything with an attribute `batch_size` is a config: a loader, a tensor's shape, a sampler."""
    if isinstance(base, Namespace | Instance):
        return True
    text = base.text if isinstance(base, Opaque) else base.name if isinstance(base, Setting) else ""
    return not any(word in text.lower() for word in ("loader", "sampler", "dataset", "shape", "tokenizer", "scheduler", "model"))


def _short(module: Module, node: ast.AST) -> str:
    """The text of a node, not too long."""
    return module.text_of(node)[:200]


def bound_name(target: ast.expr) -> str:
    """The last part of what is assigned to: a name, an attribute, a key."""
    if isinstance(target, ast.Subscript):
        key = literal(target.slice)
        return key if isinstance(key, str) else ""
    return last_name(target)
