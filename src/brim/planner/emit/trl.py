"""TRL: one YAML for `trl sft --config` (1.16: trainer/sft_config.py, trainer/model_config.py, scripts/utils.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError
from brim.locale import _, sentences
from brim.planner.emit import arguments, launchers, sft
from brim.planner.emit.files import Files
from brim.planner.emit.said import head
from brim.planner.emit.text import yaml_text

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

NAME = "trl_sft.yaml"
_TOOL = "TRL"


def files(recipe: Recipe) -> Files:
    """`trl_sft.yaml`, and what accelerate and DeepSpeed need beside it."""
    sft.check(recipe, _TOOL)
    if recipe.quantised_bits and recipe.half == "fp16":
        raise UnsupportedError(
            _("TRL casts the adapters of a quantised base to bfloat16, which fp16's loss scaling cannot unscale."),
            hint=_("Take --method lora, a card with bfloat16, or --emit transformers."),
        )
    notes = [*sft.notes(recipe, _TOOL), *_notes(recipe)]
    settings = {
        **_model(recipe),
        **_data(recipe),
        "output_dir": "outputs",
        **arguments.batch(recipe),
        **arguments.steps(recipe),
        **arguments.precision(recipe),
        **arguments.checkpointing(recipe, code=False),
        **arguments.loader(recipe),
        **_processes(recipe),
    }
    if recipe.on_cpu:
        settings["use_cpu"] = True
    how = _("In this folder: {command}").format(command=f"trl sft --config {NAME}")
    if recipe.plan.machine.nodes > 1:
        how = sentences(how, _("On each node add --machine_rank, --main_process_ip and --main_process_port."))
    return Files({NAME: yaml_text(head(recipe, how, *notes), settings), **sft.engine_files(recipe)}, (*recipe.notes, *notes))


def _notes(recipe: Recipe) -> list[str]:
    said = []
    if recipe.data is not None and sft.shape(recipe) in {"alpaca", "other"}:
        said.append(
            _("TRL reads the columns messages, prompt and completion, or text: rename those of {data} first.").format(
                data=recipe.data
            )
        )
    if recipe.plan.workload.loss == "standard":
        said.append(_("TRL computes its loss in chunks, in less memory than the standard loss that was planned."))
    if recipe.quantised_bits:
        said.append(_("TRL holds the adapters of a quantised base in bfloat16, and raises nothing of the base to float32."))
    if recipe.zero_stage == 3 and recipe.is_lora and recipe.checkpoints:
        said.append(_("TRL checkpoints adapters under ZeRO-3 in the re-entrant way, whatever is written here."))
    return said


def _model(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_name_or_path": recipe.model,
        "dtype": recipe.dtype,
        "attn_implementation": recipe.attention,
    }
    if recipe.is_lora:
        targets = recipe.lora_targets
        settings |= {
            "use_peft": True,
            "lora_r": recipe.lora_rank,
            "lora_alpha": recipe.lora_alpha,
            "lora_dropout": recipe.lora_dropout,
            "lora_target_modules": [targets] if isinstance(targets, str) else targets,
        }
    if recipe.quantised_bits == 4:
        settings |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
        if recipe.is_fsdp or recipe.zero_stage == 3:
            settings["bnb_4bit_quant_storage"] = recipe.dtype
    if recipe.quantised_bits == 8:
        settings["load_in_8bit"] = True
    return settings


def _data(recipe: Recipe) -> dict[str, Any]:
    cut = {"max_length": recipe.plan.workload.max_length, "packing": False, "loss_type": "nll"}
    kind = sft.file_kind(recipe)
    if kind is not None:
        return {"datasets": [{"path": kind, "data_files": recipe.data}], **cut}
    return {"dataset_name": recipe.data or sft.NO_DATA, **cut}


def _processes(recipe: Recipe) -> dict[str, Any]:
    """Without them accelerate would start one process for every card that it sees, and the batch would be another."""
    if sft.engine_files(recipe):
        return {"accelerate_config": launchers.ACCELERATE}
    return {"num_processes": 1}
