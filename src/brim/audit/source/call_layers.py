"""Single layers of a pretrained model, called by hand: which mask they get and what is taken of what they return."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.module import Function, keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project

_CONTAINERS: Final = frozenset({"layers", "h", "blocks"})
_SAME_SHAPE: Final = frozenset(
    {"to", "bool", "float", "long", "int", "half", "type", "cuda", "contiguous", "clone", "detach", "bfloat16"}
)
_TUPLES: Final = re.compile(r"falcon|bloom|gpt-?j|gpt-?neo(?!-?x)|codegen|\bmpt\b|\bt5\b", re.IGNORECASE)
"""Families whose layers still return a tuple."""


def check_mask(module: Module, project: Project) -> Iterator[Found]:  # noqa: ARG001
    """A mask of [batch, tokens] goes to a layer that wants [batch, 1, tokens, tokens]."""
    if re.search(r"flash_att", module.source.text):
        return
    for call in _layer_calls(module):
        given = keyword_of(call, "attention_mask")
        value = (
            given.value
            if given is not None
            else call.args[1]
            if len(call.args) > 1 and "mask" in last_name(call.args[1])
            else None
        )
        function = module.enclosing(call, ast.FunctionDef, ast.AsyncFunctionDef)
        if value is None or not _is_flat(value, function, module, 0):
            continue
        message = _(
            "{mask} is the mask of the model, [batch, tokens], and a single layer wants [batch, 1, tokens, tokens]. At batch size 1 it "
            "broadcasts over the queries, so that every token sees the future; at batch size 2 it no longer fits."
        )
        yield module.found("mask-2d-to-layer", given or value, message.format(mask=module.text_of(value)))


def _is_flat(node: ast.expr, function: ast.stmt | None, module: Module, depth: int) -> bool:
    """Whether a mask is for sure still the one that the tokenizer made."""
    if depth > 5:
        return False
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "attention_mask"
    if isinstance(node, ast.Attribute):
        return node.attr == "attention_mask"
    if isinstance(node, ast.Call):
        return _is_flat_call(node, function, module, depth)
    if isinstance(node, ast.BinOp):
        sides = [
            each
            for each in (node.left, node.right)
            if not isinstance(each, ast.Constant | ast.UnaryOp) and "finfo" not in ast.unparse(each)
        ]
        return len(sides) == 1 and _is_flat(sides[0], function, module, depth + 1)
    if not isinstance(node, ast.Name):
        return False
    where: ast.AST = function or module.tree
    values = [
        each.value
        for each in ast.walk(where)
        if isinstance(each, ast.Assign) and any(isinstance(target, ast.Name) and target.id == node.id for target in each.targets)
    ]
    others = [each for each in values if not any(inner is node for inner in ast.walk(each))]
    if others:
        return all(_is_flat(each, function, module, depth + 1) for each in others)
    return _is_parameter_of_a_model(node.id, function)


def _is_flat_call(call: ast.Call, function: ast.stmt | None, module: Module, depth: int) -> bool:
    name = last_name(call.func)
    if name in _SAME_SHAPE and isinstance(call.func, ast.Attribute):
        return _is_flat(call.func.value, function, module, depth + 1)
    if name in {"ones_like", "zeros_like"} and call.args:
        return "input_ids" in ast.unparse(call.args[0])
    return name == "ones" and len([each for each in call.args if not isinstance(each, ast.Starred)]) == 2


def _is_parameter_of_a_model(name: str, function: ast.stmt | None) -> bool:
    """A parameter is the tokenizer's mask where token ids come in beside it; further inside it may be any other."""
    if not isinstance(function, Function):
        return False
    arguments = function.args
    parameters = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return name in parameters and "input_ids" in parameters


