"""What more GPUs, and a larger batch, would do: the curve of a plan on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from brim.record import STRICT, Bytes, Count, PositiveInt, Seconds

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One kind of link between GPUs."""

    __pydantic_config__ = STRICT

    name: str
    """`nvlink`, `infinity-fabric`, `pcie` inside a node; between nodes as `--link` names it: `infiniband-ndr*8`."""
    bytes_per_second: Positive
    """As it is reached, one direction: of one GPU inside a node, of a whole node between nodes."""
    hop_seconds: Seconds
    """From one rank of a ring to the next."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The same step on so many GPUs: the same effective batch, the same structure, the fastest slices of it that fit."""

    __pydantic_config__ = STRICT

    gpus: PositiveInt
    """Over all nodes."""
    nodes: PositiveInt
    fits: bool
    """Where it does not, the figures are those of the smallest slices, and efficiency is None."""
    micro_batch: PositiveInt
    """The largest slice."""
    accumulation: PositiveInt
    idle_gpus: Count = 0
    """GPUs without a sequence, where there are more of them than sequences in the batch."""
    device_bytes: Bytes
    """Per GPU, at the peak, as nvidia-smi shows it; the largest of all GPUs."""
    step_seconds: Seconds
    compute_seconds: Seconds
    """Of the step: computing on the GPU that all wait for."""
    exposed_seconds: Seconds
    """Of the step: communication that nothing hides."""
    inside_seconds: Seconds
    """The link inside a node is busy for so long in a step, hidden or not."""
    between_seconds: Seconds
    """The same of the links between nodes."""
    tokens_per_second: Annotated[float, Field(ge=0)]
    efficiency: Share | None = None
    """Tokens per second and GPU, against the best of the curve."""


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """The planned GPUs with another effective batch."""

    __pydantic_config__ = STRICT

    effective_batch: PositiveInt
    step_seconds: Seconds
    tokens_per_second: Annotated[float, Field(ge=0)]
    efficiency: Share
    """Tokens per second and GPU, against the best of the curve; 1 where a larger batch makes it better than that."""
    steps: Annotated[float, Field(ge=1)] | None = None
    """Optimizer steps to the same loss, as a multiple of the fewest possible: 1 + noise scale / batch. None: the noise scale is unknown."""
    examples: Annotated[float, Field(ge=1)] | None = None
    """Sequences to the same loss, as a multiple of the fewest possible: 1 + batch / noise scale."""
    time: Positive | None = None
    """Seconds to the same loss, as a multiple of those with the planned batch."""


@dataclass(frozen=True, kw_only=True)
class BatchGuide:
    """How the effective batch could grow with the GPUs, and where that stops paying (McCandlish et al. 2018, arXiv 1812.06162)."""

    __pydantic_config__ = STRICT

    noise_scale: Positive | None
    """In sequences: the batch at which noise and signal of a gradient are equally large. None: unknown."""
    points: tuple[BatchPoint, ...]
    enough_batch: PositiveInt | None
    """The smallest of the batches here with which the planned GPUs are used for at least `Scaling.knee_share`; None: none of them is."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The curve over numbers of GPUs, its knee, and the guide to the batch."""

    __pydantic_config__ = STRICT

    inside: Wire
    between: Wire
    points: tuple[ScalePoint, ...]
    """By number of GPUs; the planned number is among them, and some beyond it."""
    reference_gpus: PositiveInt
    """The number with the most tokens per second and GPU: efficiency is against it."""
    knee_gpus: PositiveInt
    """Beyond it, an added GPU brings less than `knee_share` of what one of the reference does."""
    knee_share: Share
    batches: BatchGuide
