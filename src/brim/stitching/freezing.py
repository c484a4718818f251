"""What of a stitched model trains: the adapters, unless the recipe names more. All else is frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from brim.errors import UsageError
from brim.locale import _
from brim.stitching.parts import backbone, embedding_of, family_of_part, layers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

WORDS: Final = ("adapters", "embedding", "norm", "head", "layers", "all")
"""What `trains` may name, besides the donors."""


def check_trains(trains: Iterable[str], donors: Iterable[str]) -> None:
    """Refuse names of things that this stitch does not have."""
    valid = (*WORDS, *dict.fromkeys(donors))
    for name in trains:
        if name not in valid:
            raise UsageError(
                _("Nothing in this stitch is called {name!r}, so it cannot train.").format(name=name),
                hint=_("What can train: {names}.").format(names=", ".join(valid)),
            )


def freeze(model: Any) -> None:
    """Apply what the model's config says about training."""
    chosen = [module for name in model.config.trains or () for module in _modules(model, name)]
    model.requires_grad_(False)
    for module in chosen:
        module.requires_grad_(True)


def _modules(model: Any, name: str) -> list[nn.Module]:
    parts, last = model.parts, model.parts[-1]
    if name == "all":
        return [model]
    if name == "adapters":
        return [model.adapters]
    if name == "embedding":
        return embedding_of(parts[0])
    if name == "norm":
        return [getattr(backbone(last), family_of_part(last).norm)]
    if name == "head":
        return [last.get_output_embeddings()]
    return [
        layers_of(part)
        for part, facts in zip(parts, model.config.parts, strict=True)
        if name in {"layers", facts["donor"]}
    ]  # fmt: skip
