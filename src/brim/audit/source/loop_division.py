"""What a loss is divided by before backward: not at all, twice, or by a count that is not the count of its tokens."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from brim.audit.source.loop_model import TrainLoop, loops_of
from brim.audit.source.module import last_name
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Iterator

    from brim.audit.found import Edit, Found
    from brim.audit.source.loop_events import Event
    from brim.audit.source.loop_losses import Divisor, Traced
    from brim.audit.source.module import Module
    from brim.audit.source.names import Scope
    from brim.audit.source.project import Project
    from brim.records.findings import Confidence

_SUM: Final = r"reduction\s*=\s*['\"]sum['\"]|size_average\s*=\s*False"
_TALLY: Final = re.compile(
    r"len\(|steps|batches|samples|size|running|total|avg|average|epoch|log|item\(|count|elapsed|time", re.IGNORECASE
)
"""What is divided for a report or a count of steps, and not for backward."""
_MEANS: Final = frozenset(
    {
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
    }
)
_COUNTED: Final = (
    r"num_items_in_batch|(num|n|total|valid)_?(target_|valid_|loss_|label_|supervised_|non_?pad_)?tokens"
    r"|ntokens|token_count|num_valid"
)
_LANGUAGE: Final = r"ForCausalLM|Seq2SeqLM|ForConditionalGeneration|ForTokenClassification|LMHeadModel"
_PADS: Final = (
    r"DataCollatorForSeq2Seq|DataCollatorForLanguageModeling|DataCollatorWithPadding|DataCollatorForTokenClassification|pad_sequence"
    r"|padding\s*=\s*(True|['\"]longest['\"])|tokenizer\.pad\("
)
_IGNORED: Final = r"ignore_index|-100"
_EVEN: Final = r"group_texts|packing\s*=\s*True|ConstantLengthDataset|block_size|padding\s*=\s*['\"]max_length['\"].*labels"


def check_undivided(module: Module, project: Project) -> Iterator[Found]:
    """The loss of each micro-batch goes into backward whole, and n of them make a step."""
    for loop in loops_of(module, project):
        window = loop.window
        if window is None or window.count is None or _somebody_else_divides(loop, project):
            continue
        second = _second_loss(loop)
        if second is not None:
            yield second
            continue
        if loop.mentions(_SUM) or _is_divided_elsewhere(loop):
            continue
        for event, traced in loop.losses:
            if (
                (traced.is_summed and not traced.divisors)
                or any(not each.is_of_this_micro_batch for each in traced.divisors)
                or _gets_the_count(loop, traced)
            ):
                continue
            yield _undivided(loop, event, traced)
            break


def _second_loss(loop: TrainLoop) -> Found | None:
    """One loss of the micro-batch is divided, and another one that is added to the same gradients is not."""
    losses = loop.losses
    divided = [event for event, traced in losses if any(_divides_by_count(loop, each) for each in traced.divisors)]
    between = [each.order for each in (*loop.of("zero"), *loop.of("step"))]
    for event, traced in losses:
        before = [each for each in divided if each.order < event.order and not each.place.excludes(event.place)]
        if not before or traced.divisors or traced.is_summed or _gets_the_count(loop, traced):
            continue
        if any(before[0].order < order < event.order for order in between) or event.place.scope is not before[0].place.scope:
            continue
        if not traced.ends or not all(_is_mean(end) or _is_first_output(end) for end, _scope in traced.ends):
            continue
        assert loop.window is not None
        assert event.loss is not None
        module = event.place.scope.module
        message = _(
            "{loss} is not divided by {count}, and the loss of line {line} is: both are added to the same gradients, so {loss} weighs "
            "{count} times as much as it should."
        )
        text = message.format(loss=module.text_of(event.loss), count=loop.window.text, line=before[0].node.lineno)
        edits, _is_sure = _divide(loop, event, module)
        return module.found("loss-undivided", event.node, text, edits=edits)
    return None


def _is_first_output(end: ast.expr) -> bool:
    """`model(**inputs)[0]`: the loss, where labels are given."""
    is_first = isinstance(end, ast.Subscript) and isinstance(end.slice, ast.Constant) and end.slice.value == 0
    call = end.value if isinstance(end, ast.Subscript) else end
    return is_first and isinstance(call, ast.Call) and "model" in last_name(call.func).lower()


def _undivided(loop: TrainLoop, event: Event, traced: Traced) -> Found:
    window = loop.window
    assert window is not None
    assert event.loss is not None
    module = event.place.scope.module
    is_mean = any(_is_mean(each) for each, _scope in traced.ends) or bool(traced.divisors)
    confidence: Confidence = "high" if is_mean and loop.framework != "accelerate" else "medium"
    edits, is_surely = _divide(loop, event, module)
    message = _(
        "{loss} is not divided by {count} before backward: the gradient of a step is the sum of {count} means instead of their mean, "
        "so it is as many times too large."
    )
    return module.found(
        "loss-undivided",
        event.node,
        message.format(loss=module.text_of(event.loss), count=window.text),
        confidence=confidence,
        edits=edits,
        is_safe=is_surely and is_mean and confidence == "high",
    )


def _divide(loop: TrainLoop, event: Event, module: Module) -> tuple[tuple[Edit, ...], bool]:
    """Write the division where the count is known by the same name."""
    window = loop.window
    assert window is not None
    assert event.loss is not None
    if window.scope is not event.place.scope or not isinstance(window.count, ast.Name | ast.Attribute | ast.Constant):
        return (), False
    loss, count = module.text_of(event.loss), module.text_of(window.count)
    if not isinstance(event.loss, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
        loss = f"({loss})"
    is_receiver = (
        isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute) and event.node.func.value is event.loss
    )
    text = f"({loss} / {count})" if is_receiver else f"{loss} / {count}"
    return (module.replace(event.loss, text),), True


def _is_mean(end: ast.expr) -> bool:
    """Whether it is a mean over the micro-batch for sure: a model's own loss, or a loss of torch with its default reduction."""
    if isinstance(end, ast.Attribute):
        return end.attr == "loss" and not (isinstance(end.value, ast.Name) and end.value.id == "self")
    if isinstance(end, ast.Call):
        return last_name(end.func) in _MEANS or last_name(end.func) in {"criterion", "loss_fn", "loss_fct", "loss_func"}
    return False


