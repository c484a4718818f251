"""What DataLoader workers cost a host: the numbers that planning and measuring share."""

from __future__ import annotations

from typing import Final

from brim.sizes import GIB, MIB

WORKER_BYTES: Final = 512 * MIB
"""One DataLoader worker. A fresh process (spawn; forkserver, the default on Linux since Python 3.14) that has imported what the dataset
needs: 442 MiB measured, 0.4 GiB in metatrain#1229, and room for a tokenizer. A forked one starts at 28 MiB and grows towards the same, as
reading Python objects copies their pages (pytorch#13246)."""

RESERVE_BYTES: Final = GIB
RESERVE_SHARE: Final = 20
"""Kept free: 1 GiB, or a twentieth of what is available where that is more. A choice: the desktop, the page cache, a checkpoint on its way
to disk."""

WORKERS_PER_CORE: Final = 2
PREFETCH: Final = 2
"""torch's default: one batch waits while the next is made."""

PINNED_FACTOR: Final = 2
"""torch's pinned allocator rounds every tensor up to a power of two (pytorch#95823): less than twice its bytes."""


def reserve_bytes(available_bytes: int) -> int:
    """What stays free of the host's memory, whatever is planned."""
    return max(RESERVE_BYTES, available_bytes // RESERVE_SHARE)
