"""From donors to a stitched model: their weights are copied, and they themselves are left as they were."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.machine.screen import say
from brim.stitching.blueprint import Donor, draw, used_donors
from brim.stitching.families import TOKEN_IDS, token_within
from brim.stitching.model import StitchedModel, register
from brim.stitching.parts import backbone, family_of_part, name_within
from brim.stitching.reading import read_recipe
from brim.stitching.recipe import Recipe
from brim.workload.resolve import Model, find_model

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from brim.stitching.config import StitchedConfig

_ATTENTION: Final = {"flash2": "flash_attention_2"}


def assemble(recipe: Recipe, donors: Mapping[str, PreTrainedModel]) -> StitchedModel:
    """Stitch models that are loaded already."""
    used = used_donors(recipe)
    for name in used:
        if not isinstance(donors.get(name), PreTrainedModel):
            text = _("Donor {name} is {kind}, and a model of transformers is needed.")
            raise UsageError(text.format(name=name, kind=type(donors.get(name)).__name__))
    config = draw(
        recipe, {name: Donor(name=name, config=donors[name].config, class_name=type(donors[name]).__name__) for name in used}
    )
    model = _empty(config, recipe)
    for name in used:
        fill(model, name, donors[name])
    _end_like(model, donors[used[0]])
    model.eval().to(donors[used[0]].device)
    return model


def stitch(
    recipe: Recipe | Mapping[str, Any] | str | os.PathLike[str], *, with_weights: bool = True, device: str = "cpu"
) -> StitchedModel:
    """Find the donors, check the recipe, and stitch them, one donor in memory at a time.

    The recipe is one that was read, the name of its YAML file, or a mapping with the same keys.

    Without weights it is built on fresh ones, and on the device `meta` on no memory at all.
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(recipe)
    used = used_donors(recipe)
    found = {name: _found(name, recipe.donors[name]) for name in used}
    config = draw(recipe, {name: _donor(name, found[name]) for name in used})
    if not with_weights:
        with torch.device(device):
            return _build(config, recipe)
    for name in used:
        _refuse_without_weights(name, found[name])
    model = _empty(config, recipe)
    for name in used:
        donor = _load(name, found[name], recipe)
        fill(model, name, donor)
        if name == used[0]:
            _end_like(model, donor)
        del donor  # before the next one is read
    model.eval().to(device)
    return model


def fill(model: StitchedModel, name: str, donor: PreTrainedModel) -> None:
    """Copy a donor's weights into all parts that were cut out of it."""
    config, last = model.config, len(model.parts) - 1
    if config.tie_word_embeddings and name == config.parts[0]["donor"] and not _is_tied(donor):
        model.untie()
    for index, (part, facts) in enumerate(zip(model.parts, config.parts, strict=True)):
        if facts["donor"] == name:
            source: Any = donor if index == last else backbone(donor)
            rows = donor.config.vocab_size if config.vocabulary == "cut" else None
            _copy(part, source.state_dict(), facts, is_last=index == last, rows=rows)


def _is_tied(donor: Any) -> bool:
    """Whether head and embedding are one, whatever its config says: a file may hold two, and transformers then keeps both."""
    return bool(torch.equal(donor.get_output_embeddings().weight, donor.get_input_embeddings().weight))


def _copy(part: Any, source: Mapping[str, torch.Tensor], facts: Mapping[str, Any], *, is_last: bool, rows: int | None) -> None:
    """Each of the part's tensors is the donor's of the same name, but for the numbers of the layers.

    `rows` are those of the donor's tables of tokens, where they may be cut; nothing else ever is.
    """
    within = f"{part.base_model_prefix}." if is_last else ""
    prefix = f"{within}{family_of_part(part).layers}."
    tables = _tables(part, is_last=is_last) if rows is not None else set()
    with torch.no_grad():
        for name, tensor in part.state_dict().items():
            there = _name_in_donor(name, prefix, facts["layers"])
            value = source.get(there)
            if value is not None and name in tables and len(value) == rows:
                value = value[: len(tensor)]
            _refuse_other_weights(facts["donor"], there, value, tensor)
            tensor.copy_(value)


def _tables(part: Any, *, is_last: bool) -> set[str]:
    """The names of what has a row for each token: the embedding, and the head with its bias."""
    modules = [part.get_input_embeddings(), *([part.get_output_embeddings()] if is_last else [])]
    return {f"{name_within(part, module)}.{name}" for module in modules for name in ("weight", "bias")}


