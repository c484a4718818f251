"""Whether the chunked loss is the loss of this model: asked before the first step, on two short rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from brim.errors import UnsupportedError
from brim.locale import _
from brim.memory.tracing.losses import use_chunked_loss

if TYPE_CHECKING:
    from torch import nn

_TOKENS: Final = 8
_LOOKED_AT: Final = 4
_EXACT: Final = 1e-3
_HALF: Final = 0.1
"""Shares of the gradient. A head that scales its logits is off by far more; half precision rounds by less."""


def use_proven_chunks(model: nn.Module, inner: Any) -> None:
    """Switch to the chunked loss, once its gradient was found to be that of the model's own. `inner` is the model without peft's wrapper.

    A model may scale its logits, or add to its loss, between its head and its end. Losses alone would not tell: a model that has learned
    nothing gives every token the same chance, however its logits are scaled.
    """
    parameters = _small_ones(model)
    batch = _batch(inner.config.get_text_config().vocab_size, next(inner.parameters()).device)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        theirs = _gradient(model, batch, parameters)
        use_chunked_loss(model, measures=False)
        ours = _gradient(model, batch, parameters)
    finally:
        for module in was_training:
            module.training = True
    is_half = any(parameter.dtype in {torch.bfloat16, torch.float16} for parameter in inner.parameters())
    miss = max(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in zip(ours, theirs, strict=True))
    if not miss <= (_HALF if is_half else _EXACT):
        raise UnsupportedError(
            _("--loss chunked is not the loss of this model: its gradient misses by {miss:.1%}.").format(miss=miss),
            hint=_("Take --loss standard."),
        )


def _small_ones(model: nn.Module) -> list[nn.Parameter]:
    """Of those that train; adapters in pairs, for one of two factors begins without a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sorted(trained[-2 * _LOOKED_AT :], key=torch.numel)[:_LOOKED_AT]


def _batch(vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    tokens = torch.arange(2 * _TOKENS, device=device).remainder(max(2, vocabulary)).reshape(2, _TOKENS)
    labels = tokens.clone()
    labels[0, : _TOKENS // 2] = -100
    return {"input_ids": tokens, "labels": labels}


def _gradient(model: Any, batch: dict[str, torch.Tensor], parameters: list[nn.Parameter]) -> tuple[torch.Tensor, torch.Tensor]:
    """And the loss."""
    loss = model(**batch).loss
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    flat = [torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(parameters, found, strict=True)]
    return torch.cat([gradient.detach().float().flatten() for gradient in flat]), loss.detach().float()
