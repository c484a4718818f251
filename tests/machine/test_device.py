"""A device is one small object: the CPU for real, others as they were recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brim import CpuDevice, Device, ForkServer, Reading, RecordedDevice, Recorder, RecordError, Recording, TorchDevice, UsageError
from brim.machine import nvml
from brim.sizes import GIB, MIB

READINGS = (
    Reading(total_bytes=15 * GIB, free_bytes=9 * GIB, allocated_bytes=5 * GIB, reserved_bytes=6 * GIB, busy=0.9),
    Reading(total_bytes=15 * GIB, free_bytes=0, allocated_bytes=14 * GIB, reserved_bytes=15 * GIB, allocator_retries=7, busy=0.2),
)
RECORDING = Recording(device="cuda:0", label="NVIDIA T4, thrashing", readings=READINGS)


def test_a_recording_is_replayed_from_its_file(tmp_path: Path) -> None:
    device: Device = RecordedDevice.from_file(RECORDING.write(tmp_path / "t4.json"))
    assert device.name == "cuda:0"
    device.synchronize()
    assert [device.read(), device.read(), device.read()] == [*READINGS, READINGS[-1]]


def test_what_was_asked_of_a_recorded_device_is_known() -> None:
    device = RecordedDevice(RECORDING)
    device.reset_peak()
    device.give_back()
    device.read()
    assert device.calls == ["reset_peak", "give_back", "read"]


def test_a_recorder_writes_what_a_device_says(tmp_path: Path) -> None:
    recorder = Recorder(RecordedDevice(RECORDING))
    recorder.read()
    recorder.read()
    assert Recording.read(recorder.recording("again").write(tmp_path / "again.json")).readings == READINGS


def test_an_empty_or_broken_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without readings"):
        RecordedDevice(Recording(device="cuda:0", readings=()))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(RecordError):
        RecordedDevice.from_file(tmp_path / "broken.json")


def test_the_cpu_counts_what_this_process_takes() -> None:
    device: Device = CpuDevice()
    device.reset_peak()
    before = device.read()
    held = bytearray(200 * MIB)
    during = device.read()
    del held
    device.give_back()
    after = device.read()
    assert during.allocated_bytes - before.allocated_bytes > 190 * MIB
    assert after.allocated_bytes < during.allocated_bytes - 150 * MIB
    assert after.peak_allocated_bytes >= during.allocated_bytes - 8 * MIB
    assert 0 < during.free_bytes < during.total_bytes


def test_under_a_budget_the_cpu_knows_its_limit() -> None:
    with ForkServer() as server:
        outcome = server.run(_total_bytes, memory_bytes=700 * MIB)
    assert outcome.limit_bytes is not None
    assert outcome.value == outcome.limit_bytes


def _total_bytes() -> int:
    return CpuDevice().read().total_bytes


def test_a_torch_device_reads_the_allocator_through_torchs_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot run here: a stand-in with torch.cuda's own functions shows that the right ones are called."""
    import torch

    asked: list[str] = []

    def noted(name: str) -> Any:
        return lambda *_arguments: asked.append(name)

    module = SimpleNamespace(
        mem_get_info=lambda _device: (9 * GIB, 15 * GIB),
        memory_stats=lambda _device: {
            "allocated_bytes.all.current": 1, "reserved_bytes.all.current": 2,
            "allocated_bytes.all.peak": 3, "reserved_bytes.all.peak": 4, "num_alloc_retries": 5,
        },
        reset_peak_memory_stats=noted("reset"), synchronize=noted("synchronize"), empty_cache=noted("empty"),
    )  # fmt: skip
    for name in ("mem_get_info", "memory_stats", "reset_peak_memory_stats", "synchronize", "empty_cache"):
        assert callable(getattr(torch.cuda, name))
    monkeypatch.setattr(torch, "get_device_module", lambda _backend: module)
    monkeypatch.setattr(nvml, "physical_index", lambda _index: 3)
    monkeypatch.setattr(nvml, "telemetry", lambda index: nvml.Telemetry(busy=0.12, watts=float(index)))
    device = TorchDevice("cuda", 0)
    reading = device.read()
    assert device.name == "cuda:0"
    assert (reading.free_bytes, reading.total_bytes, reading.allocated_bytes, reading.reserved_bytes) == (9 * GIB, 15 * GIB, 1, 2)
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes, reading.allocator_retries) == (3, 4, 5)
    assert (reading.busy, reading.watts) == (0.12, 3.0)
    device.reset_peak()
    device.synchronize()
    device.give_back()
    assert asked == ["reset", "synchronize", "empty"]