def _refuse_other_weights(donor: str, name: str, value: torch.Tensor | None, expected: torch.Tensor) -> None:
    hint = _("Merge what PEFT has put into it, then save and load it.")
    if value is None:
        raise UsageError(
            _("Donor {donor} is not what its config says: {name} is missing.").format(donor=donor, name=name), hint=hint
        )
    if value.shape != expected.shape:
        text = _("Donor {donor} is not what its config says: {name} has the shape {found}, and {expected} is expected.")
        raise UsageError(text.format(donor=donor, name=name, found=list(value.shape), expected=list(expected.shape)), hint=hint)


def _name_in_donor(name: str, prefix: str, numbers: list[int]) -> str:
    if not name.startswith(prefix):
        return name
    number, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{numbers[int(number)]}.{rest}"


def _empty(config: StitchedConfig, recipe: Recipe) -> StitchedModel:
    """The model with room for its weights; only the adapters have theirs."""
    with no_init_weights():
        model = _build(config, recipe)
    model.tie_weights()  # which is also left out there
    model.freeze()
    with torch.no_grad():
        for adapter in model.adapters:
            adapter.reset()
    return model


def _build(config: StitchedConfig, recipe: Recipe) -> StitchedModel:
    attention = None if recipe.attention is None else _ATTENTION.get(recipe.attention, recipe.attention)
    register()
    automatic: Any = transformers.AutoModelForCausalLM
    try:
        model: StitchedModel = automatic.from_config(config, dtype=getattr(torch, recipe.dtype), attn_implementation=attention)
    except (ImportError, ValueError) as error:
        if attention is None:
            raise
        text = _("The attention {attention} cannot be used here: {why}.")
        raise UnsupportedError(
            text.format(attention=recipe.attention, why=_told(error)), hint=_("Leave attention out of the recipe.")
        ) from error
    return model


def _end_like(model: StitchedModel, first: PreTrainedModel) -> None:
    """It ends its sentences as the first donor does, whose tokens it speaks."""
    for name in TOKEN_IDS:
        value = getattr(first.generation_config, name, None)
        if value is None:
            value = getattr(first.config, name, None)
        kept = token_within(value, model.config.vocab_size)
        if value is not None:
            setattr(model.generation_config, name, copy.copy(kept))
        if kept != value:
            text = _("{name} is {value} in the first donor, beyond the {rows:,} tokens that are left: here it is {kept}.")
            say(text.format(name=name, value=value, rows=model.config.vocab_size, kept=_("none") if kept is None else kept))


def _found(name: str, given: str) -> Model:
    """Who is not there is named as the recipe names it."""
    try:
        return find_model(given)
    except UsageError as error:
        raise type(error)(_("Donor {name}: {why}").format(name=name, why=error.message), hint=error.hint) from error


def _donor(name: str, found: Model) -> Donor:
    if found.config is None:
        text = _("Donor {name} is a function ({given}); a folder of a model is needed.")
        raise UsageError(text.format(name=name, given=found.given))
    try:
        config = transformers.AutoConfig.for_model(**copy.deepcopy(dict(found.config)))
    except Exception as error:  # whatever a class of transformers makes of a strange config
        raise UsageError(_("Donor {name}: its config cannot be read: {why}.").format(name=name, why=_told(error))) from error
    return Donor(name=name, config=config, class_name=found.class_name, folder=found.folder)


def _refuse_without_weights(name: str, found: Model) -> None:
    if found.has_weights and found.folder is not None:
        return
    text = (
        _("Donor {name} ({given}) is an entry of the catalogue, which has no weights.")
        if found.origin == "catalogue"
        else _("Donor {name} ({given}) has no weights beside its config.")
    )
    hint = _("Give a folder that holds the model; without weights a recipe can still be looked at (--dry-run).")
    if found.origin == "hub":
        hint = _("Download the whole model first: hf download {given}.").format(given=found.given)
    raise UsageError(text.format(name=name, given=found.given), hint=hint)


def _load(name: str, found: Model, recipe: Recipe) -> PreTrainedModel:
    automatic: Any = transformers.AutoModelForCausalLM
    try:
        donor, told = automatic.from_pretrained(
            found.folder,
            dtype=getattr(torch, recipe.dtype),
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise RunError(_("The weights of donor {name} cannot be read: {why}.").format(name=name, why=_told(error))) from error
    missing = sorted(told["missing_keys"])
    if missing:  # transformers would draw them at random, and warn
        text = _("The weights of donor {name} are not complete: {count} are missing, {first} among them.")
        raise RunError(text.format(name=name, count=len(missing), first=missing[0]))
    other = sorted(str(key[0] if isinstance(key, tuple) else key) for key in told.get("mismatched_keys") or ())
    if other:
        text = _("The weights of donor {name} have other shapes than its config says: {count}, {first} among them.")
        raise RunError(text.format(name=name, count=len(other), first=other[0]))
    loaded: PreTrainedModel = donor
    return loaded


def _told(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
