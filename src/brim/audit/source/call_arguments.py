"""Arguments of the Trainer's family: those that no longer exist, those that change the batch, and accumulation that is done twice."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_division import accelerators
from brim.audit.source.loop_losses import ACCUMULATION
from brim.audit.source.loop_model import TrainLoop, loops_of, model_of
from brim.audit.source.loop_order import has_company, is_alone_on_its_line
from brim.audit.source.module import Function, keyword_of, last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_losses import Divisor
    from brim.audit.source.loop_reach import Scope
    from brim.audit.source.module import Module
    from brim.audit.source.project import Project
    from brim.records.findings import Severity

_BATCH: Final = {
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}
"""Took precedence over the setting of today, without a word."""
_RENAMED: Final = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "evaluate_during_training": "eval_strategy",
    "group_by_length": 'train_sampling_strategy="group_by_length"',
    "warmup_ratio": "warmup_steps (a number below 1 is a ratio)",
    "adafactor": 'optim="adafactor"',
    "include_inputs_for_metrics": "include_for_metrics",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "dispatch_batches": "accelerator_config",
    "split_batches": "accelerator_config",
    "fsdp_min_num_params": "fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config",
    "torchdynamo": "torch_compile_backend",
}
_GONE: Final = frozenset(
    {
        "fp16_backend",
        "half_precision_backend",
        "fp16_opt_level",
        "use_ipex",
        "use_mps_device",
        "jit_mode_eval",
        "past_index",
        "tpu_num_cores",
    }
    | {
        "mp_parameters",
        "sharded_ddp",
        "overwrite_output_dir",
        "logging_dir",
        "save_safetensors",
        "ray_scope",
        "tpu_metrics_debug",
    }
    | {"push_to_hub_organization", "xpu_backend"}
)
_PLAIN: Final = {"per_gpu_train_batch_size", "per_gpu_eval_batch_size", "evaluation_strategy"}
"""Those whose new name takes the same value."""
_HIGH: Final = _PLAIN | {
    "group_by_length",
    "evaluate_during_training",
    "warmup_ratio",
    "adafactor",
    "dispatch_batches",
    "split_batches",
}
"""Those that decide what a step is or when it is looked at."""
_OF_TRL: Final = {"max_seq_length": "max_length"}


def check_dead_argument(module: Module, project: Project) -> Iterator[Found]:
    """An argument that the installed release refuses, or that another one silently overrules."""
    for call in _training_arguments(module, project):
        renamed = {**_BATCH, **_RENAMED, **(_OF_TRL if (module.dotted(call.func) or "").endswith("SFTConfig") else {})}
        every = list(_given(call, module))
        for given in every:
            if given.name in renamed or given.name in _GONE:
                now = renamed.get(given.name)
                yield _dead(given, now, next((each for each in every if each.name == now), None), module)


@dataclass(frozen=True)
class _Given:
    """An argument, as a keyword or under its key in a dict that is handed on."""

    name: str
    value: ast.expr
    node: ast.keyword | ast.expr


def _dead(given: _Given, now: str | None, other: _Given | None, module: Module) -> Found:
    """`other`: the argument of today, where it is given too."""
    name = given.name
    if name in _BATCH:
        message = _(
            "{name} no longer exists: transformers 5 stops with a TypeError, and transformers 4 let it overrule {now} in silence."
        )
    elif now is not None:
        message = _("{name} no longer exists: transformers 5 stops with a TypeError. It is {now} now.")
    else:
        message = _("{name} no longer exists: transformers 5 stops with a TypeError.")
    edits: tuple[Edit, ...] = ()
    if other is not None:
        edits = _without(given, module)
    elif name in _PLAIN and now is not None:
        is_keyword = isinstance(given.node, ast.keyword)
        edits = (module.replace(given.node, f"{now}={module.text_of(given.value)}" if is_keyword else repr(now)),)
    severity: Severity = "high" if name in _HIGH else "medium"
    text = message.format(name=name, now=now)
    # Which of two values was meant is not for us to say.
    is_plain = other is None or ast.dump(other.value) == ast.dump(given.value)
    return module.found("dead-argument", given.node, text, severity=severity, edits=edits, is_safe=bool(edits) and is_plain)


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
                "auto_find_batch_size shrinks the batch by a tenth at each out-of-memory and leaves gradient_accumulation_steps as it is: "
                "the effective batch is smaller than the one that was set, and training begins again from step 0 on weights that have "
                "moved."
            )
            yield module.found("auto-batch-drift", given.node, message)
    if "find_executable_batch_size" in module.source.text:
        yield from _shrinking_functions(module, project)


def _shrinking_functions(module: Module, project: Project) -> Iterator[Found]:
    reach = model_of(project).reach
    for scope in reach.by_module[id(module)]:
        node = scope.node
        if not isinstance(node, Function) or scope not in reach.trainers:
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
    for scope in model_of(project).reach.by_module[id(module)]:
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
