"""Arguments of the Trainer's family: those that no longer exist, those that change the batch, and accumulation that is done twice."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.audit.config.keys import REMOVED_ARGUMENTS, REMOVED_TRL, Removed
from brim.audit.pins import Pins, is_within
from brim.audit.source.loop_division import accelerators
from brim.audit.source.loop_losses import ACCUMULATION
from brim.audit.source.loop_model import TrainLoop, loops_of, model_of
from brim.audit.source.loop_order import has_company, is_alone_on_its_line
from brim.audit.source.module import Function, keyword_of, last_name
from brim.locale import _, sentences
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_losses import Divisor
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project
    from brim.records.findings import Severity

_SPELT: Final = {
    "group_by_length": 'train_sampling_strategy="group_by_length"',
    "warmup_ratio": "warmup_steps (a number below 1 is a ratio)",
    "adafactor": 'optim="adafactor"',
}
"""What to write instead, where that is more than another name."""
_OVERRULING: Final = frozenset({"per_gpu_train_batch_size", "per_gpu_eval_batch_size"})
"""Until transformers 5, these replaced the argument of today without a word (`train_batch_size` of TrainingArguments)."""
_HIGH: Final = frozenset(
    {
        "per_gpu_train_batch_size", "per_gpu_eval_batch_size", "evaluation_strategy", "group_by_length", "evaluate_during_training",
        "warmup_ratio", "adafactor", "dispatch_batches", "split_batches",
    }
)  # fmt: skip
"""Those that decide what a step is or when it is looked at."""
_ONE_LOWER: Final[dict[Severity, Severity]] = {"high": "medium", "medium": "low", "low": "low"}
_VERSION_TEST: Final = re.compile(r"version|signature|hasattr|__dataclass_fields__|\bfields\(", re.IGNORECASE)
_LONG_AGO: Final = ">=4.0"
"""Arguments that are older than this are there, even if the project pins nothing."""


def check_dead_argument(module: Module, project: Project) -> Iterator[Found]:
    """An argument that the project's release refuses, or that silently overrules another one."""
    for call in _training_arguments(module, project):
        if _depends_on_version(call, module):
            continue
        dotted = module.dotted(call.func) or ""
        every = list(_given(call, module))
        for given in every:
            gone, package = REMOVED_ARGUMENTS.get(given.name), "transformers"
            if gone is None and given.name == "max_seq_length" and dotted.startswith("trl.") and dotted.endswith("SFTConfig"):
                gone, package = REMOVED_TRL[given.name], "trl"
            if gone is not None:
                other = next((each for each in every if each.name == gone.instead), None)
                pins = Pins.of(module.source.file)
                yield from _dead(_Dead(given, other, gone, package, pins, dotted.rpartition(".")[2]), module)


def _depends_on_version(call: ast.Call, module: Module) -> bool:
    """Whether the code itself chooses the call by the release: after a TypeError, or under a test of the version."""
    node: ast.AST | None = call
    while (node := module.parents.get(node) if node is not None else None) is not None:
        if isinstance(node, ast.ExceptHandler):
            return True
        if isinstance(node, ast.Try) and any("TypeError" in ast.unparse(each.type) for each in node.handlers if each.type):
            return True
        if isinstance(node, ast.If) and _VERSION_TEST.search(ast.unparse(node.test)):
            return True
    return False


@dataclass(frozen=True)
class _Given:
    """An argument, as a keyword or under its key in a dict that is handed on."""

    name: str
    value: ast.expr
    node: ast.keyword | ast.expr


@dataclass(frozen=True)
class _Dead:
    """An argument that some release removed, and the versions that the project runs with."""

    given: _Given
    other: _Given | None
    """The argument that replaces it, where it is given too."""
    gone: Removed
    package: str
    pins: Pins
    call: str
    """The name of what is called."""

    @property
    def is_supported(self) -> bool:
        """Whether every version that the project may run with has the new name."""
        if not self.pins.knows(self.package):
            return is_within(_LONG_AGO, f">={self.gone.since}")
        return self.pins.requires(self.package, f">={self.gone.since}")


def _dead(dead: _Dead, module: Module) -> Iterator[Found]:
    given, gone, pins = dead.given, dead.gone, dead.pins
    if not gone.is_gone(dead.package, pins):
        if given.name in _OVERRULING and dead.other is not None and ast.dump(dead.other.value) != ast.dump(given.value):
            yield _overruled(given, dead.other, module)
        return
    now = _SPELT.get(given.name, gone.instead)
    text = _("{name} was removed in {package} {version}: {call} raises a TypeError.")
    message = text.format(name=given.name, package=dead.package, version=gone.until, call=dead.call)
    if given.name in _OVERRULING:
        message = sentences(message, _("Older releases use it in place of {now}.").format(now=now))
    elif now:
        message = sentences(message, _("Write {instead}.").format(instead=now))
    if not pins.knows(dead.package):
        unpinned = _("The project pins no version of {package}: the newest is assumed.")
        message = sentences(message, unpinned.format(package=dead.package))
    edits: tuple[Edit, ...] = ()
    if dead.other is not None:
        edits = _without(given, module)
    elif gone.same_values and given.name in _HIGH:
        is_keyword = isinstance(given.node, ast.keyword)
        new = f"{gone.instead}={module.text_of(given.value)}" if is_keyword else repr(gone.instead)
        edits = (module.replace(given.node, new),)
    # Which of two values was meant is not for us to say.
    is_plain = dead.other is None or ast.dump(dead.other.value) == ast.dump(given.value)
    is_safe = bool(edits) and is_plain and dead.is_supported
    yield module.found("dead-argument", given.node, message, severity=_severity_of(dead), edits=edits, is_safe=is_safe)


