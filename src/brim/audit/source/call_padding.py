"""Sequences padded to the longest that could ever come: by the tokenizer, by its keyword arguments, or by hand."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_losses import argument_of
from brim.audit.source.loop_model import model_of
from brim.audit.source.loop_reach import reach_of
from brim.audit.source.module import calls_of, is_test, keyword_of, last_name
from brim.audit.source.names import names_of
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project
    from brim.records.findings import Severity

_TOKENIZER: Final = re.compile(r"tok|processor|encode", re.IGNORECASE)
_FIXED_SHAPE: Final = re.compile(
    r"torch\.compile|torch_compile|torch_xla|\bxla|\btpu\b|onnx|torch\.export|jit\.trace|neuron|habana|diffusers|CLIP|pixel_values|Whisper"
    r"|tensorrt|static_shape|xm\.mark_step|flax|jax",
    re.IGNORECASE,
)
_TRAINS: Final = re.compile(
    r"Trainer\(|TrainingArguments\(|\.backward\(|LightningModule|train_dataloader|train_dataset|SFTConfig\("
)
_MAXIMUM: Final = re.compile(r"max|block_size|seq(uence)?_?len|context_len|cutoff_len|pad_(to|size|len)", re.IGNORECASE)
"""Names of the length that sequences are padded to."""
_OF_BATCH: Final = frozenset({"max", "amax", "item", "longest", "min"})
_LONGEST: Final = re.compile(r"batch|longest|local", re.IGNORECASE)
_MAPPED: Final = frozenset({"__init__", "__getitem__", "tokenize", "preprocess", "tokenize_function", "preprocess_function"})
"""Functions that a dataset or its `map` calls, with settings as parameters."""
_SHORT: Final = 64
"""Tokens up to which padding to the maximum costs little."""


def check_padding(module: Module, project: Project) -> Iterator[Found]:
    """Every sequence is padded to the length of the longest that could ever come."""
    text = module.source.text
    if not _MAXIMUM.search(text) or _FIXED_SHAPE.search(text) or is_test(module) or not _trains(module, project):
        return
    names = names_of(project)
    for call in reach_of(project).calls(module):
        padding = keyword_of(call, "padding")
        if padding is None or not isinstance(padding.value, ast.Constant | ast.Name) or not _TOKENIZER.search(_words(call)):
            continue
        scope = names.around(call, module)
        if not _is_to_maximum(padding.value, scope, project) or _is_a_trial(call, scope, project):
            continue
        if _is_short(call) or _is_for_evaluation(call, module):
            continue
        length = keyword_of(call, "max_length")
        yield _padded(padding, ast.unparse(length.value) if length else "model_max_length", module)
    yield from _by_keywords(module)
    yield from _by_hand(module, project)


def _padded(node: ast.AST, length: str, module: Module) -> Found:
    message = _(
        "Every sequence is padded to {length} tokens, however short it is: the GPU computes and stores the padding like text. Pad each "
        "batch to its own longest sequence instead."
    )
    severity: Severity | None = "low" if _is_streamed(node, module) else None
    return module.found("padding-to-maximum", node, message.format(length=length), severity=severity)


def _trains(module: Module, project: Project) -> bool:
    if _TRAINS.search(module.source.text):
        return True
    return any(_TRAINS.search(each.source.text) for each in reach_of(project).importers(module))


def _words(call: ast.Call) -> str:
    """What is called; of `partial(tokenizer, ...)`, what it calls later."""
    function = call.args[0] if last_name(call.func) == "partial" and call.args else call.func
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else last_name(function)


def _is_to_maximum(value: ast.expr, scope: Scope, project: Project) -> bool:
    """`"max_length"`, also behind a name that is never anything else."""
    if isinstance(value, ast.Name):
        values = [each.value for each in model_of(project).losses.assigned(scope, value.id)]
        return bool(values) and all(_is_maximum(each) for each in values)
    return _is_maximum(value)


def _is_maximum(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value == "max_length"


def _is_short(call: ast.Call) -> bool:
    length = keyword_of(call, "max_length")
    return (
        length is not None
        and isinstance(length.value, ast.Constant)
        and isinstance(length.value.value, int)
        and length.value.value <= _SHORT
    )


def _is_for_evaluation(node: ast.AST, module: Module) -> bool:
    function = module.enclosing(node, ast.FunctionDef)
    return function is not None and re.search(r"eval|valid|test|predict|infer|generate|debug|preview", function.name) is not None


def _is_a_trial(call: ast.Call, scope: Scope, project: Project) -> bool:
    """One sample, to see whether the tokenizer works: a literal text, `dataset[0]`, or a call in an `except`."""
    if any(isinstance(each, ast.ExceptHandler) for each in scope.module.above(call)):
        return True
    return bool(call.args) and _is_one_sample(call.args[0], scope, project)


def _is_one_sample(node: ast.expr, scope: Scope, project: Project, depth: int = 0) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.List):
        return bool(node.elts) and all(_is_one_sample(each, scope, project, depth + 1) for each in node.elts)
    if isinstance(node, ast.Subscript):
        is_first = isinstance(node.slice, ast.Constant) and type(node.slice.value) is int
        return is_first or _is_one_sample(node.value, scope, project, depth + 1)
    if not isinstance(node, ast.Name) or depth > 2:
        return False
    values = [each.value for each in model_of(project).losses.assigned(scope, node.id)]
    return bool(values) and all(_is_one_sample(each, scope, project, depth + 1) for each in values)


def _is_streamed(node: ast.AST, module: Module) -> bool:
    """Documents of a corpus that is read as a stream are mostly longer than the limit, so little is padded."""
    owner = module.enclosing(node, ast.ClassDef)
    return owner is not None and any(last_name(each) == "IterableDataset" for each in owner.bases)


def _by_keywords(module: Module) -> Iterator[Found]:
    """`options = {"padding": "max_length", ...}` and later `tokenizer(text, **options)`."""
    if "**" not in module.source.text:
        return
    unpacked = {last_name(word.value) for call in calls_of(module.tree) for word in call.keywords if word.arg is None} - {""}
    given = _parameters_given(module)
    for name, node in _options(module) if unpacked else ():
        names = {name} | given.get(name, set())
        value, length = _padding_of(node)
        if value is None or not names & unpacked or _is_for_evaluation(node, module):
            continue
        if isinstance(length, ast.Constant) and isinstance(length.value, int) and length.value <= _SHORT:
            continue
        yield _padded(value, ast.unparse(length) if length is not None else "model_max_length", module)


def _options(module: Module) -> Iterator[tuple[str, ast.Dict | ast.Call]]:
    """Dicts that get a name: `{...}` and `dict(...)`."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = node.value
        is_dict = isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and last_name(value.func) == "dict")
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if is_dict and isinstance(value, ast.Dict | ast.Call) and last_name(target):
                yield last_name(target), value


