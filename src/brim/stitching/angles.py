"""Where rotary angles depend on the longest sequence of a batch: beyond a border, transformers turns all rows by other angles.

LongRoPE (Phi-3) has two sets of angles, and takes the second for every row as soon as one is longer than what the model was first trained
on; dynamic NTK grows them with the longest row. So there a row is no longer what it is alone, and keys made before are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.errors import UsageError
from brim.locale import _

if TYPE_CHECKING:
    from collections.abc import Sequence


def outlived_at(configs: Sequence[Any]) -> list[int]:
    """The borders of LongRoPE: lengths beyond which keys made before are wrong."""
    return [
        int(rope["original_max_position_embeddings"]) for _config, rope in _ropes(configs) if rope.get("rope_type") == "longrope"
    ]


def refuse_rows_beyond(lengths: Any, configs: Sequence[Any]) -> None:
    """Refuse rows of which some would change the angles of others. Rows that are all beyond a border of LongRoPE share theirs."""
    mixed = [border for border in outlived_at(configs) if 0 < np.sum(lengths > border) < len(lengths)]
    grown = [
        int(config.max_position_embeddings)
        for config, rope in _ropes(configs)
        if rope.get("rope_type") == "dynamic" and np.max(lengths) > config.max_position_embeddings
    ]
    if not mixed and not grown:
        return
    border = min(mixed + grown)
    text = _(
        "{count} of {total} rows are longer than {border} tokens, where the rotary scaling of this model begins to turn every row of "
        "a batch by other angles: what is learned from a row would depend on the rows beside it."
    )
    raise UsageError(
        text.format(count=int(np.sum(lengths > border)), total=len(lengths), border=border),
        hint=_(
            "Cut all rows to {border} tokens (texts: tokenize them with truncation=True, max_length={border}), or leave the longer ones "
            "out."
        ).format(border=border),
    )


def _ropes(configs: Sequence[Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """The rotary settings of all parts that have layers; some families have several, by the type of a layer."""
    found: list[tuple[Any, Mapping[str, Any]]] = []
    for config in configs:
        given = getattr(config, "rope_parameters", None) or {}
        if config.num_hidden_layers:
            nested = [value for value in given.values() if isinstance(value, Mapping)]
            found += [(config, rope) for rope in nested or [given]]
    return found
