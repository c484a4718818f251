"""Memory that no tensor of the step holds: constants with their sources, in one place.

Inside the caching allocator: cuBLAS's workspaces, which torch allocates for each pair of handle and stream and never frees. Forward makes
the first; backward runs on a thread of its own with a handle of its own and makes the second. Outside of it: the CUDA context, which
holds the driver's state and the code of every kernel that was loaded, and NCCL's buffers. torch's counters do not show those;
nvidia-smi does.
"""

from __future__ import annotations

from dataclasses import dataclass

from brim.machine.capability import CONTEXT_BYTES
from brim.memory.scratch import Card

MIB = 1 << 20

CUBLAS_WORKSPACE_BYTES = 8_519_680
"""`CUBLAS_WORKSPACE_CONFIG` defaults to :4096:2:16:8 = 2 x 4 MiB + 8 x 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp); seen as requests
of just this size in the recorded traces."""

CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB
"""sm90 (same file); sm100 and sm120 since pytorch#175344, February 2026."""

PROCESS_BYTES = 4 * MIB
PROCESS_HALF_BYTES = 12 * MIB
"""CPU: by how much a process that trains grows besides its tensors after one forward and backward: the heap of Python and torch, and in
half precision what oneDNN compiles for new shapes (each kernel maps 256 KiB and touches 4). Measured by `VmData`: docs/log.md."""

WORKSPACES_FORWARD = 1
WORKSPACES_TRAINING = 2

CONTEXT_EAGER_BYTES = 666_632_192
"""With eager loading (pytorch#86509); kept for `CUDA_MODULE_LOADING=EAGER`."""

NCCL_PAIR_BYTES = 544 * 10**6
NCCL_GROUP_BYTES = 688 * 10**6
"""One communicator of two ranks, or of more, on four A100 with NVLink (nccl#964); linear in channels, so other machines differ."""


def process_bytes(precision: str) -> int:
    """What a process that trains on the CPU may take besides tensors, on top of its memory limit."""
    return PROCESS_BYTES if precision == "fp32" else PROCESS_HALF_BYTES


@dataclass(frozen=True)
class Outside:
    """What a training process on one GPU holds besides its tensors."""

    workspace_bytes: int
    """One cuBLAS workspace: a request to the caching allocator."""
    workspaces: int
    context_bytes: int
    communication_bytes: int
    card: Card
    """The properties that decide how much scratch memory kernels need."""

    @property
    def device_bytes(self) -> int:
        """What comes on top of reserved bytes to give what nvidia-smi shows."""
        return self.context_bytes + self.communication_bytes


def outside(
    compute_capability: tuple[int, int], *, multiprocessors: int | None = None, gpus: int = 1, training: bool = True
) -> Outside:
    """The constants for a GPU of this compute capability, in a process group of this size."""
    is_large = compute_capability >= (9, 0)
    return Outside(
        workspace_bytes=CUBLAS_WORKSPACE_HOPPER_BYTES if is_large else CUBLAS_WORKSPACE_BYTES,
        workspaces=WORKSPACES_TRAINING if training else WORKSPACES_FORWARD,
        context_bytes=CONTEXT_BYTES,
        communication_bytes=0 if gpus == 1 else NCCL_PAIR_BYTES if gpus == 2 else NCCL_GROUP_BYTES,
        card=Card.of(compute_capability, multiprocessors),
    )
