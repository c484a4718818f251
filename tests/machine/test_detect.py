"""This machine is found out without harm; cards that are not here are stood in for by what NVML would say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from brim import ForkServer, detect
from brim.machine import detect as detection, nvml
from brim.machine.detect import TorchDeviceFacts, TorchFacts, ask_torch
from brim.sizes import GIB, MIB

CARDS = tuple(
    nvml.Card(index, name, f"GPU-{letter}000", size, size - GIB, capability, "560.35")
    for index, (name, letter, size, capability) in enumerate(
        [
            ("Tesla T4", "a", 14912 * MIB, "7.5"),
            ("NVIDIA GeForce RTX 3090", "b", 24 * GIB, "8.6"),
            ("Future X9", "c", 96 * GIB, "12.0"),
        ]
    )
)


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2]), ("0,1,2", [0, 1, 2]), ("2,0", [2, 0]), ("1", [1]), ("GPU-c000", [2]), ("GPU-b", [1]), ("", []), ("-1", []),
        ("0,9,1", [0]), ("GPU-", []), ("1,1", []), ("0, 1", [0, 1]),
    ],
)  # fmt: skip
def test_visible_devices_are_those_that_cuda_shows(wanted: str | None, indices: list[int]) -> None:
    assert [card.index for card in nvml.visible(CARDS, wanted)] == indices


def test_cards_become_accelerators_with_the_facts_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    machine = detect()
    future, t4 = machine.accelerators
    assert (t4.index, t4.physical_index, t4.uuid, t4.gpu.name) == (1, 0, "GPU-a000", "t4")
    assert not t4.gpu.bf16
    assert (future.gpu.label, future.gpu.bf16, future.gpu.dense_flops) == ("Future X9", True, {})
    assert "Not in the catalogue" in future.gpu.note
    assert machine.notes == ("CUDA_VISIBLE_DEVICES=2,0 shows 2 of 3 GPUs.",)
    assert machine.world_size == 2


def test_unlike_cards_get_a_word_on_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: CARDS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in detect().notes[0]


def test_a_card_that_refuses_questions_is_still_a_card() -> None:
    def refuse(*_arguments: Any) -> Any:
        raise RuntimeError("Not Supported")

    library = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=8 * GIB, free=7 * GIB),
        nvmlDeviceGetName=lambda _handle: b"NVIDIA GeForce RTX 3070",
        nvmlDeviceGetUUID=refuse,
        nvmlDeviceGetCudaComputeCapability=refuse,
        nvmlSystemGetDriverVersion=refuse,
    )
    card = nvml._card(library, 0)
    assert card is not None
    assert (card.name, card.uuid, card.compute_capability, card.driver) == ("NVIDIA GeForce RTX 3070", "", None, None)


def test_what_torch_finds_is_used_where_nvml_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: ())
    facts = TorchFacts(
        version="2.13.0",
        built_for="ROCm 6.4",
        backend="rocm",
        devices=(TorchDeviceFacts(name="AMD Instinct MI300X", total_bytes=191 * GIB),),
    )
    (found,) = detect(torch=facts).accelerators
    assert (found.gpu.name, found.gpu.backend) == ("mi300x", "rocm")


def test_an_apple_machine_has_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "cards", lambda: ())
    monkeypatch.setattr(detection, "_apple_name", lambda: "Apple M2 Max")
    (found,) = detect().accelerators
    assert found.gpu.backend == "mps"
    assert found.gpu.unified_memory


def test_torch_is_asked_in_a_child_for_real() -> None:
    with ForkServer() as server:
        facts, trouble = ask_torch(server)
    assert trouble == ""
    assert facts is not None
    import torch

    assert facts.version == torch.__version__
    assert (facts.backend is None) == (torch.accelerator.current_accelerator(check_available=True) is None)


def test_a_machine_without_a_driver_has_no_cards() -> None:
    if nvml._library() is not None:
        pytest.skip("this machine has an NVIDIA driver")
    assert nvml.cards() == ()
    assert nvml.physical_index(0) is None
    assert nvml.telemetry(0) == nvml.Telemetry()
