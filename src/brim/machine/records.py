"""Where to train: one GPU model's facts (`GPU`), one device that is there (`Accelerator`), the `Host`, and the `Machine`.

The same record describes the machine that brim runs on, a machine from the catalogue that nobody has rented yet, and a machine
that was recorded elsewhere; `origin` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from brim.printing import Printable
from brim.record import STRICT, Bytes, Record

Backend = Literal["cuda", "rocm", "mps", "xpu", "npu", "cpu"]
Number = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
"""A number format that the arithmetic units multiply in."""


@dataclass(frozen=True, kw_only=True)
class GPU(Printable):
    """The facts of one device model, from the catalogue or as far as a device tells them itself."""

    __pydantic_config__ = STRICT

    name: str
    """Catalogue name, lower case, with the memory where there are variants: `rtx-3080-20gb`."""
    label: str
    """As a person writes it: `NVIDIA GeForce RTX 3080 20GB`."""
    vendor: Literal["nvidia", "amd", "apple", "intel", "unknown"]
    backend: Backend
    memory_bytes: Bytes
    """Nominal memory, as sold."""
    usable_bytes: Bytes
    """What a program can take on an otherwise idle device, before its own context."""
    usable_is_measured: bool = False
    """Whether `usable_bytes` was read off a real device; else it is a rule of thumb."""
    compute_capability: str | None = None
    """NVIDIA: `7.5`. None elsewhere."""
    multiprocessors: Annotated[int, Field(ge=1)] | None = None
    """NVIDIA: streaming multiprocessors. None elsewhere, and where it is not known."""
    architecture: str | None = None
    """AMD and Apple: `gfx90a`, `apple-m2`."""
    dense_flops: dict[Number, float] = field(default_factory=dict)
    """Dense peak in operations per second, by number format; a format that the chip lacks is absent."""
    bandwidth_bytes_per_second: float | None = None
    host_link: str | None = None
    host_bytes_per_second: float | None = None
    """One direction."""
    peer_link: str | None = None
    """Between cards: `nvlink`, `infinity-fabric`, or None where they meet over the host."""
    peer_bytes_per_second: float | None = None
    """Per card, one direction."""
    watts: float | None = None
    bf16: bool = False
    """Native bfloat16 matrix multiplication."""
    flash_attention: bool = False
    """Flash attention kernels run natively."""
    tensor_cores: bool = False
    unified_memory: bool = False
    """The device shares the host's memory."""
    family: str = ""
    """The bare name (`rtx-3080`), which means the commonest variant."""
    commonest: bool = True
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    """The device's name as drivers report it."""
    note: str = ""

    @property
    def is_laptop(self) -> bool:
        """Whether it is soldered into a laptop, so that nobody rents or adds one."""
        return "-laptop" in self.name

    @property
    def sm(self) -> tuple[int, int] | None:
        """Compute capability as numbers: (7, 5)."""
        if self.compute_capability is None:
            return None
        major, _dot, minor = self.compute_capability.partition(".")
        return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device of a machine."""

    __pydantic_config__ = STRICT

    index: Annotated[int, Field(ge=0)]
    """Position among the devices this process may use (after CUDA_VISIBLE_DEVICES)."""
    gpu: GPU
    total_bytes: Bytes
    """What the driver says the device has."""
    free_bytes: Bytes | None = None
    """What was free when it was looked at; None on paper."""
    physical_index: int | None = None
    """Position among all devices of the host, as nvidia-smi numbers them."""
    uuid: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's side, as seen by this process: container limits and affinity included."""

    __pydantic_config__ = STRICT

    memory_bytes: Bytes
    """Memory this process could use at most: physical memory, or the container's limit if that is smaller."""
    available_bytes: Bytes
    """Of that, what is not in use now (reclaimable page cache counts as available)."""
    memory_limited_by: str = "physical memory"
    """What sets `memory_bytes`: `physical memory`, `cgroup v2 /path`, `cgroup v1 /path`, `RLIMIT_AS`, `RLIMIT_DATA`."""
    cores: Annotated[float, Field(gt=0)]
    """Cores this process may keep busy: the smaller of affinity and quota."""
    affinity_cores: Annotated[int, Field(ge=1)]
    quota_cores: float | None = None
    """CPU quota of the container; None without one."""
    physical_cores: int | None = None
    shm_bytes: Bytes | None = None
    """Size of /dev/shm, through which DataLoader workers pass their batches; None where there is none."""
    shm_free_bytes: Bytes | None = None
    swap_bytes: Bytes = 0
    swap_free_bytes: Bytes = 0
    processor: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """Where to train: a host with its accelerators, and how many such hosts."""

    schema: ClassVar[str] = "brim.machine/1"

    accelerators: tuple[Accelerator, ...] = ()
    """The devices of one node."""
    host: Host | None = None
    """None for a machine on paper whose host is not described."""
    nodes: Annotated[int, Field(ge=1)] = 1
    origin: Literal["detected", "catalogue", "recorded"] = "detected"
    notes: tuple[str, ...] = ()
    """What could not be found out, and other things a reader of the record should know."""

    @property
    def world_size(self) -> int:
        """Accelerators over all nodes; 1 for a machine that trains on its CPU."""
        return max(1, len(self.accelerators)) * self.nodes
