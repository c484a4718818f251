"""The card itself: what it reports, its memory, and what programs may do to it."""

from __future__ import annotations

import pytest
from tests.emulated.conftest import RunOnCard

from brim.emulator.build import torch_build
from brim.emulator.card import check_capability, emulated_card
from brim.errors import UnsupportedError, UsageError
from brim.machine.capability import multiprocessor
from brim.machine.catalogue import find_gpu
from brim.sizes import GIB


@pytest.mark.parametrize("name", ["t4", "rtx-3080", "rtx-4090", "a100"])
def test_torch_sees_the_card_of_the_catalogue(on_card: RunOnCard, name: str) -> None:
    gpu = find_gpu(name).gpu
    seen = on_card(
        """
        import torch
        p = torch.cuda.get_device_properties(0)
        result = [p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory, p.max_threads_per_multi_processor, torch.cuda.mem_get_info()[1]]
        """,
        name,
    ).result
    assert gpu.sm is not None
    assert seen == [
        gpu.driver_names[0], list(gpu.sm), gpu.multiprocessors, gpu.usable_bytes, multiprocessor(gpu.sm).threads, gpu.usable_bytes
    ]  # fmt: skip


def test_allocation_fails_at_the_capacity(on_card: RunOnCard) -> None:
    seen = on_card(
        """
        import torch
        blocks, message = [], ""
        try:
            while True:
                blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            message = str(error)
        result = [len(blocks), message]
        """,
        memory="2GiB",
    ).result
    assert seen[0] == (2048 - 256) // 64
    assert "GPU 0 has a total capacity of 2.00 GiB" in seen[1]


def test_a_card_of_which_only_the_memory_is_known() -> None:
    card = emulated_card("24GiB*2")
    assert (card.count, card.memory_bytes, card.capability) == (2, 24 * GIB, (8, 6))
    assert "8.6" in card.assumption


def test_cards_that_cannot_be_emulated_are_refused() -> None:
    torch = torch_build()
    with pytest.raises(UnsupportedError, match="no kernels for NVIDIA Tesla P100.*it supports .*8\\.0"):
        check_capability(emulated_card("p100"), torch)
    with pytest.raises(UnsupportedError, match="not an NVIDIA GPU"):
        emulated_card("mi250x")
    with pytest.raises(UsageError, match="too small"):
        emulated_card("t4", memory_bytes=1 << 20)
    with pytest.raises(UsageError, match="at most"):
        emulated_card("t4", count=99)


def test_occupancy_follows_the_published_formula(on_card: RunOnCard) -> None:
    """Checked by hand against NVIDIA's occupancy calculator: registers and shared memory come from the kernel's own image."""
    seen = on_card(
        """
        import ctypes, torch
        torch.cuda.init()
        card = ctypes.CDLL(None)

        class Kernel(ctypes.Structure):
            _fields_ = [(name, ctypes.c_int) for name in ("registers", "static_shared", "dynamic_shared", "max_threads", "local", "constant", "arch")]

        def blocks(registers, shared, threads, dynamic=0):
            return card.occupancy(ctypes.byref(Kernel(registers, shared, 0, 1024, 0, 0, 86)), threads, ctypes.c_size_t(dynamic))

        result = [blocks(32, 0, 256), blocks(40, 0, 256), blocks(64, 0, 256), blocks(65, 0, 256), blocks(255, 0, 256), blocks(128, 0, 1024),
                  blocks(16, 0, 32), blocks(32, 0, 1024), blocks(16, 20 << 10, 64), blocks(16, 0, 64, 99 << 10), blocks(16, 0, 64, 100 << 10)]
        """,
        "rtx-3090",
    ).result
    assert seen == [6, 6, 4, 3, 1, 0, 16, 1, 4, 1, 0]


def test_triton_kernels_load_and_launch_and_report_their_resources(on_card: RunOnCard) -> None:
    pytest.importorskip("triton")
    seen = on_card(
        """
        import re, subprocess, tempfile, torch, triton, triton.backends.nvidia
        import triton.language as tl
        from pathlib import Path

        @triton.jit
        def softmax(x, y, n: tl.constexpr):
            row = tl.load(x + tl.program_id(0) * n + tl.arange(0, n))
            e = tl.exp(row - tl.max(row, 0))
            tl.store(y + tl.program_id(0) * n + tl.arange(0, n), e / tl.sum(e, 0))

        x = torch.ones(64, 4096, device="cuda")
        kernel = softmax[(64,)](x, torch.empty_like(x), 4096)
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        result = [kernel.n_regs, int(re.search(r"REG:(\\d+)", usage)[1]), kernel.n_spills, kernel.metadata.shared]
        """,
        "rtx-3090",
    ).result
    assert seen[0] == seen[1] > 8
