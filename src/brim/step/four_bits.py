"""bitsandbytes' 4-bit layers, kept as they can be trained.

On a CPU with AVX-512 BF16 a 4-bit layer that is called in evaluation mode without gradients packs its weights anew for inference, for
good (bitsandbytes 0.50, `nn/modules.py`, `Linear4bit.forward`). The product with packed weights has no backward: from then on the layers
below get no gradient, and but for a warning training goes on. So one evaluation would end what QLoRA learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

_PACKS: Final = "support_avx512bf16_for_cpu"


def keep_trainable(model: nn.Module) -> None:
    """Weights of 4-bit layers are not packed for inference, in whatever mode they are called. Other models are left as they are."""
    for module in model.modules():
        if getattr(module, _PACKS, False):
            setattr(module, _PACKS, False)
