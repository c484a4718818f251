"""What joins two pieces of different width, or of the same.

Every adapter begins as the same map: the first coordinates, as many as both widths have, are passed on, and what is left over is zero.
Where the widths are equal that is the identity, so that a stitch begins as what its donors are and not as noise. From there

    identity   stays what it is, and has no parameters
    linear     is a matrix of its own with a bias: the rectangular identity, and zeros
    low-rank   adds a product of two thin matrices: the first random, the second zero
    mlp        adds two layers with a GELU between them: the first random, the second zero
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization

if TYPE_CHECKING:
    from collections.abc import Mapping

LEAST_RANK: Final = 8
_RANK_SHARE: Final = 8


def default_rank(incoming: int, outgoing: int) -> int:
    """An eighth of the smaller width, and 8 at least."""
    return min(incoming, outgoing, max(LEAST_RANK, min(incoming, outgoing) // _RANK_SHARE))


def fitted(hidden: Tensor, width: int) -> Tensor:
    """The rectangular identity: cut to `width` coordinates, or filled up with zeros."""
    missing = width - hidden.shape[-1]
    return hidden[..., :width] if missing <= 0 else functional.pad(hidden, (0, missing))


class AdapterModule(nn.Module):
    """The base of all adapters: it knows how it begins."""

    def reset(self) -> None:
        """Set the parameters to their first values; those that were loaded from a file stay."""


class IdentityAdapter(AdapterModule):
    """Nothing at all."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Give back what came."""
        return hidden


class LinearAdapter(AdapterModule):
    """One matrix and a bias."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.projection = nn.Linear(incoming, outgoing)

    def reset(self) -> None:
        """The rectangular identity."""
        initialization.eye_(self.projection.weight)
        initialization.zeros_(self.projection.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project it."""
        projected: Tensor = self.projection(hidden)
        return projected


class _UpdateAdapter(AdapterModule):
    """The rectangular identity plus something that begins as zero."""

    def __init__(self, incoming: int, between: int, outgoing: int, *, bias: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.down = nn.Linear(incoming, between, bias=bias)
        self.up = nn.Linear(between, outgoing, bias=bias)

    def reset(self) -> None:
        """Random in, zero out: the first step moves `up`, and the ones after it both."""
        initialization.normal_(self.down.weight, std=1 / math.sqrt(self.down.in_features))
        initialization.zeros_(self.up.weight)
        for layer in (self.down, self.up):
            if layer.bias is not None:
                initialization.zeros_(layer.bias)


class LowRankAdapter(_UpdateAdapter):
    """The rectangular identity plus a matrix of low rank."""

    def __init__(self, incoming: int, outgoing: int, rank: int) -> None:
        super().__init__(incoming, rank, outgoing, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Pass it on and add the update."""
        update: Tensor = self.up(self.down(hidden))
        return fitted(hidden, self.outgoing) + update


class MlpAdapter(_UpdateAdapter):
    """The rectangular identity plus a small network."""

    def __init__(self, incoming: int, outgoing: int, width: int) -> None:
        super().__init__(incoming, width, outgoing, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Pass it on and add what the network says."""
        update: Tensor = self.up(functional.gelu(self.down(hidden)))
        return fitted(hidden, self.outgoing) + update


def build_adapter(facts: Mapping[str, Any]) -> AdapterModule:
    """The adapter that the config of a stitched model describes."""
    incoming, outgoing = int(facts["from"]), int(facts["to"])
    kind = facts["kind"]
    if kind == "identity":
        return IdentityAdapter()
    if kind == "linear":
        return LinearAdapter(incoming, outgoing)
    if kind == "low-rank":
        return LowRankAdapter(incoming, outgoing, int(facts["rank"]))
    assert kind == "mlp", kind
    return MlpAdapter(incoming, outgoing, int(facts["width"]))
