"""What is handed to loaders: last batches that are dropped."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_reach import reach_of
from brim.audit.source.module import keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Found
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project

_EVALUATION: Final = re.compile(r"(^|_|\.)(val|valid|validation|eval|evaluation|test|dev)(_|s?$|[A-Z0-9.])", re.IGNORECASE)


def check_drop_last(module: Module, project: Project) -> Iterator[Found]:
    """Examples that are never seen: of an evaluation set, or of a set that is small."""
    if "drop_last" not in module.source.text:
        return
    for call in reach_of(project).calls(module):
        if last_name(call.func).endswith(("TrainingArguments", "Config")):
            yield from _of_a_trainer(call, module, project)
        drop = keyword_of(call, "drop_last")
        if (
            last_name(call.func) != "DataLoader"
            or drop is None
            or not (isinstance(drop.value, ast.Constant) and drop.value.value is True)
        ):
            continue
        if _is_evaluation(call, module):
            message = _(
                "drop_last=True on an evaluation loader: up to a whole batch of examples is never evaluated, and the metric "
                "leaves them out."
            )
            edits = (module.replace(drop, "drop_last=False"),)
            yield module.found("drop-last-small", drop, message, edits=edits, is_safe=True)
            continue
        size = _number(_value(call, "batch_size") or (call.args[1] if len(call.args) > 1 else None), module)
        yield from _dropped(drop, _length(call.args[0], module) if call.args else None, size, module)


def _of_a_trainer(call: ast.Call, module: Module, project: Project) -> Iterator[Found]:
    """The Trainer has one setting for both its loaders."""
    drop, evaluates = keyword_of(call, "dataloader_drop_last"), keyword_of(call, "eval_strategy") or keyword_of(call, "do_eval")
    if drop is None or not (isinstance(drop.value, ast.Constant) and drop.value.value is True):
        return
    if evaluates is not None and not (isinstance(evaluates.value, ast.Constant) and evaluates.value.value in {"no", False}):
        message = _(
            "dataloader_drop_last drops the last batch of the evaluation set too: up to a batch of examples is never evaluated."
        )
        yield module.found("drop-last-small", drop, message)
        return
    for trainer in reach_of(project).calls(module):
        dataset = keyword_of(trainer, "train_dataset")
        if dataset is not None and last_name(trainer.func).endswith("Trainer"):
            count, size = _length(dataset.value, module), _number(_value(call, "per_device_train_batch_size"), module)
            yield from _dropped(drop, count, size, module)
            return


def _dropped(drop: ast.keyword, count: int | None, size: int | None, module: Module) -> Iterator[Found]:
    """A tenth of the data, or all of it."""
    if count is None or size is None or size < 1 or (count >= size and (count % size) * 10 < count):
        return
    if count < size:
        message = _("The set has {count} examples and the batch {size}: with drop_last=True there is no batch at all.")
    else:
        message = _("drop_last=True leaves out {lost} of {count} examples in every epoch.")
    text = message.format(count=count, size=size, lost=count % size)
    yield module.found("drop-last-small", drop, text, severity="high" if count < size else None)


def _is_evaluation(call: ast.Call, module: Module) -> bool:
    shuffle = keyword_of(call, "shuffle")
    if shuffle is not None and not (isinstance(shuffle.value, ast.Constant) and shuffle.value.value is False):
        return False
    dataset = call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == "dataset"), None)
    statement = module.statement(call)
    targets = [ast.unparse(each) for each in statement.targets] if isinstance(statement, ast.Assign) else []
    function = module.enclosing(call, ast.FunctionDef)
    if function is not None and isinstance(statement, ast.Return):
        targets.append(function.name)
    words = [*targets, ast.unparse(dataset) if isinstance(dataset, ast.Name | ast.Attribute) else ""]
    return any(_EVALUATION.search(each) for each in words) and not any("train" in each.lower() for each in words)


def _value(call: ast.Call, name: str) -> ast.expr | None:
    keyword = keyword_of(call, name)
    return keyword.value if keyword is not None else None


def _number(node: ast.expr | None, module: Module) -> int | None:
    """A number in the code, also behind a name that is set once."""
    if isinstance(node, ast.Name):
        values = _assigned(node, module)
        node = values[0] if len(values) == 1 else None
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _assigned(name: ast.Name, module: Module) -> list[ast.expr]:
    """What a name is set to in its function, or in the file if it is not set there."""
    for where in (module.enclosing(name, ast.FunctionDef), module.tree):
        values = [
            each.value
            for each in (ast.walk(where) if where is not None else ())
            if isinstance(each, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == name.id for target in each.targets)
        ]
        if values:
            return values
    return []


def _length(node: ast.expr, module: Module) -> int | None:
    """The number of examples, where the code says it: `ds.select(range(100))`, `Subset(ds, range(100))`, a list."""
    if isinstance(node, ast.Name):
        lengths = {_length(each, module) for each in _assigned(node, module) if not _is_made_of(each, node.id)}
        return lengths.pop() if len(lengths) == 1 else None
    if isinstance(node, ast.List | ast.Tuple):
        return None if any(isinstance(each, ast.Starred) for each in node.elts) else len(node.elts)
    if not isinstance(node, ast.Call):
        return None
    if last_name(node.func) in {"select", "Subset"} and node.args:
        return _length(node.args[-1], module)
    if last_name(node.func) == "range" and len(node.args) == 1:
        return _number(node.args[0], module)
    return None


def _is_made_of(value: ast.expr, name: str) -> bool:
    """`rows = rows.map(...)`: as many as before."""
    function = value.func if isinstance(value, ast.Call) else None
    return (
        isinstance(function, ast.Attribute)
        and function.attr in {"map", "shuffle", "rename_column", "remove_columns", "with_format"}
        and ast.unparse(function.value) == name
    )


CHECKS = (check_drop_last,)
