"""How much of its data sheet a device reaches: constants with their sources, in one place. Measured figures replace them."""

from __future__ import annotations

MATMUL_SHARE = 0.9
"""Products of a training step against the best product that the card does: on an RTX 5090 a 4096 x 4096 one reaches 0.78 to 0.97 of the
best, a 2048 x 2048 one 0.73 to 0.78 (zzc0721/torch-performance-test-data#15); wide ones lie between."""

FULL_RATE_WATTS_PER_TFLOP = {
    (7, 0): 6.1,
    (7, 5): 8.6,
    (8, 0): 2.0,
    (8, 6): 3.9,
    (8, 9): 2.4,
    (9, 0): 1.4,
    (10, 0): 1.05,
    (12, 0): 3.0,
}
"""Watts of power limit per 1e12 half-precision tensor operations of the data sheet with which a chip of this compute capability would hold
its peak. With less it lowers its clock, and as power goes with the cube of the clock (voltage falls with it), it reaches the cube root of
the share of the power that it would need. One measured card a line: V100S 89 of 130 TFLOP/s, RTX A6000 122 of 155, L40S 267 of 362,
H100 SXM 760 to 790 of 989, B200 1630 to 1700 of 2250, RTX PRO 6000 315 (fp16) to 418 (bf16) of 504
(zzc0721/torch-performance-test-data, database.md), A100 SXM 268 to 271 of 312 (stas00/ml-engineering, compute/accelerator, MAMF table).
T4: 24 of 65 when it goes on (forums.developer.nvidia.com/t/264462), 42 in bursts (database.md); taken as 32, since a step is not all
products. Cards that were not used for it: A100 PCIe 253 to 256 measured, 244 by this; RTX 4090 159 to 173, 165; RTX 3090 76, 71;
RTX 5090 224 to 242, 203; H20 142, 148. No measurement of an A10 or an L4 was found."""

AMD_MATMUL_SHARE = 0.7
"""The best product of an AMD card against its data sheet: MI300X 782 of 1300, MI250X 147 of 192 (stas00/ml-engineering, MAMF table)."""

PLAIN_FLOPS_SHARE = 0.7
"""Of the float32 peak, where no tensor cores work: median of 14 chips in zzc0721/torch-performance-test-data, database.md; 0.5 to 0.7 where
the peak counts two float32 units a lane (RTX 30, 40, 50, L40S) and on the T4, 0.8 to 0.98 on V100 and A100."""

ATTENTION_SHARE = 0.55
"""Of the rate of large products, fused attention. FlashAttention-2 reaches 0.50 to 0.73 of an A100's peak, the less the shorter the
sequences (arXiv 2307.08691), but 0.35 of an H100's, where products reach 0.8 (arXiv 2407.08608); PyTorch's memory-efficient kernel 80
TFLOP/s forward on an RTX 4090 (DefTruth/faster-prefill-attention, release 0.0.1). Chosen among these."""

BANDWIDTH_SHARE = 0.80
"""Of the memory's peak, kernels that only move bytes. Copies on T4 0.75, A100 0.74 to 0.89, RTX 4090 0.91, H100 NVL 0.78 (BabelStream's
triad 0.84): T4 and the lower A100 from router-gao/cuda-demo, 02-cuda-bandwidth.md; the others from printed outputs without a name."""

KERNEL_SECONDS = 2.5e-6
"""Start and end of one kernel on the device. No source found; chosen."""

LAUNCH_SECONDS = 8.0e-6
"""What the host needs from one operator of eager PyTorch to the next, autograd included: a stream of smaller kernels waits for it. 5 to 25
microseconds are given for an operator called from Python (jiahuanglin.xyz, From PyTorch op to kernel launch); more than half of those of a
training step come from backward, without Python. Chosen in the lower half."""

STEP_OVERHEAD_SECONDS = 2.0e-3
"""Per micro-batch: Python of the loop, the batch to the device, the scalar that is read back. No source found; chosen."""

INT8_OVER_HALF = 0.6
"""bitsandbytes' int8 products against half-precision ones: the outliers are computed apart. Slower up to models of 13B, faster only beyond
(arXiv 2208.07339); whole models of 0.15B and 0.5B take 2.5 times as long on a T4 (earino.github.io/applied-deep-learning, blog 11).
Chosen for models of some billion parameters."""

LINK_SHARE = 0.75
"""Of a link's peak, NCCL's rings or copies from pinned memory. NVLink: 370 of 450 GB/s on H100 (a maintainer in NVIDIA/nccl-tests#212),
about 200 of 300 among eight A100 (#149), 116 of 300 between two bridged H100 PCIe (#194). PCIe 3.0 x16, pinned: 9.6 to 13.2 of 15.75
(router-gao/cuda-demo, 02-cuda-bandwidth.md); GeForce cards in one node 24 of 31.5 as NCCL itself counts on (nccl-tests#307)."""

