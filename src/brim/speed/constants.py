"""How much of its data sheet a device reaches: constants with their sources, in one place. Measured figures replace them."""

from __future__ import annotations

MATMUL_SHARE = 0.85
"""Of the dense peak, large matrix products inside a training step, where power is no limit."""

TENSOR_FLOPS_PER_WATT = {
    (7, 0): 0.33e12,
    (7, 5): 0.40e12,
    (8, 0): 0.62e12,
    (8, 6): 0.50e12,
    (8, 9): 0.80e12,
    (9, 0): 0.95e12,
    (10, 0): 1.40e12,
    (12, 0): 0.85e12,
}
"""Half-precision tensor operations that a chip of this compute capability sustains per watt of its limit: what holds back the small
data-centre cards, whose peak is a burst."""

PLAIN_FLOPS_SHARE = 0.80
"""Of the float32 peak, where no tensor cores work."""

ATTENTION_SHARE = 0.55
"""Of the rate of large products, fused attention."""

BANDWIDTH_SHARE = 0.80
"""Of the memory's peak, kernels that only move bytes."""

KERNEL_SECONDS = 2.5e-6
"""Start and end of one kernel on the device."""

LAUNCH_SECONDS = 6.0e-6
"""What the host needs from one operator of eager PyTorch to the next, autograd included: a stream of smaller kernels waits for it."""

STEP_OVERHEAD_SECONDS = 2.0e-3
"""Per micro-batch: Python of the loop, the batch to the device, the scalar that is read back."""

INT8_OVER_HALF = 1.2
"""bitsandbytes' int8 products against half-precision ones: the outliers are computed apart."""

LINK_SHARE = 0.75
"""Of a link's peak, NCCL's rings or copies from pinned memory."""

PAIR_LATENCY_SECONDS = 20.0e-6
"""Per collective call and rank in its ring."""

OVERLAP_SHARE = 0.7
"""Of communication that can hide behind backward (DDP's buckets, FSDP's prefetch), what does."""

NODE_LINK_BYTES_PER_SECOND = 12.5e9
"""Between nodes where nothing is said: 100 Gbit/s a node."""

DEFAULT_HOST_LINK_BYTES_PER_SECOND = 12.0e9
"""PCIe 3.0 x16 as it is reached, where a card's own link is not known."""

HOST_OPTIMIZER_BYTES_PER_SECOND = 8.0e9
"""What an optimizer step on the host's cores gets through (DeepSpeed's CPU Adam), all cores of a desktop together."""

CPU_FLOPS_PER_CORE = {"fp32": 50.0e9, "half": 60.0e9, "int8": 60.0e9}
"""Products in oneDNN or MKL on one core with AVX2 or AVX-512, and in bfloat16 where the chip has it."""

CPU_BYTES_PER_SECOND_PER_CORE = ((1 << 16, 20.0e9), (1 << 22, 16.0e9), (1 << 25, 10.0e9), (1 << 27, 7.0e9))
"""Bytes of a call, and how fast they are moved: from caches, then from memory. The mean of calls that only move and calls that compute
something of every number (exp, a softmax), measured on one core of an EPYC of 2021."""

CPU_KEPT_BYTES = 32 << 20
"""glibc gives blocks from this size on back to the system when they are freed (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c)."""

CPU_NEW_PAGE_BYTES_PER_SECOND = 1.2e9
"""How fast one core gets pages of 4 KiB that are cleared first; measured on the same EPYC in a virtual machine."""

CPU_HEAP_LIMIT = 2
"""Times the size above: free memory at the end of the heap that glibc keeps (the dynamic trim threshold in malloc.c)."""

CPU_LIVE_SHARE = 0.7
"""Of what forward makes, what is kept for backward: 0.68 to 0.73 in traces of small models of four families, without checkpointing. An
upper bound for the pages that are really new: glibc fills holes, and one block that stays at the end of the heap holds all below it."""

CPU_CALL_SECONDS = 15.0e-6
"""One operator of eager PyTorch on the CPU: autograd, views and the Python of the modules around it included; measured on the same."""
