"""Settings of one config that cancel each other: one of them has no effect and changes the training, or the tool stops.

Each was read in the tool's source (transformers 5.22: `TrainingArguments._validate_args`; TRL 1.16; accelerate 1.15; DeepSpeed 0.19; the
schemas of axolotl); what only some versions do is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from brim.audit.config.kinds import ARGUMENT_KINDS, TRAINER_KINDS, Config
from brim.audit.config.links import engine_of
from brim.audit.config.reading import shown
from brim.audit.config.view import view_of
from brim.locale import _
from brim.records.findings import InForce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from brim.audit.config.code_names import CodeNames
    from brim.audit.config.kinds import Kind
    from brim.audit.found import Found

RULE = "config-cancels"
_VARLEN: Final = ("flash2", "flash3", "flex", "xformers")
"""Kernels that take several sequences in one row without a mask of its square."""


def check(config: Config, code: CodeNames) -> Iterator[Found]:
    """All of it. What the code sets at run time (`TrainingArguments(eval_strategy=...)`) is not concluded from the file."""
    for one, decided_by in _CHECKS.items():
        is_decided = config.kind in _READ_BY_SCRIPTS and any(code.passes(name) or code.stores(name) for name in decided_by)
        # Other readers than HfArgumentParser may turn the text into a number.
        is_converted = one is _text_for_a_number and not code.mentions("HfArgumentParser")
        if not is_decided and not is_converted:
            yield from one(config)


def _repeated(config: Config) -> Iterator[Found]:
    for lost, holds in config.repeated:
        if config.kind == "deepspeed":
            text = _(
                "{key} is repeated in lines {first} and {second}: DeepSpeed rejects a file with a repeated key. accelerate and the Trainer "
                "use the last one."
            )
            message = text.format(key=holds.last_name, first=lost.line, second=holds.line)
            yield config.found(RULE, holds, message)
        if config.kind == "deepspeed" or lost.value == holds.value:
            continue
        text = _("{key} is repeated in lines {first} and {second}: the last one is used.")
        message = text.format(key=holds.last_name, first=lost.line, second=holds.line)
        row = InForce(setting=holds.last_name, set=shown(lost.value), in_force=shown(holds.value))
        yield config.found(RULE, holds, message, in_force=(row,), edits=lost.delete())


def _two_precisions(config: Config) -> Iterator[Found]:
    names = ("fp16.enabled", "bf16.enabled") if config.kind == "deepspeed" else ("fp16", "bf16")
    if config.kind in {*ARGUMENT_KINDS, "deepspeed"} and all(config.is_on(name) for name in names):
        text = _("{first} and {second} are both on: {tool} accepts at most one of them and stops.")
        yield _both(config, text, *names)
    if config.kind in ARGUMENT_KINDS and config.is_on("fp16_full_eval") and config.is_on("bf16_full_eval"):
        yield _both(
            config,
            _("{first} and {second} are both on: {tool} accepts at most one of them and stops."),
            "fp16_full_eval",
            "bf16_full_eval",
        )


def _two_quantisations(config: Config) -> Iterator[Found]:
    if config.kind in TRAINER_KINDS and config.is_on("load_in_4bit") and config.is_on("load_in_8bit"):
        text = _("{first} and {second} are both on: a base is held in one of them, and {tool} stops.")
        yield _both(config, text, "load_in_8bit", "load_in_4bit")


def _quantised_otherwise(config: Config) -> Iterator[Found]:
    """Axolotl's check of `adapter: qlora`."""
    if config.kind == "axolotl" and config.value("adapter") == "qlora" and config.is_on("load_in_8bit"):
        entry = config.entries["load_in_8bit"]
        message = _("adapter is qlora, which holds its base in 4 bits, and load_in_8bit is on: axolotl stops.")
        edits = entry.rename("load_in_4bit") if config.get("load_in_4bit") is None else ()
        yield config.found(RULE, entry, message, edits=edits)