CALL_SECONDS = 8.4e-6
"""Of one collective call, whatever it moves: what NCCL's own model takes for a ring (NVIDIA/nccl, src/graph/tuning.cc, `baseLat`)."""

RING_HOP_SECONDS = {"nvlink": 3.4e-6, "infinity-fabric": 3.4e-6, "pcie": 5.7e-6}
"""From one rank of a ring to the next inside a node (the same file, `hwLat`, ring, Simple). It agrees with 8 bytes in 42 microseconds
among eight RTX 4090 (NVIDIA/nccl#1530) and 11.5 between two (tinygrad/open-gpu-kernel-modules#17). AMD's links as NVLink: a guess."""

TREE_HOP_SECONDS = {"nvlink": 28.0e-6, "infinity-fabric": 28.0e-6, "pcie": 28.0e-6}
"""The same of a tree, which sums for all ranks only (the same file; a step waits for a chunk of 256 KiB)."""

NODE_HOP_SECONDS = {"rdma": 9.6e-6, "tcp": 30.0e-6}
"""Between nodes. InfiniBand and RoCE: the same file. Sockets: 8 bytes in 38 to 46 microseconds between two nodes (NVIDIA/nccl-tests#82),
the call itself not counted."""

NODE_TREE_HOP_SECONDS = {"rdma": 50.0e-6, "tcp": 70.0e-6}
"""The same of a tree. InfiniBand and RoCE: the same file. Sockets: a guess."""

NODE_LINK_SHARE = {"rdma": 0.85, "tcp": 0.5}
"""Of the peak of a node's links. InfiniBand NDR: 46 to 48 of 50 GB/s a port are expected (NVIDIA/nccl-tests#290), 231 of 400 GB/s with
eight RoCE ports (NVIDIA/nccl#2409, which calls that too little), 600 of 800 Gbit/s (NVIDIA/nccl#495). Sockets: 4 to 6 of 12.5 GB/s
(NVIDIA/nccl#450), 22 of 32 Gbit/s with eight GPUs a node (NVIDIA/nccl#209)."""

DDP_BUCKET_BYTES = 25 * 1024 * 1024
"""torch/nn/parallel/distributed.py, `_DEFAULT_BUCKET_CAP_MB`: gradients are summed in pieces of this size."""

GATHER_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `allgather_bucket_size`, which the Trainer's `auto` leaves alone; also its `reduce_bucket_size` where the width is not
known."""

OVERLAP_SHARE = 0.7
"""Of communication that can hide behind backward (DDP's buckets, FSDP's prefetch), what does. No source found; a guess."""

NODE_LINK = "100Gbit"
"""Between nodes where nothing is said, all links of a node together. A guess at the lower end of what is rented as a cluster (AWS p3dn
and Google a2-highgpu have 100 Gbit/s a node, AWS p4d 400, a DGX H100 or AWS p5 3,200): whoever has more should say so."""

DEFAULT_HOST_LINK_BYTES_PER_SECOND = 12.0e9
"""PCIe 3.0 x16 as it is reached, where a card's own link is not known; 9.6 to 13.2 measured (see `LINK_SHARE`)."""

HOST_OPTIMIZER_BYTES_PER_SECOND = 8.0e9
"""What an optimizer step on the host's cores gets through (DeepSpeed's CPU Adam), all cores together. Two Xeon 8358 need 17 to 20 s longer
for a step of a 7B with the optimizer on the host: 5 to 6 GB/s (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a; its unit read as
sequences per second); a host of 128 cores at most 2.4 s for all of a step of a 3B: more than 20 GB/s (DeepSpeed#7474). Chosen between."""

CPU_FLOPS_PER_CORE = {"fp32": 50.0e9, "half": 60.0e9, "int8": 60.0e9}
"""Products in oneDNN or MKL on one core with AVX2 or AVX-512, and in bfloat16 where the chip has it."""

CPU_BYTES_PER_SECOND_PER_CORE = ((1 << 16, 20.0e9), (1 << 22, 16.0e9), (1 << 25, 10.0e9), (1 << 27, 7.0e9))
"""Bytes of a call, and how fast they are moved: from caches, then from memory. The mean of calls that only move and calls that compute
something of every number (exp, a softmax), measured on one core of an EPYC of 2021."""

CPU_KEPT_BYTES = 32 << 20
"""glibc gives blocks from this size on back to the system when they are freed (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c)."""

CPU_NEW_PAGE_BYTES_PER_SECOND = 1.2e9
"""How fast one core gets pages of 4 KiB that are cleared first; measured on the same EPYC in a virtual machine."""

CPU_CALL_SECONDS = 15.0e-6
"""One operator of eager PyTorch on the CPU: autograd, views and the Python of the modules around it included; measured on the same."""
