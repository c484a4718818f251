"""Transformers: `training_arguments.py`, which also loads the model, and the same arguments as YAML for `HfArgumentParser`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.locale import _
from brim.planner.emit import arguments, deepspeed
from brim.planner.emit.files import Files
from brim.planner.emit.loading import load_model_code
from brim.planner.emit.loss_division import loss_division_notes
from brim.planner.emit.said import head
from brim.planner.emit.text import comments, yaml_text

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

PYTHON = "training_arguments.py"
YAML = "training_arguments.yaml"


def files(recipe: Recipe) -> Files:
    """Both files, and `deepspeed.json` where ZeRO needs it."""
    settings = training_arguments(recipe)
    notes = _notes(recipe)
    texts = {PYTHON: _python(recipe, settings, notes), YAML: _yaml(recipe, settings, notes)}
    if recipe.zero_stage is not None:
        texts[deepspeed.NAME] = deepspeed.deepspeed_text(recipe)
    return Files(texts, (*recipe.notes, *notes))


def training_arguments(recipe: Recipe) -> dict[str, Any]:
    """The plan as keyword arguments of TrainingArguments."""
    settings = {
        **arguments.batch(recipe),
        **arguments.steps(recipe),
        **arguments.precision(recipe),
        **arguments.checkpointing(recipe, code=True),
        **arguments.loader(recipe),
        **arguments.engine(recipe),
    }
    if recipe.best.world_size > 1:
        settings["average_tokens_across_devices"] = True
    if recipe.plan.workload.loss == "chunked":
        settings["use_liger_kernel"] = True
    if recipe.on_cpu:
        settings["use_cpu"] = True
    return settings


def _notes(recipe: Recipe) -> list[str]:
    said = loss_division_notes(recipe, sets_it=True)
    if recipe.best.world_size > 1 or recipe.is_fsdp or recipe.zero_stage is not None:
        text = _("Start it in {ranks} processes, as torchrun.sh (--emit torchrun) does: the batch is a product of them.")
        said.append(text.format(ranks=recipe.best.world_size))
    elif not recipe.on_cpu:
        said.append(
            _(
                "Let one card be visible (CUDA_VISIBLE_DEVICES=0): started plainly, the Trainer takes all and multiplies the batch."
            )
        )
    if recipe.plan.workload.loss == "chunked":
        said.append(
            _("The Trainer's chunked loss is Liger's kernel (pip install liger-kernel), which takes other memory than planned.")
        )
    if recipe.best.optimizer in {"adamw-8bit", "paged-adamw-8bit", "lion"} or recipe.quantised_bits:
        said.append(_("This needs bitsandbytes: pip install bitsandbytes."))
    return said


def _python(recipe: Recipe, settings: dict[str, Any], notes: list[str]) -> str:
    kind = _class(recipe)
    shown = dict(settings)
    shown.pop("deepspeed", None)
    lengths = f"MAX_LENGTH = {recipe.plan.workload.max_length}\n"
    if recipe.plan.workload.target_length is not None:
        lengths += f"TARGET_LENGTH = {recipe.plan.workload.target_length}\n"
    engine = 'ARGUMENTS["deepspeed"] = str(Path(__file__).with_name("deepspeed.json"))\n' if "deepspeed" in settings else ""
    how = _("args = training_arguments(), then Trainer(model=load_model(), args=args, ...).")
    tokens = _("Cut sequences at these lengths, in tokens, when you tokenize.")
    return (
        comments(head(recipe, how, *notes))
        + ("\nfrom pathlib import Path\n" if engine else "")
        + f"\nfrom transformers import {kind}\n\n"
        + f"MODEL = {recipe.model!r}\n"
        + comments([tokens])
        + lengths
        + "ARGUMENTS = {\n"
        + "".join(f"    {key!r}: {value!r},\n" for key, value in shown.items())
        + "}\n"
        + engine
        + '\n\ndef training_arguments(output_dir="outputs", **changes):\n'
        + f'    return {kind}(**{{**ARGUMENTS, "output_dir": output_dir, **changes}})\n'
        + "\n\n"
        + load_model_code(recipe)
    )


def _yaml(recipe: Recipe, settings: dict[str, Any], notes: list[str]) -> str:
    how = _("HfArgumentParser({kind}).parse_yaml_file(...), started in this folder; the model is loaded as in {file}.")
    load = [
        _("The model: {model}, dtype {dtype}, attn_implementation {attention}, sequences of at most {length} tokens.").format(
            model=recipe.model, dtype=recipe.dtype, attention=recipe.attention, length=recipe.plan.workload.max_length
        )
    ]
    if recipe.is_lora:
        text = _(
            "Adapters: {method}, rank {rank}, alpha {alpha}, dropout {dropout:g}, on {targets}; load_model in {file} makes them."
        )
        targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else ", ".join(recipe.lora_targets)
        load.append(
            text.format(
                method=recipe.best.method, rank=recipe.lora_rank, alpha=recipe.lora_alpha, dropout=recipe.lora_dropout,
                targets=targets, file=PYTHON,
            )
        )  # fmt: skip
    if recipe.plan.workload.freeze:
        text = _("Frozen: {patterns}; load_model in {file} freezes them.")
        load.append(text.format(patterns=", ".join(recipe.plan.workload.freeze), file=PYTHON))
    if recipe.every is not None:
        text = _("One layer in {every} is checkpointed: load_model in {file} does it, so gradient_checkpointing is off here.")
        load.append(text.format(every=recipe.every, file=PYTHON))
    start = head(recipe, how.format(kind=_class(recipe), file=PYTHON), *notes, *load)
    return yaml_text(start, {"output_dir": "outputs", **settings})


def _class(recipe: Recipe) -> str:
    return "Seq2SeqTrainingArguments" if recipe.plan.workload.task == "seq2seq" else "TrainingArguments"
