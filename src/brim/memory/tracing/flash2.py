"""The package flash-attention 2, as transformers calls it, on tensors without memory.

Queries, keys and values stand in the order [batch, length, heads, size]. Without padding the kernel takes them as they are. With padding,
the real tokens of all sequences are gathered into one row (three copies), and the output is scattered back (a fourth); every token counts
as real here, which is the most there can be. The kernel saves its inputs, its output and the logarithm of the row sums, and needs the
same scratch in backward as torch's own flash attention, which is the same kernel (transformers/modeling_flash_attention_utils.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from brim.errors import UnsupportedError
from brim.locale import _
from brim.memory.tracing.kernels import HALF, CudaFlash

if TYPE_CHECKING:
    from torch import nn

NAME = "brim_flash_attention_2"
"""Contains "flash": transformers then prepares the two-dimensional mask that the package wants."""


def use_flash2(model: Any, half: torch.dtype) -> None:
    """Let a built model attend through `flash2`, whether the package is installed or not.

    The kernel knows half precision only: what reaches it in float32 (from the norms of a prepared model) is cast to `half`.
    """
    if not getattr(model, "_supports_flash_attn", False):
        text = _("{model} has no flash-attention 2 in transformers.").format(model=type(model).__name__)
        raise UnsupportedError(text, hint=_("Take --attention sdpa or --attention eager."))
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, partial(flash2, half=half))
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = NAME


def flash2(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    half: torch.dtype,
    **_rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over [batch, heads, length, size]; the result is [batch, length, heads, size]."""
    size = value.shape[-1]
    causal = bool(getattr(module, "is_causal", True))
    casts = half if query.dtype not in HALF else query.dtype
    query, key, value = (_padded_head(tensor.to(casts), query.shape[-1]) for tensor in (query, key, value))
    if attention_mask is None:
        attended: torch.Tensor = CudaFlash.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
        return attended.transpose(1, 2)[..., :size], None
    indices = attention_mask.flatten().nonzero().flatten()
    packed = [tensor.transpose(1, 2).flatten(0, 1)[indices] for tensor in (query, key, value)]
    in_row = [tensor.unsqueeze(0).transpose(1, 2) for tensor in packed]
    attended = CudaFlash.apply(*in_row, causal, query.shape[0])  # type: ignore[no-untyped-call]
    row = attended.transpose(1, 2).squeeze(0)
    batch, _heads, length, _size = query.shape
    padded = row.new_zeros(batch * length, *row.shape[1:]).index_put((indices,), row)
    return padded.view(batch, length, *row.shape[1:])[..., :size], None


def _padded_head(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Values with smaller heads than the queries' are filled up."""
    missing = size - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, [0, missing]) if missing > 0 else tensor