def _severity_of(dead: _Dead) -> Severity:
    """High only if no admitted version has the argument; one level lower where the project names no version."""
    is_idle = isinstance(dead.given.value, ast.Constant) and dead.given.value.value in dead.gone.idle
    if is_idle or not dead.gone.changes_training:
        return "low"
    severity: Severity = "high" if dead.given.name in _HIGH else "medium"
    if not dead.pins.knows(dead.package):
        return _ONE_LOWER[severity]
    return severity if dead.pins.requires(dead.package, f">={dead.gone.until}") else "medium"


def _overruled(given: _Given, other: _Given, module: Module) -> Found:
    """Both batch sizes are given, and the pinned release takes the old one."""
    text = _("{name}={value} is used: before transformers 5 it replaces {other}={ignored}, which is ignored.")
    value, ignored = module.text_of(given.value), module.text_of(other.value)
    message = text.format(name=given.name, value=value, other=other.name, ignored=ignored)
    row = InForce(setting=other.name, set=ignored, in_force=value)
    return module.found("dead-argument", given.node, message, severity="high", in_force=(row,), edits=_without(given, module))


def _without(given: _Given, module: Module) -> tuple[Edit, ...]:
    """Takes the argument away where it has its lines to itself; elsewhere a comma would have to go, or a comment."""
    first, last = given.node.lineno, given.value.end_lineno or given.node.lineno
    whole = module.lines[first - 1 : last]
    start, end = module.column(first, given.node.col_offset), module.column(last, given.value.end_col_offset or 0)
    is_alone = not whole[0][:start].strip() and whole[-1][end:].strip() == ","
    return (module.delete_lines(first, last),) if is_alone else ()


def _training_arguments(module: Module, project: Project) -> Iterator[ast.Call]:
    """Calls of TrainingArguments and the configs that are made of it."""
    if not any(each.partition(".")[0] in {"transformers", "trl"} for each in module.imports.values()):
        return
    for node in model_of(project).reach.calls(module):
        dotted = module.dotted(node.func) or ""
        library, name = dotted.partition(".")[0], dotted.rpartition(".")[2]
        if (library == "transformers" and name.endswith("TrainingArguments")) or (library == "trl" and name.endswith("Config")):
            yield node


def _given(call: ast.Call, module: Module) -> Iterator[_Given]:
    """The arguments of a call, and those of a dict that is handed on as `**settings` in the same function."""
    for each in call.keywords:
        if each.arg is not None:
            yield _Given(each.arg, each.value, each)
        elif isinstance(each.value, ast.Name):
            where = module.enclosing(call, ast.FunctionDef) or module.tree
            for node in ast.walk(where):
                if isinstance(node, ast.Assign) and any(
                    isinstance(its, ast.Name) and its.id == each.value.id for its in node.targets
                ):
                    yield from _settings(node.value)
        else:
            yield from _settings(each.value)


def _settings(value: ast.expr) -> Iterator[_Given]:
    if isinstance(value, ast.Call) and last_name(value.func) == "dict":
        yield from (_Given(each.arg, each.value, each) for each in value.keywords if each.arg is not None)
    elif isinstance(value, ast.Dict):
        for key, each in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield _Given(key.value, each, key)


def check_auto_batch(module: Module, project: Project) -> Iterator[Found]:
    """The batch shrinks when memory runs out, and the number of micro-batches does not grow."""
    for call in _training_arguments(module, project):
        for given in _given(call, module):
            if given.name != "auto_find_batch_size" or not isinstance(given.value, ast.Constant) or given.value.value is not True:
                continue
            message = _(
                "After an out-of-memory error auto_find_batch_size retries with {share} of the batch and does not raise "
                "gradient_accumulation_steps: the effective batch is smaller than the one that was set. Training restarts at step 0 with "
                "weights that have already changed."
            )
            share = _share_left(Pins.of(module.source.file))
            yield module.found("auto-batch-drift", given.node, message.format(share=share))
    if "find_executable_batch_size" in module.source.text:
        yield from _shrinking_functions(module, project)


def _share_left(pins: Pins) -> str:
    """https://github.com/huggingface/accelerate/blob/v1.9.0/src/accelerate/utils/memory.py; v1.8.1 still halves the batch."""
    if pins.requires("accelerate", "<1.9"):
        return _("half")
    if pins.requires("accelerate", ">=1.9"):
        return _("90 percent")
    return _("90 percent (half before accelerate 1.9)")


