"""Fresh weights in which every part has a say.

A class draws its weights small, so that training starts calmly; then attention is almost even, and what should not be seen hardly shows.
Here matrices keep the size of what goes through them, and what begins as zero (biases, gates, the second factor of LoRA) does not.
"""

from __future__ import annotations

import torch
from torch import nn

_SMALL = 0.08
"""A matrix whose numbers are spread less than this around zero is one that a class draws at random."""
_NOISE = 0.05


def draw(model: nn.Module, seed: int = 0) -> None:
    """Draw the weights anew, in place; what a class sets to particular values stays near them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        values = parameter.detach().float().cpu()
        noise = torch.randn(values.shape, generator=generator)
        drawn = (
            noise / values.shape[-1] ** 0.5
            if values.dim() >= 2 and float(values.abs().mean()) < _SMALL
            else values + _NOISE * noise
        )
        with torch.no_grad():
            parameter.copy_(drawn.to(parameter.dtype))
