"""What every NVIDIA multiprocessor of a compute capability has: the table "Technical Specifications per Compute Capability" of the
CUDA C++ Programming Guide, as far as occupancy depends on it. And what the CUDA context of a process takes of any card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from brim.sizes import KIB, MIB

CONTEXT_BYTES: Final = 430 * MIB
"""Of a process, with lazy loading of kernels (CUDA >= 11.7): 287,047,680 bytes with one small tensor (pytorch#86509), 300-400 MB
(pytorch#107667, #109888), 426 MiB on an RTX 6000 Ada with torch 2.10 and CUDA 13 (unsloth-zoo#1053). It grows as kernels are loaded, so the
upper end. torch's counters do not show it; nvidia-smi does."""


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of one streaming multiprocessor (SM)."""

    threads: int
    """Resident threads at most."""
    blocks: int
    """Resident blocks at most."""
    shared_bytes: int
    """Shared memory of the SM."""
    block_shared_bytes: int
    """Shared memory that one block may have, when the kernel opts in to more than 48 KiB."""
    shared_unit_bytes: int
    """Granularity in which shared memory is given to blocks."""
    reserved_shared_bytes: int
    """Shared memory that the system takes for each block."""
    registers: int = 65536
    """32-bit registers."""


def _sm(threads: int, blocks: int, shared_kib: int, block_shared_kib: int, *, ampere: bool) -> Multiprocessor:
    return Multiprocessor(
        threads=threads, blocks=blocks, shared_bytes=shared_kib * KIB, block_shared_bytes=block_shared_kib * KIB,
        shared_unit_bytes=128 if ampere else 256, reserved_shared_bytes=KIB if ampere else 0,
    )  # fmt: skip


_TABLE: Final = {
    (6, 0): _sm(2048, 32, 64, 48, ampere=False),
    (6, 1): _sm(2048, 32, 96, 48, ampere=False),
    (7, 0): _sm(2048, 32, 96, 96, ampere=False),
    (7, 5): _sm(1024, 16, 64, 64, ampere=False),
    (8, 0): _sm(2048, 32, 164, 163, ampere=True),
    (8, 6): _sm(1536, 16, 100, 99, ampere=True),
    (8, 7): _sm(1536, 16, 164, 163, ampere=True),
    (8, 9): _sm(1536, 24, 100, 99, ampere=True),
    (9, 0): _sm(2048, 32, 228, 227, ampere=True),
    (10, 0): _sm(2048, 32, 228, 227, ampere=True),
    (10, 3): _sm(2048, 32, 228, 227, ampere=True),
    (11, 0): _sm(1536, 24, 228, 227, ampere=True),
    (12, 0): _sm(1536, 24, 100, 99, ampere=True),
    (12, 1): _sm(1536, 24, 100, 99, ampere=True),
}


def multiprocessor(capability: tuple[int, int]) -> Multiprocessor:
    """The SM of a compute capability such as (7, 5); of the nearest older one for a capability that is not in the table."""
    older = [known for known in _TABLE if known <= capability]
    return _TABLE[max(older)] if older else _TABLE[min(_TABLE)]