def _text_for_a_number(config: Config) -> Iterator[Found]:
    """`1e-4` as PyYAML reads it. TRL's parser, LLaMA-Factory's and axolotl's make a number of it; HfArgumentParser does not."""
    if config.kind != "transformers":
        return
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"):
        entry = config.get(name)
        if entry is None or not entry.is_text_to_yaml:
            continue
        text = _(
            "{key} has no point or no sign in its exponent, so PyYAML reads a text and not a number: HfArgumentParser passes it on, and "
            "the optimizer stops. Write {number}."
        )
        number = _with_point(entry.value)
        message = text.format(key=name, number=number)
        yield config.found(RULE, entry, message, confidence="medium", edits=entry.set_to(number))


def _with_point(value: float) -> str:
    """As YAML 1.1 wants it: 1.0e-4."""
    mantissa, _e, exponent = f"{value:.12e}".partition("e")
    short = mantissa.rstrip("0")
    return f"{short}0e{int(exponent):+d}" if short.endswith(".") else f"{short}e{int(exponent):+d}"


def _best_model(config: Config) -> Iterator[Found]:
    """`load_best_model_at_end` needs an evaluation for every checkpoint."""
    if config.kind not in ARGUMENT_KINDS or not config.is_on("load_best_model_at_end"):
        return
    entry = config.entries["load_best_model_at_end"]
    if config.get("evaluation_strategy") is not None:
        return  # a key that has gone says it: that is another finding
    evaluated = _strategy(config, "eval_strategy", "no")
    saved = _strategy(config, "save_strategy", "steps")
    if saved == "best":
        return
    if evaluated != saved:
        text = _("load_best_model_at_end is on, eval_strategy is {evaluated} and save_strategy {saved}: they must be equal.")
        yield config.found(RULE, entry, text.format(evaluated=evaluated, saved=saved))
        return
    every = config.value("eval_steps") or config.value("logging_steps", 500)
    save = config.value("save_steps", 500)
    if saved == "steps" and _whole(every) and _whole(save) and save % every:
        text = _("load_best_model_at_end is on, and save_steps {save} is no multiple of eval_steps {every}: the Trainer stops.")
        yield config.found(RULE, entry, text.format(save=save, every=every))


def _plateau(config: Config) -> Iterator[Found]:
    entry = config.get("lr_scheduler_type")
    if config.kind not in ARGUMENT_KINDS or entry is None or entry.value not in ("reduce_lr_on_plateau", "greedy"):
        return
    if _strategy(config, "eval_strategy", "no") == "no" and config.get("evaluation_strategy") is None:
        text = _("lr_scheduler_type {word} follows the evaluation, and eval_strategy is no: the Trainer stops.")
        yield config.found(RULE, entry, text.format(word=entry.value))


def _workers(config: Config) -> Iterator[Found]:
    """Prefetching and persistent workers need workers; the Trainer's default is none of them."""
    if config.kind not in ARGUMENT_KINDS or config.value("dataloader_num_workers", 0) != 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        entry = config.get(name)
        if entry is not None and entry.value:
            text = _("{key} is {value} and dataloader_num_workers is 0: without workers the run stops.")
            yield config.found(RULE, entry, text.format(key=name, value=shown(entry.value)), edits=entry.delete())


def _warmups(config: Config) -> Iterator[Found]:
    if config.kind == "axolotl" and config.value("warmup_steps") and config.value("warmup_ratio"):
        yield _both(
            config,
            _("{first} and {second} are both set: {tool} accepts only one of them and stops."),
            "warmup_ratio",
            "warmup_steps",
        )


def _two_batches(config: Config) -> Iterator[Found]:
    if config.kind == "axolotl" and config.value("batch_size") and config.value("gradient_accumulation_steps"):
        yield _both(
            config,
            _("{first} and {second} are both set: {tool} accepts only one of them and stops."),
            "batch_size",
            "gradient_accumulation_steps",
        )
    if config.kind == "trl" and config.value("generation_batch_size") and config.value("steps_per_generation"):
        yield _both(
            config,
            _("{first} and {second} are both set: {tool} accepts only one of them and stops."),
            "generation_batch_size",
            "steps_per_generation",
        )