def _padding_of(node: ast.Dict | ast.Call) -> tuple[ast.expr | None, ast.expr | None]:
    """The padding to the maximum and the maximum, as a dict says them."""
    if isinstance(node, ast.Call):
        items = {each.arg: each.value for each in node.keywords if each.arg is not None}
    else:
        pairs = zip(node.keys, node.values, strict=True)
        items = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    padding = items.get("padding")
    return (padding if _is_maximum(padding) else None), items.get("max_length")


def _parameters_given(module: Module) -> dict[str, set[str]]:
    """Of each name: the parameters that it is handed to by name, as in `load(encode_args=options)`."""
    given: dict[str, set[str]] = {}
    for call in calls_of(module.tree):
        for word in call.keywords:
            if word.arg is not None and isinstance(word.value, ast.Name | ast.Attribute):
                given.setdefault(last_name(word.value), set()).add(word.arg)
    return given


def _by_hand(module: Module, project: Project) -> Iterator[Found]:
    """`ids + [pad] * (max_length - len(ids))`: once for each function, for its labels and masks are padded like its ids."""
    if not re.search(r"\]\s*\*|\*\s*\[|\.pad\(", module.source.text):
        return
    names, seen = names_of(project), set()
    filled = [(node, maximum) for node in ast.walk(module.tree) if (maximum := _filled_up(node)) is not None]
    for node, maximum in sorted(filled, key=lambda each: (each[1].lineno, each[1].col_offset)):
        if not _MAXIMUM.search(ast.unparse(maximum)) or _LONGEST.search(ast.unparse(maximum)):
            continue
        scope = names.around(node, module)
        if not scope.name or scope in seen or _is_for_evaluation(node, module) or _is_of_batch(maximum, scope, project):
            continue
        seen.add(scope)
        yield _padded(node, ast.unparse(maximum), module)


