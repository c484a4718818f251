"""How a stitched model is trained where nothing else is said: the arguments of transformers, with defaults for this machine."""

from __future__ import annotations

import difflib
import warnings
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from brim.errors import UnsupportedError, UsageError
from brim.locale import _, sentences

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from brim.workload.words import Precision

_DEFAULTS: Mapping[str, Any] = {"gradient_accumulation_steps": 4, "dataloader_num_workers": 4, "max_grad_norm": 1.0}
PREFETCH = 2


def training_arguments(given: Mapping[str, Any], *, is_half: bool = False) -> TrainingArguments:
    """What was given, and for the rest the defaults; `is_half` if what trains is held at half precision."""
    known = [field.name for field in fields(TrainingArguments) if field.init]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            text = _("TrainingArguments has no {name!r}.").format(name=name)
            raise UsageError(sentences(text, _("Did you mean {near!r}?").format(near=near[0]) if near else ""))
    _refuse_engines(given)
    _refuse_half_on_the_cpu(given)
    size = given.get("per_device_train_batch_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(_("per_device_train_batch_size is {size!r}, and a whole number from 1 on is needed.").format(size=size))
    settings: dict[str, Any] = {
        **_DEFAULTS,
        "dataloader_pin_memory": torch.cuda.is_available(),
        **precision_for(given, is_half=is_half),
        **given,
    }
    if settings["dataloader_num_workers"]:
        settings.setdefault("dataloader_prefetch_factor", PREFETCH)
    if settings.get("gradient_checkpointing"):
        # The embedding is frozen, and reentrant checkpoints lose the gradient where no input of a layer has one.
        settings.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": False})
    try:
        return TrainingArguments(**settings)
    except (ValueError, TypeError, ImportError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise UsageError(_("These training arguments do not go together: {why}.").format(why=why)) from error


def _refuse_half_on_the_cpu(given: Mapping[str, Any]) -> None:
    """Transformers takes the wish and trains in float32 all the same."""
    if given.get("fp16") and (given.get("use_cpu") or not torch.accelerator.is_available()):
        raise UsageError(
            _("fp16 needs a GPU, and training would be on the CPU."), hint=_("Leave it out for float32, or give bf16=True.")
        )


def _refuse_engines(given: Mapping[str, Any]) -> None:
    """Before transformers hears of them: it then remembers the engine for every model that this process makes."""
    for name, engine in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if given.get(name):
            raise UnsupportedError(
                _("brim's step does not run inside {engine} yet: its micro-batches are collective.").format(engine=engine),
                hint=_("Run it on one GPU, or on several with plain data parallelism (torchrun without {engine}).").format(
                    engine=engine
                ),
            )


def precision_for(given: Mapping[str, Any], *, is_half: bool = False) -> dict[str, bool]:
    """bf16 on a GPU that has it, fp16 on one that has not; on the CPU float32, and bf16 where weights that train are halves already."""
    if given.get("bf16") or given.get("fp16"):
        return {} if torch.accelerator.is_available() else {"use_cpu": True}
    if given.get("use_cpu") or not torch.cuda.is_available():
        has_only_cpu = bool(given.get("use_cpu")) or not torch.accelerator.is_available()
        return {"bf16": True, "use_cpu": True} if is_half and has_only_cpu else {}
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"bf16": has_bf16, "fp16": not has_bf16}


def precision_of(arguments: TrainingArguments) -> Precision:
    """What is computed in."""
    if arguments.bf16:
        return "amp-bf16"
    return "amp-fp16" if arguments.fp16 else "fp32"


@contextmanager
def workers_as_asked() -> Iterator[None]:
    """Quiet torch, which warns where workers outnumber the cores: these read rows and wait, so it is harmless."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
        yield
