"""The five proofs, put to a model as it is: in the type of its own weights, so that no second copy is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from brim.proofs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from brim.records import Verification
    from brim.workload.words import Precision

_WORDS: Final[Mapping[torch.dtype, Precision]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def prove(model: Any) -> Verification:
    """Whether it is right at every batch size."""
    return verify(model, precision=_WORDS.get(model.dtype, "fp32"))