def check_indexed(module: Module, project: Project) -> Iterator[Found]:  # noqa: ARG001
    """The first row of the batch is taken for the first of a tuple."""
    if _TUPLES.search(module.source.text):
        return
    for call in _layer_calls(module):
        taken = _zeroth(call, module)
        if taken is None:
            continue
        container = "h" if ".h" in ast.unparse(call.func) else "layers"
        message = _(
            "Decoder layers of transformers return a tensor since 4.54, so [0] takes row 0 of the batch: all other sequences are "
            "lost, and at batch size 1 the dimension of the batch is."
        )
        edits = (module.replace(taken, module.text_of(call)),) if taken.value is call else ()
        yield module.found(
            "layer-output-indexed", taken, message, confidence="high" if container == "layers" else "medium", edits=edits
        )


def _zeroth(call: ast.Call, module: Module) -> ast.Subscript | None:
    """`layer(...)[0]`, or `out = layer(...)` and then `out[0]` without a question what it is."""
    parent = module.parents.get(call)
    if isinstance(parent, ast.Subscript) and parent.value is call:
        return parent if _is_zero(parent) and not _asks_the_type(parent, module) else None
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1 or not isinstance(parent.targets[0], ast.Name):
        return None
    name, loop = parent.targets[0].id, module.enclosing(call, ast.For)
    for node in ast.walk(loop) if loop is not None else ():
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name and _is_zero(node):
            return None if _asks_the_type(node, module) else node
    return None


def _is_zero(node: ast.Subscript) -> bool:
    return isinstance(node.slice, ast.Constant) and node.slice.value == 0 and type(node.slice.value) is int


def _asks_the_type(node: ast.AST, module: Module) -> bool:
    for each in module.above(node):
        if isinstance(each, ast.If | ast.IfExp) and re.search(r"isinstance|is_tensor|type\(|dim\(|ndim", ast.unparse(each.test)):
            return True
        if isinstance(each, Function):
            return False
    return False


def _layer_calls(module: Module) -> Iterator[ast.Call]:
    """Calls of single layers that come from a pretrained model of transformers."""
    if not re.search(r"\.(layers|h|blocks)\b", module.source.text) or not _uses_transformers(module):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.For):
            container, names = _container(node)
            if container is not None and _is_pretrained(container, module):
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                        yield call
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            chosen = node.func.value
            if isinstance(chosen, ast.Attribute) and chosen.attr in {"layers", "h"} and _is_pretrained(chosen, module):
                yield node


def _container(loop: ast.For) -> tuple[ast.Attribute | None, set[str]]:
    """What a loop runs over, if that is a list of layers, and the names that stand for a layer."""
    node: ast.expr = loop.iter
    while isinstance(node, ast.Call) and last_name(node.func) in {"enumerate", "zip", "tqdm", "list", "reversed"} and node.args:
        node = node.args[0]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    if not isinstance(node, ast.Attribute) or node.attr not in _CONTAINERS:
        return None, set()
    return node, {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}


def _uses_transformers(module: Module) -> bool:
    return any(each.partition(".")[0] in {"transformers", "peft"} for each in module.imports.values())


def _is_pretrained(container: ast.Attribute, module: Module) -> bool:
    """Layers that the project builds from its own classes may take and return what they like."""
    text = ast.unparse(container)
    if not text.startswith("self.") or text.count(".") > 1:
        return container.attr != "blocks" or "from_pretrained" in module.source.text
    owner = module.enclosing(container, ast.ClassDef)
    for node in ast.walk(owner) if owner is not None else ():
        if isinstance(node, ast.Assign) and any(ast.unparse(each) == text for each in node.targets):
            return _is_made_of_pretrained(node.value, module)
    return False


def _is_made_of_pretrained(value: ast.expr, module: Module) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr in {"layers", "h"}:
            return True
        if isinstance(node, ast.Call) and (module.dotted(node.func) or "").startswith("transformers."):
            return True
    has_own = any(isinstance(each, ast.Call) and last_name(each.func) not in {"ModuleList", "list"} for each in ast.walk(value))
    return not has_own and bool(re.search(r"\.model\.layers|\.transformer\.h\b", module.source.text))


CHECKS = (check_mask, check_indexed)
