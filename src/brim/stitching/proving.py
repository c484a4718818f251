"""The five proofs, put to a stitched model: to itself in the type of its own weights, or, if it is large, to a shrunk copy of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch

from brim.proofs.shrinking import shrink
from brim.proofs.verify import verify
from brim.proofs.weights import draw
from brim.stitching.config import StitchedConfig
from brim.stitching.model import StitchedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.records import Verification
    from brim.workload.words import Precision

_WORDS: Final[Mapping[torch.dtype, Precision]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LARGEST: Final = 300_000_000
"""Parameters of a model that is run itself. Its code is the same in a shrunk copy, and seconds are enough for that."""


def prove(model: Any) -> Verification:
    """Whether it is right at every batch size."""
    precision = _WORDS.get(model.dtype, "fp32")
    shrunk = shrink(model.config.to_dict()) if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST else None
    if shrunk is None or not shrunk.words:
        return verify(model, precision=precision)
    small = StitchedModel(StitchedConfig(**shrunk.config))
    draw(small)
    return dataclasses.replace(verify(small, precision=precision), weights="fresh", shrunk=shrunk.words)
