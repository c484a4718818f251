"""Limits of NVIDIA multiprocessors by compute capability, and the size of a CUDA context.

The limits are those that occupancy depends on, from the table "Technical Specifications per Compute Capability" of the CUDA C++ Programming
Guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from brim.sizes import KIB, MIB

CONTEXT_BYTES: Final = 430 * MIB
"""Memory of the CUDA context of a process, with lazy loading of kernels (CUDA >= 11.7). Reported: 287,047,680 bytes with one small tensor
(pytorch#86509), 300-400 MB (pytorch#107667, #109888), 426 MiB on an RTX 6000 Ada with torch 2.10 and CUDA 13 (unsloth-zoo#1053). A context
grows as kernels are loaded, so this is the upper end. nvidia-smi includes it; torch's counters do not."""


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of one streaming multiprocessor (SM)."""

    threads: int
    """Maximum of resident threads."""
    blocks: int
    """Maximum of resident blocks."""
    shared_bytes: int
    """Shared memory of the SM."""
    block_shared_bytes: int
    """Maximum shared memory of one block, if the kernel opts in to more than 48 KiB."""
    shared_unit_bytes: int
    """Granularity in which shared memory is allocated to blocks."""
    reserved_shared_bytes: int
    """Shared memory that the system reserves for each block."""
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
    """The limits of a compute capability such as (7, 5). One that is not in the table gets those of the nearest older one."""
    older = [known for known in _TABLE if known <= capability]
    return _TABLE[max(older)] if older else _TABLE[min(_TABLE)]
