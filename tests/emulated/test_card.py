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
