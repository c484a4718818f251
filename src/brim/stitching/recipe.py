"""What a stitched model is made of, in plain data: whose layers, in which order, and what joins them.

The first piece brings the embedding, the last one the final norm and the head. A piece may have no layers: a last piece without any is a
head alone, which is how a model goes back to the vocabulary it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from brim.workload.words import Attention, DType

AdapterKind = Literal["identity", "linear", "low-rank", "mlp"]
Vocabulary = Literal["same", "cut"]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What joins two pieces, and may change the width."""

    kind: AdapterKind = "identity"
    rank: int | None = None
    """Of `low-rank`. None: an eighth of the smaller width, and 8 at least."""
    width: int | None = None
    """Of the hidden layer of `mlp`. None: the larger of the two widths."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some layers of one donor, in the order given; the same layer may come twice."""

    donor: str
    """A key of the recipe's donors."""
    layers: tuple[int, ...]
    adapter: Adapter | None = None
    """What stands before this piece. None: nothing, so the widths must be equal."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A stitched model, before any weight is read."""

    donors: Mapping[str, str]
    """By the name that the recipe gives them: a folder, a Hub id, a catalogue name, a config.json."""
    pieces: tuple[Piece, ...]
    trains: tuple[str, ...] = ("adapters",)
    """What is not frozen: `adapters`, `embedding`, `norm`, `head`, `layers`, `all`, or the name of a donor, for its layers."""
    vocabulary: Vocabulary = "same"
    """`cut`: first and last donor have the same tokens but tables of different length, so only the shorter part is used."""
    attention: Attention | None = None
    """None: what transformers picks."""
    dtype: DType = "float32"
    name: str = "stitched"
