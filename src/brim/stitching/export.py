"""A stitch within one family as an ordinary checkpoint of that family, for every tool that knows nothing of stitches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from brim.errors import UsageError
from brim.locale import _
from brim.stitching.families import FAMILIES, TOKEN_IDS, depth_key, differences, join_per_layer
from brim.stitching.parts import backbone

if TYPE_CHECKING:
    from brim.stitching.model import StitchedModel


def export(model: StitchedModel) -> PreTrainedModel:
    """The same model as one of its family, with equal logits; an error that names the difference where there is no such model."""
    _refuse_what_differs(model)
    parts = model.config.parts
    config = AutoConfig.for_model(**_joined_config(model))
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device(model.device), no_init_weights():
            whole = kind(config)
    finally:
        torch.set_default_dtype(before)
    whole.tie_weights()
    whole.config.dtype = model.dtype
    _fill(whole, model, parts[0]["config"]["model_type"])
    whole.generation_config = copy.deepcopy(model.generation_config)
    ready: PreTrainedModel = whole.eval()
    return ready


def _refuse_what_differs(model: StitchedModel) -> None:
    parts = model.config.parts
    first = parts[0]["config"]
    for part, adapter in zip(parts[1:], model.config.adapters, strict=True):
        names = {"before": parts[0]["donor"], "after": part["donor"]}
        if part["config"]["model_type"] != first["model_type"]:
            text = _("{before} is a {one} model and {after} a {other}: no ordinary model has layers of both.")
            raise UsageError(text.format(**names, one=first["model_type"], other=part["config"]["model_type"]))
        if adapter["kind"] != "identity":
            text = _("A {kind} adapter stands before {after}, and no {family} model has one.")
            raise UsageError(text.format(kind=adapter["kind"], after=part["donor"], family=first["model_type"]))
        different = differences(first, part["config"], FAMILIES[first["model_type"]])
        if different:
            name = different[0]
            text = _("{before} and {after} differ in {setting}: {one} and {other}.")
            raise UsageError(text.format(**names, setting=name, one=first.get(name), other=part["config"].get(name)))


def _joined_config(model: StitchedModel) -> dict[str, Any]:
    """The first part's config, with the layers of all."""
    configs = [part["config"] for part in model.config.parts]
    return {
        **copy.deepcopy(configs[0]),
        **join_per_layer(configs),
        depth_key(model.parts[0].config): model.config.num_hidden_layers,
        **{name: getattr(model.config, name) for name in (*TOKEN_IDS, "tie_word_embeddings")},
    }


def _fill(whole: Any, model: StitchedModel, family_name: str) -> None:
    """Embedding of the first part, layers of all, norm and head of the last."""
    family = FAMILIES[family_name]
    state: dict[str, torch.Tensor] = {}
    prefix = f"{whole.base_model_prefix}."
    count = 0
    for part in model.parts:
        within = prefix if backbone(part) is not part else ""
        layers = f"{within}{family.layers}."
        for name, tensor in part.state_dict().items():
            if name.startswith(layers):
                number, rest = name.removeprefix(layers).split(".", 1)
                state[f"{prefix}{family.layers}.{count + int(number)}.{rest}"] = tensor
            else:
                state[name if within else f"{prefix}{name}"] = tensor
        count += part.config.num_hidden_layers
    with torch.no_grad():
        for name, target in whole.state_dict().items():
            target.copy_(state[name])