def _somebody_else_divides(loop: TrainLoop, project: Project) -> bool:
    if loop.framework == "engine" or loop.in_accumulate or loop.has_closure:
        return True
    return loop.framework == "accelerate" and not _is_told_nothing(loop, project)


def _is_told_nothing(loop: TrainLoop, project: Project) -> bool:
    """Every Accelerator of the loop's files is made without a word about accumulation, so it divides by 1."""
    made = accelerators(loop)
    return (
        bool(made)
        and not any(_is_told(each) for each in made)
        and not any("gradient_accumulation" in each.text for each in project.configs)
    )


def accelerators(loop: TrainLoop) -> list[ast.Call]:
    """The calls that make an Accelerator in the files of a loop."""
    return [each for module in loop.modules for each in loop.model.reach.calls(module, "Accelerator")]


def _is_told(call: ast.Call) -> bool:
    return any(
        each.arg is None or each.arg.startswith("gradient_accumulation") or each.arg == "deepspeed_plugin"
        for each in call.keywords
    )


def _gets_the_count(loop: TrainLoop, traced: Traced) -> bool:
    """The loss comes from a call that was handed the count: it may divide there."""
    for end, scope in traced.ends:
        if isinstance(end, ast.Call):
            arguments = (*end.args, *(each.value for each in end.keywords))
            if any(loop.counts_micro_batches(each, scope) for each in arguments):
                return True
    return False


def _is_divided_elsewhere(loop: TrainLoop) -> bool:
    """Gradients, or the learning rate, are divided by the count in one of the functions that take part."""
    for scope in loop.scopes:
        if isinstance(scope.node, ast.Module) and scope is not loop.root:
            continue
        for node, left, right in loop.model.quotients(scope):
            if not loop.counts_micro_batches(right, scope):
                continue
            if not _TALLY.search(ast.unparse(left)) and not _comes_too_late(node, left, scope, loop):
                return True
    return False


def _comes_too_late(node: ast.AST, left: ast.expr, scope: Scope, loop: TrainLoop) -> bool:
    """`loss = loss / n` behind backward changes what is logged and nothing else."""
    for event, traced in loop.losses:
        is_behind = event.place.scope is scope and getattr(node, "lineno", 0) > event.node.lineno
        if is_behind and (id(scope), ast.unparse(left)) in traced.names:
            return True
    return False


def check_divided_twice(module: Module, project: Project) -> Iterator[Found]:
    """Two divisions by the number of micro-batches, one after the other."""
    for loop in loops_of(module, project):
        for _event, traced in loop.losses:
            divisors = [each for each in traced.divisors if not each.is_of_this_micro_batch and _divides_by_count(loop, each)]
            pairs = [
                (a, b) for i, a in enumerate(divisors) for b in divisors[i + 1 :] if a.follows(b) and _same_count(loop, a, b)
            ]
            if not pairs:
                continue
            first, second = sorted(pairs[0], key=lambda each: (each.scope.module.name, getattr(each.node, "lineno", 0)))
            where = second.scope.module
            message = _(
                "The loss is divided by {count} here and has already been divided by {first_count} in line {line}: the gradient is as "
                "many times too small."
            )
            yield where.found(
                "loss-divided-twice",
                second.node,
                message.format(
                    count=ast.unparse(second.by), first_count=ast.unparse(first.by), line=getattr(first.node, "lineno", 0)
                ),
                confidence="high" if second.scope is first.scope else "medium",
                edits=_undo(second, where),
            )
            break


