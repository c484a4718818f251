"""From what a person names to a module that can be run here: the model itself if it is small, else a shrunk copy of it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.proofs.kinds import Kind, kind_of
from brim.proofs.shrinking import shrink
from brim.proofs.weights import draw
from brim.workload.resolve import Model, find_model

Size = Literal["auto", "full", "shrunk"]

_LARGEST_FRESH = 20_000_000
_LARGEST_LOADED = 300_000_000
"""Parameters up to which a model is run as it is."""
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Obtained:
    """A module to be proven, and what it has to do with what was asked for."""

    model: nn.Module
    name: str
    weights: Literal["own", "fresh"]
    shrunk: str | None = None
    kind: Kind | None = None
    notes: tuple[str, ...] = ()


def obtain(
    given: Any, *, size: Size = "auto", task: Kind | None = None, trust_remote_code: bool = False, seed: int = 0
) -> Obtained:
    """A module as it is; a name as `find_model` knows it, or the folder of a PEFT adapter."""
    if not isinstance(given, (torch.nn.Module, str, os.PathLike)):
        raise UsageError(_("A model or its name is needed, and {kind} is neither.").format(kind=type(given).__name__))
    if isinstance(given, torch.nn.Module):
        if any(parameter.is_meta for parameter in given.parameters()):
            raise UnsupportedError(
                _("This model has no weights (it is on the device meta): nothing of it can be run."),
                hint=_("Give its config or its name: fresh weights are drawn then."),
            )
        if size == "shrunk":
            raise UsageError(_("A module that exists already cannot be shrunk: give its config, its folder or its name."))
        return Obtained(given, type(given).__name__, "own")
    if (Path(str(given)).expanduser() / _ADAPTER).is_file():
        return _with_adapter(Path(str(given)).expanduser(), size, trust_remote_code, seed)
    return _of_model(_for_task(find_model(given, trust_remote_code=trust_remote_code), task), size, seed)


def _for_task(model: Model, task: Kind | None) -> Model:
    """The class that transformers has for another task than the model's own."""
    if task is None or model.config is None:
        return model
    from transformers.models.auto import modeling_auto

    names = {
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }[task]
    kind = str(model.config.get("model_type"))
    if kind not in names:
        raise UnsupportedError(
            _("transformers has no model of the type {kind} for the task {task}.").format(kind=kind, task=task)
        )
    class_name = names[kind] if isinstance(names[kind], str) else names[kind][0]
    if class_name == model.class_name:
        return model
    is_decoder = {"is_decoder": True} if task == "causal-lm" and "is_decoder" in model.config else {}
    config = {**model.config, "architectures": [class_name], **is_decoder}
    return dataclasses.replace(model, class_name=class_name, config=config, card=None)


def _of_model(model: Model, size: Size, seed: int) -> Obtained:
    if model.factory is not None:
        if size == "shrunk":
            raise UsageError(
                _("{given} builds the model itself, so brim cannot shrink it: let the function build a small one.").format(
                    given=model.given
                )
            )
        torch.manual_seed(seed)
        return Obtained(model.build("cpu"), model.name, "own")
    parameters = model.parameters()
    if model.has_weights and (size == "full" or (size == "auto" and parameters <= _LARGEST_LOADED)):
        loaded, notes = load(model)
        return Obtained(loaded, model.name, "own", notes=notes)
    shrunk = None
    assert model.config is not None
    if size == "shrunk" or (size == "auto" and parameters > _LARGEST_FRESH):
        smaller = shrink(model.config)
        if smaller.words:
            model, shrunk = dataclasses.replace(model, config=smaller.config, card=None), smaller.words
    torch.manual_seed(seed)
    built = _with_padding(model).build("cpu")
    draw(built, seed)
    built.eval()
    return Obtained(built, model.name, "fresh", shrunk, kind_of(built))


def _with_padding(model: Model) -> Model:
    """A classifier of decoders finds the last token by the padding, so there must be some."""
    config = dict(model.config or {})
    if config.get("pad_token_id") is None and str(model.class_name).endswith("ForSequenceClassification"):
        config["pad_token_id"] = 0
    return dataclasses.replace(model, config=config)


def load(model: Model) -> tuple[nn.Module, tuple[str, ...]]:
    """A model of a folder with its own weights, in float32, and what is to be said of them."""
    import transformers

    assert model.folder is not None
    assert model.config is not None
    config: Any = transformers.AutoConfig.from_pretrained(model.folder, trust_remote_code=model.trust_remote_code)
    named = getattr(transformers, model.class_name or "", None)
    automatic: Any = named if named is not None else transformers.AutoModelForCausalLM
    try:
        extra = {} if named is not None else {"trust_remote_code": model.trust_remote_code}
        loaded, info = automatic.from_pretrained(
            model.folder, config=config, dtype=torch.float32, output_loading_info=True, **extra
        )
    except Exception as error:
        text = _("{name} cannot be loaded: {why}")
        raise RunError(text.format(name=model.given, why=" ".join(str(error).split())[:400])) from error
    missing = sorted(info.get("missing_keys", ()))
    notes: tuple[str, ...] = ()
    if missing:
        text = _("{count} tensors are not in the folder and were drawn at random: {names}.")
        notes = (text.format(count=len(missing), names=", ".join(missing[:3])),)
    built: nn.Module = loaded.eval()
    return built, notes


def _with_adapter(folder: Path, size: Size, trust_remote_code: bool, seed: int) -> Obtained:
    """The base model with the adapter's shape on it; with the adapter's own weights if the base is run as it is."""
    import json

    import peft

    try:
        facts = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))
        base = str(facts["base_model_name_or_path"])
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(_("{path} is not a PEFT adapter that can be read: {why}").format(path=folder, why=error)) from error
    found = _of_model(find_model(base, trust_remote_code=trust_remote_code), size, seed)
    if found.weights == "own":
        adapted: Any = peft.PeftModel.from_pretrained(found.model, str(folder), is_trainable=True)
        return dataclasses.replace(found, model=adapted, name=folder.name)
    adapted = peft.get_peft_model(found.model, config)
    for parameter_name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name or parameter.requires_grad)
    draw(adapted, seed)
    note = _("The adapter's shape was verified on fresh weights, for its base {base} has none here.").format(base=base)
    return dataclasses.replace(found, model=adapted, name=folder.name, notes=(*found.notes, note))