def _shrinking(config: Config) -> Iterator[Found]:
    """`auto_find_batch_size` shrinks the micro-batch and nothing else."""
    if config.kind not in TRAINER_KINDS or not config.is_on("auto_find_batch_size"):
        return
    entry = config.entries["auto_find_batch_size"]
    view = view_of(config)
    engine = engine_of(config)
    if config.value("num_generations") is not None:
        message = _("auto_find_batch_size would break the groups of num_generations: TRL stops.")
    elif engine is not None and engine.value("zero_optimization.stage") == 3:
        message = _("auto_find_batch_size does not work with ZeRO-3: the Trainer stops.")
    elif view.micro_batch is not None:
        text = _(
            "auto_find_batch_size lowers {key} {micro} after an out-of-memory error and keeps accumulation: the effective batch is smaller."
        )
        message = text.format(key=view.micro_batch.entry.last_name, micro=view.micro_batch.value)
    else:
        return
    yield config.found(RULE, entry, message, edits=entry.set_to(False))


def _packing(config: Config) -> Iterator[Found]:
    view = view_of(config)
    if view.packing is None or view.packing.value is not True or config.kind not in {"trl", "axolotl"}:
        return
    if config.kind == "axolotl" and view.attention is None:
        message = _(
            "sample_packing is on and no attention is chosen: tokens may see the sequences that are packed before theirs."
        )
        yield config.found(RULE, view.packing.entry, message, confidence="medium")
    if config.kind == "trl" and view.attention is not None and view.attention.value not in _VARLEN:
        text = _(
            "packing is on, and {attention} attention holds a mask of the whole packed length: it computes many times what it needs."
        )
        message = text.format(attention=view.attention.value)
        if view.attention.value in ("sdpa", "eager"):
            yield config.found(RULE, view.packing.entry, message, confidence="medium")


def _one_process(config: Config) -> Iterator[Found]:
    """`distributed_type: NO` starts one process, whatever num_processes says."""
    count, kind = config.get("num_processes"), config.get("distributed_type")
    if config.kind != "accelerate" or count is None or kind is None or kind.value not in (False, "NO", "no"):
        return
    if config.value("mpirun_config") or config.is_on("use_cpu") or not _whole(count.value) or count.value == 1:
        return
    text = _("num_processes is {count}, and distributed_type is NO: accelerate starts one process.")
    row = InForce(setting="num_processes", set=count.value, in_force=1)
    yield config.found(RULE, count, text.format(count=count.value), in_force=(row,), edits=kind.set_to("MULTI_GPU"))


def _offload(config: Config) -> Iterator[Found]:
    view = view_of(config)
    if view.offload is None or view.zero_stage is None or not isinstance(view.zero_stage.value, int):
        return
    needed = 3 if view.offload.value == "parameters" else 1
    if view.zero_stage.value < needed:
        text = _("{key} is {device}, and ZeRO stage {stage} keeps them whole on every GPU: nothing is offloaded.")
        message = text.format(key=view.offload.entry.name, device=view.offload.entry.value, stage=view.zero_stage.value)
        row = InForce(setting=view.offload.entry.name, set=shown(view.offload.entry.value), in_force="none")
        yield config.found(RULE, view.offload.entry, message, confidence="medium", in_force=(row,))


_READ_BY_SCRIPTS: Final[tuple[Kind, ...]] = ("transformers", "trl")
"""Files that a script of the project may read, and complete with values of its own."""
_EVALUATION: Final = ("eval_strategy", "evaluation_strategy", "do_eval")
_CHECKS: Final[dict[Callable[[Config], Iterator[Found]], tuple[str, ...]]] = {
    _repeated: (),
    _two_precisions: ("fp16", "bf16"),
    _two_quantisations: (),
    _quantised_otherwise: (),
    _text_for_a_number: ("learning_rate",),
    _best_model: (*_EVALUATION, "load_best_model_at_end", "save_strategy"),
    _plateau: (*_EVALUATION, "lr_scheduler_type"),
    _workers: ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    _warmups: (),
    _two_batches: (),
    _shrinking: (),
    _packing: ("packing",),
    _one_process: (),
    _offload: (),
}
"""Each with the arguments that decide it: where the code passes one of them, the file does not."""


def _both(config: Config, text: str, first: str, second: str) -> Found:
    return config.found(RULE, config.entries[first], text.format(first=first, second=second, tool=config.label))


def _strategy(config: Config, name: str, default: str) -> str:
    """YAML reads a bare `no` as false."""
    value = config.value(name, default)
    return "no" if value is False or value is None else str(value).lower()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
