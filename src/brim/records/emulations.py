"""The record of `brim emulate`: one command on an emulated card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from brim.record import STRICT, Bytes, Count, PositiveInt, Record, Seconds
from brim.records.findings import Value

EmulationVerdict = Literal["fits", "out-of-memory", "failed", "interrupted", "no-torch", "no-cuda", "no-steps"]
"""`no-torch`: no process of the command imported torch. `no-cuda`: none used the card. `no-steps`: it ended before an optimizer step."""

EmulationPhase = Literal["loading", "forward", "backward", "optimizer", "evaluation", "other"]
"""`loading`: before the first call of a model. `other`: after backward or an optimizer step, until the next phase."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A note as a code with its values; views turn it into a sentence."""

    __pydantic_config__ = STRICT

    code: str
    values: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MemoryOwner:
    """A Python line and the memory that it had allocated and not freed at the peak."""

    __pydantic_config__ = STRICT

    where: str
    """`file:line` of the innermost frame outside torch; empty if the allocation has no Python frame."""
    function: str
    caller: str = ""
    """`file:line` of the innermost frame outside all installed packages; empty if that is `where`, or if there is none."""
    bytes: Bytes
    blocks: Count


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """The peak of one process on one card."""

    __pydantic_config__ = STRICT

    rank: Count
    device: Count
    pid: Count
    peak_allocated_bytes: Bytes
    """As `torch.cuda.max_memory_allocated` reports it, over the whole run."""
    peak_reserved_bytes: Bytes
    """As `torch.cuda.max_memory_reserved` reports it, over the whole run."""
    peak_device_bytes: Bytes
    """Peak memory of this process on the card: torch's segments, communicators and the CUDA context."""
    peak_step: Count
    """The optimizer step, counted from 1, in which allocated memory peaked; 0: before the first call of a model."""
    peak_phase: EmulationPhase
    owners: tuple[MemoryOwner, ...] = ()
    """Owners of the most memory at the peak, largest first."""
    unaccounted_bytes: Bytes = 0
    """Allocated at the peak and not in `owners`: smaller owners, and blocks that are older than the recorded history."""
    retries: Count = 0
    """How often the allocator had to release its cache to serve a request (`num_alloc_retries`)."""
    out_of_memory_errors: Count = 0


@dataclass(frozen=True, kw_only=True)
class SeenShape:
    """Micro-batches of one shape."""

    __pydantic_config__ = STRICT

    mode: Literal["training", "evaluation"]
    rows: Count
    length: Count | None
    count: PositiveInt


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A request that the card could not serve."""

    __pydantic_config__ = STRICT

    rank: Count
    device: Count
    step: PositiveInt
    phase: EmulationPhase
    asked_bytes: Bytes
    free_bytes: Bytes
    """Free memory of the card at that moment."""
    where: str = ""
    """`file:line` of the innermost frame outside torch."""


@dataclass(frozen=True, kw_only=True)
class CardFit:
    """Whether a card of the catalogue holds the measured peak."""

    __pydantic_config__ = STRICT

    gpu: str
    usable_bytes: Bytes
    holds: bool
    same_capability: bool
    """Whether it has the compute capability of the emulated card. Kernels may differ on other cards: emulate those separately."""


@dataclass(frozen=True, kw_only=True)
class Emulation(Record):
    """One command, run on an emulated card."""

    schema: ClassVar[str] = "brim.emulation/1"

    command: tuple[str, ...]
    started_at: str
    """ISO 8601, with the offset from UTC."""
    seconds: Seconds
    exit_code: Count
    """Exit code of the command; 128 plus the signal's number if a signal ended it."""
    verdict: EmulationVerdict
    gpu: str
    gpus: PositiveInt
    memory_bytes: Bytes
    """Capacity of each card."""
    context_bytes: Bytes
    """Assumed size of the CUDA context of each process."""
    compute: bool = False
    """Whether floating-point operators were computed on the host."""
    steps: Count
    """Completed optimizer steps."""
    steps_requested: PositiveInt | None = None
    """The limit of `--steps`; None with `--full`."""
    stopped: bool = False
    """Whether the command was stopped after that many steps."""
    reached: tuple[Literal["evaluation", "saving"], ...] = ()
    """Activities that were reached after the first optimizer step."""
    longest_sequence: PositiveInt | None = None
    """Longest sequence of the training micro-batches."""
    world_size: PositiveInt = 1
    devices: tuple[DevicePeak, ...] = ()
    shapes: tuple[SeenShape, ...] = ()
    """Shapes of all ranks, most frequent first. The count of a shape is that of the rank that had it most often."""
    out_of_memory: tuple[OutOfMemory, ...] = ()
    """Ordered by rank, then by time; processes that such an error ended come last."""
    error: str | None = None
    """The exception that ended the command."""
    unsupported: str | None = None
    """The feature that the command needs and that is not emulated: `cuSOLVER`, `torch.compile`."""
    cards: tuple[CardFit, ...] = ()
    uncomputed: tuple[str, ...] = ()
    """With `compute`: operators with floating-point results that were not computed."""
    written: tuple[str, ...] = ()
    """Files that the command wrote or changed. The copies in the shadow folder are deleted at the end."""
    versions: dict[str, str] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()

    @property
    def peak_device_bytes(self) -> int:
        """The highest peak of all processes."""
        return max((device.peak_device_bytes for device in self.devices), default=0)
