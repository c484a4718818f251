"""Whether the config of a stitched model can be one: a file may have been changed by hand, and half of a model is no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from brim.errors import ConfigError
from brim.locale import _
from brim.stitching.families import FAMILIES
from brim.stitching.freezing import check_trains

_SIZES: Final = {"identity": (), "linear": (), "low-rank": ("rank",), "mlp": ("width",)}
"""What else the config of each kind of adapter says."""


def check_config(config: Any) -> None:
    """Refuse what no recipe can have made, and name the first thing that is wrong."""
    parts, adapters = config.parts, config.adapters
    if not isinstance(parts, list) or not parts:
        raise _unsound(_("it has no parts"))
    for index, part in enumerate(parts):
        _check_part(part, index)
    if not isinstance(adapters, list) or len(adapters) != len(parts) - 1:
        raise _unsound(_("its {count} parts need {needed} adapters").format(count=len(parts), needed=len(parts) - 1))
    widths = [_number(part["config"], "hidden_size", "n_embd") for part in parts]
    for index, adapter in enumerate(adapters):
        _check_adapter(adapter, index, widths[index], widths[index + 1])
    _check_sums(config)
    if not isinstance(config.trains, list | tuple):
        raise _unsound(_("{name} is {value!r}").format(name="trains", value=config.trains))
    check_trains(config.trains, [part["donor"] for part in parts])


def _check_part(part: Any, index: int) -> None:
    facts = part.get("config") if isinstance(part, Mapping) else None
    name = f"parts[{index}]"
    if not isinstance(facts, Mapping) or not isinstance(part.get("donor"), str) or not isinstance(part.get("layers"), list):
        raise _unsound(_("{name} has no donor, no layers or no config").format(name=name))
    kind = facts.get("model_type")
    if kind not in FAMILIES:
        raise _unsound(_("{name} is of the family {kind!r}, which cannot be stitched").format(name=name, kind=kind))
    depth = _number(facts, "num_hidden_layers", "n_layer")
    if depth != len(part["layers"]):
        text = _("{name} lists {listed} layers, and its config has {depth}")
        raise _unsound(text.format(name=name, listed=len(part["layers"]), depth=depth))


def _check_adapter(adapter: Any, index: int, before: int | None, after: int | None) -> None:
    name = f"adapters[{index}]"
    kind = adapter.get("kind") if isinstance(adapter, Mapping) else None
    if kind not in _SIZES:
        raise _unsound(_("{name} is of the kind {kind!r}, and there is none").format(name=name, kind=kind))
    if (adapter.get("from"), adapter.get("to")) != (before, after) or (kind == "identity" and before != after):
        text = _("{name} does not lead from the width {before} to the width {after}")
        raise _unsound(text.format(name=name, before=before, after=after))
    for size in _SIZES[kind]:
        if (_number(adapter, size) or 0) < 1:
            raise _unsound(_("{name} is {value!r}").format(name=f"{name}.{size}", value=adapter.get(size)))


def _check_sums(config: Any) -> None:
    """What stands beside the parts must follow from them: tools read it there."""
    depth = sum(len(part["layers"]) for part in config.parts)
    if config.num_hidden_layers != depth:
        text = _("{name} is {value!r}, and its parts say {found}")
        raise _unsound(text.format(name="num_hidden_layers", value=config.num_hidden_layers, found=depth))
    for part in (config.parts[0], config.parts[-1]):
        rows = _number(part["config"], "vocab_size")
        if rows is None or rows < 1 or rows != config.vocab_size:
            text = _("{name} is {value!r}, and its parts say {found}")
            raise _unsound(text.format(name="vocab_size", value=config.vocab_size, found=rows))


def _number(facts: Mapping[str, Any], *names: str) -> int | None:
    found = next((facts[name] for name in names if name in facts), None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _unsound(what: str) -> ConfigError:
    return ConfigError(
        _("The config of this stitched model is not as brim writes it: {what}.").format(what=what),
        hint=_("Stitch it again from its recipe, or take config.json from where the model came from."),
    )
