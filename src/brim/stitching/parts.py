"""One piece as a module: its donor's own backbone with the chosen layers, so that its own forward makes masks, positions and cache.

No layer is ever called from here. What a layer must be handed depends on its family, its attention and the release of transformers, and
whoever hands it something else gets a model that trains and is wrong.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig

from brim.stitching.families import FAMILIES, Family

if TYPE_CHECKING:
    from collections.abc import Mapping


class NoEmbedding(nn.Module):
    """In the place of an embedding that a piece does not have, because it is handed hidden states."""

    def forward(self, *_arguments: Any) -> Tensor:
        """It is never asked."""
        raise AssertionError("This piece has no embedding.")


class NoPositions(nn.Module):
    """In the place of a table of positions that was added before: zeros, which broadcast over hidden states of any width."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """One zero for each position; an integer, so that hidden states of any dtype keep theirs."""
        return torch.zeros_like(position_ids).unsqueeze(-1)


def build_part(facts: Mapping[str, Any], *, is_first: bool, is_last: bool, attention: str | None) -> nn.Module:
    """The module of one part: the last one is a whole model with its norm and head, the others end before the norm."""
    config = AutoConfig.for_model(**copy.deepcopy(dict(facts["config"])))
    config._attn_implementation = attention  # noqa: SLF001 (the only way in before a model exists)
    kind: Any = (MODEL_FOR_CAUSAL_LM_MAPPING if is_last else MODEL_MAPPING)[type(config)]
    module: nn.Module = kind(config)
    family, body = family_of_part(module), backbone(module)
    if not is_last:
        setattr(body, family.norm, nn.Identity())
    if not is_first:
        body.set_input_embeddings(NoEmbedding())
        if family.positions is not None:
            setattr(body, family.positions, NoPositions())
        if family.dropout is not None:
            setattr(body, family.dropout, nn.Identity())
    return module


def backbone(module: Any) -> Any:
    """What is below the head; the module itself where it has none."""
    return getattr(module, module.base_model_prefix, module)


def family_of_part(module: Any) -> Family:
    """The names of its modules."""
    return FAMILIES[module.config.model_type]


def layers_of(module: Any) -> Any:
    """Its layers, a ModuleList."""
    return getattr(backbone(module), family_of_part(module).layers)


def embedding_of(module: Any) -> list[nn.Module]:
    """What makes hidden states of tokens: the embedding, and a table of positions where there is one."""
    family = family_of_part(module)
    found: list[nn.Module] = [backbone(module).get_input_embeddings()]
    return [*found, getattr(backbone(module), family.positions)] if family.positions is not None else found


def name_within(module: nn.Module, searched: nn.Module) -> str:
    """The name under which a module is found inside another."""
    return next(str(name) for name, one in module.named_modules() if one is searched)
