"""A device that replays what was read elsewhere: for tests, for docs, for looking at a trouble without the hardware.

    device = RecordedDevice.from_file("t4-thrashing.json")
    watch(device)          # anything that takes a Device

`Recorder` wraps a real device and writes such a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from brim.errors import UsageError
from brim.locale import _
from brim.machine.device import Device, Reading
from brim.record import Record

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Recording(Record):
    """Readings of one device in the order in which they were taken."""

    schema: ClassVar[str] = "brim.recording/1"

    device: str
    """As torch named it: `cuda:0`."""
    label: str = ""
    """What it was: `NVIDIA T4, Llama-3.2-1B, micro-batch 8`."""
    readings: tuple[Reading, ...]


class RecordedDevice:
    """Gives one recorded reading per `read`, then stays at the last."""

    def __init__(self, recording: Recording) -> None:
        if not recording.readings:
            raise UsageError(_("A recording without readings cannot stand for a device."))
        self.recording = recording
        self.calls: list[str] = []
        """What was asked of the device, in order: `read`, `reset_peak`, `synchronize`, `give_back`."""
        self._next = 0

    @classmethod
    def from_file(cls, path: str | Path) -> RecordedDevice:
        """Replay a file that `Recorder` wrote."""
        return cls(Recording.read(path))

    @property
    def name(self) -> str:
        """As torch named the device that was recorded."""
        return self.recording.device

    def read(self) -> Reading:
        """The next reading."""
        self.calls.append("read")
        reading = self.recording.readings[min(self._next, len(self.recording.readings) - 1)]
        self._next += 1
        return reading

    def reset_peak(self) -> None:
        """Noted; what was recorded stays as it was."""
        self.calls.append("reset_peak")

    def synchronize(self) -> None:
        """Noted."""
        self.calls.append("synchronize")

    def give_back(self) -> None:
        """Noted."""
        self.calls.append("give_back")


class Recorder:
    """A device that remembers every reading of the device it wraps."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._readings: list[Reading] = []

    @property
    def name(self) -> str:
        """The wrapped device's name."""
        return self._device.name

    def read(self) -> Reading:
        """Read, and remember."""
        reading = self._device.read()
        self._readings.append(reading)
        return reading

    def reset_peak(self) -> None:
        """Passed on."""
        self._device.reset_peak()

    def synchronize(self) -> None:
        """Passed on."""
        self._device.synchronize()

    def give_back(self) -> None:
        """Passed on."""
        self._device.give_back()

    def recording(self, label: str = "") -> Recording:
        """All readings so far."""
        return Recording(device=self.name, label=label, readings=tuple(self._readings))