def _divides_by_count(loop: TrainLoop, divisor: Divisor) -> bool:
    return loop.counts_micro_batches(divisor.by, divisor.scope, divisor.path)


def _same_count(loop: TrainLoop, one: Divisor, other: Divisor) -> bool:
    losses = loop.model.losses
    return bool(losses.terms(one.by, one.scope, one.path) & losses.terms(other.by, other.scope, other.path))


def _undo(divisor: Divisor, module: Module) -> tuple[Edit, ...]:
    node = divisor.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return (module.replace(node, module.text_of(node.left)),)
    return ()


def check_mean_of_means(module: Module, project: Project) -> Iterator[Found]:
    """Means over tokens are averaged as if all micro-batches had as many tokens."""
    for loop in loops_of(module, project):
        if loop.window is None and not loop.in_accumulate:
            continue
        if loop.framework == "engine" or loop.mentions(_COUNTED) or loop.mentions(_SUM) or loop.mentions(_EVEN):
            continue
        for event, traced in loop.losses:
            by_count = [each for each in traced.divisors if _divides_by_count(loop, each)]
            if not (by_count or loop.in_accumulate) or not _is_token_mean(loop, traced):
                continue
            is_ragged = loop.mentions(_PADS) or any(each.is_of_this_micro_batch for each in traced.divisors)
            if not is_ragged and not loop.mentions(_IGNORED) and not _imports_ignored(loop):
                continue
            where = by_count[-1].scope.module if by_count else event.place.scope.module
            message = _(
                "Each micro-batch is a mean over its own tokens, and these means are averaged with equal weight. Where micro-batches "
                "differ in length, tokens of short ones count more than tokens of long ones."
            )
            yield where.found(
                "mean-of-means",
                by_count[-1].node if by_count else event.node,
                message,
                confidence="medium" if is_ragged else "low",
            )
            break


def _imports_ignored(loop: TrainLoop) -> bool:
    """A file of the project that the loop's files import data from sets labels that are ignored."""
    project = loop.model.names.project
    for module in loop.modules:
        for dotted in module.imports.values():
            where, _dot, name = dotted.rpartition(".")
            imported = project.module(where) if re.search(r"[Dd]ata|[Cc]ollat", name) else None
            if imported is not None and re.search(_IGNORED, loop.model.code_of(imported)):
                return True
    return False


def _is_token_mean(loop: TrainLoop, traced: Traced) -> bool:
    for end, scope in traced.ends:
        if isinstance(end, ast.Attribute) and end.attr == "loss" and (loop.mentions(_LANGUAGE) or _forward_of(end, scope, loop)):
            return True
        if (
            isinstance(end, ast.Call)
            and last_name(end.func) == "cross_entropy"
            and any(each.arg == "ignore_index" for each in end.keywords)
        ):
            return True
        if isinstance(end, ast.Call) and _is_mean(end) and loop.mentions(r"CrossEntropyLoss\([^)]*ignore_index"):
            return True
    return any(
        each.is_of_this_micro_batch and "mask" in ast.unparse(each.by) and not _is_per_sequence(each.by)
        for each in traced.divisors
    )


def _is_per_sequence(count: ast.expr) -> bool:
    """`mask.sum(dim=1)`: each sequence is divided by its own length, so that all sequences weigh the same on purpose."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in {"sum", "count_nonzero"} and (each.args or each.keywords)
        for each in ast.walk(count)
        if not (
            isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and last_name(each.func.value) in {"torch", "np"}
        )
    )


def _forward_of(loss: ast.Attribute, scope: Scope, loop: TrainLoop) -> Scope | None:
    """The forward of a model of the project that returns this loss, if it is a mean over the tokens of its labels."""
    outputs = loop.model.losses.assigned(scope, ast.unparse(loss.value))
    call = outputs[-1].value if outputs else loss.value
    if not isinstance(call, ast.Call):
        return None
    klass = loop.model.names.made_class(call.func, scope, loop.model.losses)
    forward = loop.model.names.method(klass, "forward")
    return forward if forward is not None and _averages_tokens(forward) else None


def _averages_tokens(forward: Scope) -> bool:
    """Cross entropy over all tokens of the labels, those that are ignored left out."""
    return any(
        isinstance(each, ast.Call)
        and last_name(each.func) == "cross_entropy"
        and any(word.arg == "ignore_index" for word in each.keywords)
        and not any(word.arg == "reduction" for word in each.keywords)
        for each in ast.walk(forward.node)
    )


CHECKS = (check_undivided, check_divided_twice, check_mean_of_means)
