"""What TRL, axolotl and LLaMA-Factory share: they fine-tune decoder-only models from one YAML, and run no code of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from brim.errors import UnsupportedError
from brim.locale import _
from brim.planner.emit import deepspeed, launchers

if TYPE_CHECKING:
    from brim.planner.emit.recipe import Recipe

Shape = Literal["messages", "alpaca", "text", "other"]
NO_DATA = "YOUR-DATA"
_FIRST_BYTES = 65536


def check(recipe: Recipe, tool: str) -> None:
    """Refuse what needs code."""
    other = _("Take --emit transformers, whose file loads the model in Python.")
    if recipe.plan.workload.task != "causal-lm":
        text = _("{tool} fine-tunes decoder-only models, and the task is {task}.")
        raise UnsupportedError(text.format(tool=tool, task=recipe.plan.workload.task), hint=other)
    if recipe.is_function:
        text = _("{tool} loads a model by its name, and {model} is a function.")
        raise UnsupportedError(text.format(tool=tool, model=recipe.model), hint=other)
    if recipe.plan.workload.freeze:
        text = _("{tool} cannot freeze parameters by pattern ({patterns}), and all would train.")
        raise UnsupportedError(text.format(tool=tool, patterns=", ".join(recipe.plan.workload.freeze)), hint=other)


def notes(recipe: Recipe, tool: str) -> list[str]:
    """What is done otherwise than planned, without harm."""
    said = []
    if recipe.every is not None:
        text = _("{tool} checkpoints all layers or none: all, where the plan has one in {every}; slower, in less memory.")
        said.append(text.format(tool=tool, every=recipe.every))
    if recipe.is_lora and recipe.plan.workload.lora_dtype is not None:
        text = _("{tool} chooses the adapters' dtype itself; the plan has {dtype}.")
        said.append(text.format(tool=tool, dtype=recipe.plan.workload.lora_dtype))
    if recipe.data is None:
        said.append(_("No data was named: put yours in place of {word}.").format(word=NO_DATA))
    return said


def check_half_base(recipe: Recipe, tool: str) -> None:
    """Refuse a frozen base in another dtype than the one computed in: these tools load it in that."""
    if recipe.is_lora and recipe.dtype != {"bf16": "bfloat16", "fp16": "float16"}.get(recipe.half or ""):
        text = _("{tool} holds the frozen base in half precision, and the plan has it in {dtype} ({precision}).")
        raise UnsupportedError(
            text.format(tool=tool, dtype=recipe.dtype, precision=recipe.best.precision),
            hint=_("Take --precision amp-bf16 or amp-fp16, or --emit transformers."),
        )


def engine_files(recipe: Recipe) -> dict[str, str]:
    """The files that a sharded or distributed run leans on."""
    texts = {}
    if recipe.best.world_size > 1 or recipe.is_fsdp or recipe.zero_stage is not None:
        texts[launchers.ACCELERATE] = launchers.accelerate_text(recipe)
    if recipe.zero_stage is not None:
        texts[deepspeed.NAME] = deepspeed.deepspeed_text(recipe)
    return texts


def is_local(recipe: Recipe) -> bool:
    """Whether the data lies on this disk, rather than on the Hub."""
    return recipe.data is not None and Path(recipe.data).exists()


def file_kind(recipe: Recipe) -> str | None:
    """`json` or `parquet`, as the datasets library names its readers; None for a folder or a Hub id."""
    suffix = Path(recipe.data or "").suffix.lower()
    return {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(suffix) if is_local(recipe) else None


def shape(recipe: Recipe) -> Shape:
    """What a record of the data looks like, as far as its first one tells."""
    if file_kind(recipe) != "json":
        return "other"
    assert recipe.data is not None
    with Path(recipe.data).open("rb") as stream:
        start = stream.read(_FIRST_BYTES).decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n[")
    try:
        first, _end = json.JSONDecoder().raw_decode(start)
    except ValueError:
        return "other"
    if not isinstance(first, dict):
        return "other"
    if "messages" in first:
        return "messages"
    if "instruction" in first and "output" in first:
        return "alpaca"
    return "text" if "text" in first else "other"