def _shrinking_functions(module: Module, project: Project) -> Iterator[Found]:
    model = model_of(project)
    for scope in model.names.by_module[id(module)]:
        node = scope.node
        if not isinstance(node, Function) or scope not in model.reach.trainers:
            continue
        for decorator in node.decorator_list:
            name = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name != "find_executable_batch_size" or _keeps_the_product(scope):
                continue
            message = _(
                "find_executable_batch_size calls {function} again with a smaller batch after each out-of-memory, and {function} does not "
                "raise the number of micro-batches with it: the effective batch is smaller than the one that was set."
            )
            yield module.found("auto-batch-drift", decorator, message.format(function=scope.name))


def _keeps_the_product(scope: Scope) -> bool:
    """Whether something is divided by the batch size that came, to get the number of micro-batches."""
    parameters = scope.parameters
    first = next((each for each in parameters if each not in {"self", "cls"}), "batch_size")
    quotients = [
        each for each in ast.walk(scope.node) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div | ast.FloorDiv)
    ]
    return any(isinstance(name, ast.Name) and name.id == first for each in quotients for name in ast.walk(each.right))


def check_accumulation_twice(module: Module, project: Project) -> Iterator[Found]:
    """A library divides by the number of micro-batches, and so does the code."""
    for loop in loops_of(module, project):
        library = _divides_itself(loop)
        if library is None:
            continue
        for event, traced in loop.losses:
            if not event.receiver:
                continue
            by_hand = [each for each in traced.divisors if not each.is_of_this_micro_batch and _is_count(each, loop)]
            if by_hand:
                yield _twice(by_hand[0], library)
                break
    for scope in model_of(project).names.by_module[id(module)]:
        yield from _divided_for_a_trainer(scope, project)


def _is_count(divisor: Divisor, loop: TrainLoop) -> bool:
    return loop.counts_micro_batches(divisor.by, divisor.scope, divisor.path)


def _divides_itself(loop: TrainLoop) -> str | None:
    if loop.framework == "accelerate":
        told = [keyword_of(each, "gradient_accumulation_steps") for each in accelerators(loop)]
        is_told = any(each is not None and not (isinstance(each.value, ast.Constant) and each.value.value == 1) for each in told)
        is_told |= any(keyword_of(each, "gradient_accumulation_plugin") is not None for each in accelerators(loop))
        return "accelerate" if is_told else None
    if loop.framework == "engine" and loop.mentions(r"\bdeepspeed\.initialize"):
        return "DeepSpeed"
    return None


def _twice(divisor: Divisor, library: str) -> Found:
    module = divisor.scope.module
    message = _(
        "{library} divides the loss by the number of micro-batches itself; divided by {count} here too, the gradient is as many times "
        "too small."
    )
    node = divisor.node
    edits: tuple[Edit, ...] = ()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        edits = (module.replace(node, module.text_of(node.left)),)
    elif isinstance(node, ast.AugAssign) and is_alone_on_its_line(node, module) and has_company(node, module):
        edits = (module.delete_lines(node.lineno, node.lineno),)
    return module.found("accumulation-twice", node, message.format(library=library, count=ast.unparse(divisor.by)), edits=edits)


def _divided_for_a_trainer(scope: Scope, project: Project) -> Iterator[Found]:
    """`compute_loss` of a Trainer, `training_step` of a LightningModule: what they return is divided by their caller."""
    owner = scope.owner
    if owner is None or scope.name not in {"compute_loss", "training_step"}:
        return
    bases = " ".join(ast.unparse(each) for each in owner.bases)
    is_trainer = scope.name == "compute_loss" and "Trainer" in bases
    is_lightning = scope.name == "training_step" and "LightningModule" in bases
    if not is_trainer and not is_lightning:
        return
    text = scope.module.text_of(owner)
    if re.search(r"model_accepts_loss_kwargs|current_gradient_accumulation_steps|automatic_optimization\s*=\s*False", text):
        return
    losses = model_of(project).losses
    for event in losses.read(scope):
        if event.kind != "return" or not isinstance(event.node, ast.Return) or event.node.value is None:
            continue
        for part in _loss_parts(event.node.value):
            for divisor in losses.trace(part, scope, ()).divisors:
                if any(ACCUMULATION.search(each) for each in losses.terms(divisor.by, divisor.scope)):
                    yield _twice(divisor, "Trainer" if is_trainer else "Lightning")
                    return


def _loss_parts(value: ast.expr) -> Iterator[ast.expr]:
    """The loss of what a method returns: alone, first of a tuple, or under its key."""
    if isinstance(value, ast.Tuple):
        yield from value.elts[:1]
    elif isinstance(value, ast.Dict):
        yield from (
            each
            for key, each in zip(value.keys, value.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == "loss"
        )
    elif isinstance(value, ast.IfExp):
        yield from _loss_parts(value.body)
        yield from _loss_parts(value.orelse)
    else:
        yield value


CHECKS = (check_dead_argument, check_auto_batch, check_accumulation_twice)