def _filled_up(node: ast.AST) -> ast.expr | None:
    """The M of `x + [p] * (M - len(x))`, of `x += [p] * (M - len(x))`, and of `F.pad(x, (0, M - len(x)))`."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add):
        added = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        return next((found for each in added if (found := _repeated(each)) is not None), None)
    if isinstance(node, ast.Call) and last_name(node.func) == "extend" and len(node.args) == 1:
        return _repeated(node.args[0])
    if (
        isinstance(node, ast.Call)
        and last_name(node.func) == "pad"
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Tuple)
    ):
        return next((found for each in node.args[1].elts if (found := _missing(each)) is not None), None)
    return None


def _repeated(node: ast.expr) -> ast.expr | None:
    """The M of `[p] * (M - len(x))`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    sides = (node.left, node.right)
    if not any(isinstance(each, ast.List) and len(each.elts) == 1 for each in sides):
        return None
    return next((found for each in sides if (found := _missing(each)) is not None), None)


def _missing(node: ast.expr) -> ast.expr | None:
    """The M of `M - len(x)` and of `M - x.size(0)`, a name or an attribute."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub) or not isinstance(node.left, ast.Name | ast.Attribute):
        return None
    right = node.right.value if isinstance(node.right, ast.Subscript) else node.right
    is_length = isinstance(right, ast.Call) and last_name(right.func) in {"len", "size", "numel"}
    return node.left if is_length or (isinstance(right, ast.Attribute) and right.attr == "shape") else None


def _is_of_batch(maximum: ast.expr, scope: Scope, project: Project, depth: int = 0) -> bool:
    """Whether a length is that of the longest sequence at hand, as far as can be seen; a parameter is what callers hand over."""
    if not isinstance(maximum, ast.Name) or depth > 2:
        return False
    values = [each.value for each in model_of(project).losses.assigned(scope, maximum.id)]
    if values:
        return any(_measures(value) for value in values)
    if maximum.id in scope.parameters:
        return _callers_measure(maximum.id, scope, project, depth)
    return scope.outer is not None and _is_of_batch(maximum, scope.outer, project, depth)


def _measures(value: ast.expr) -> bool:
    """`max(len(x) for x in rows)`, `lengths.max()`."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in _OF_BATCH and not _is_bound(each) for each in ast.walk(value)
    )


def _is_bound(call: ast.Call) -> bool:
    """`min(length, 512)`: a limit with a number, and nothing measured."""
    return "len(" not in ast.unparse(call) and any(isinstance(each, ast.Constant) for each in call.args)


def _callers_measure(name: str, scope: Scope, project: Project, depth: int) -> bool:
    """Whether any caller passes a length that it measured, or no caller is known."""
    names, named = names_of(project), reach_of(project).calls(scope.module, scope.name)
    calls = [call for call in named if names.resolve(call, names.around(call, scope.module)) is scope]
    if not calls:
        return scope.name not in _MAPPED
    for call in calls:
        given, around = argument_of(name, scope, call), names.around(call, scope.module)
        if given is not None and (_measures(given) or _is_of_batch(given, around, project, depth + 1)):
            return True
    return False


CHECKS = (check_padding,)
