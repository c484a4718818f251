"""Whether this processor multiplies at half precision: asked in a child process, for one that cannot kills who asks."""

from __future__ import annotations

from functools import cache

from brim.machine.budget import run


@cache
def check_halves(dtype: str) -> None:
    """Raises `ChildError`, with what the signal means, if a small product and a small attention of this type end the process."""
    run(_multiply, dtype, preload=("torch",)).unwrap()


def _multiply(dtype: str) -> bool:
    import torch

    kind = getattr(torch, dtype)
    matrix = torch.ones(256, 256, dtype=kind)
    heads = torch.ones(1, 2, 32, 16, dtype=kind)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return bool((matrix @ matrix).isfinite().all()) and bool(attended.isfinite().all())
