"""Between torch's devices and brim's, and batches on their way to them."""

from __future__ import annotations

from typing import Any

import torch

from brim.machine.device import CpuDevice, Device, TorchDevice


def device_of(device: torch.device) -> Device:
    """The device that brim watches for this one of torch's."""
    return CpuDevice() if device.type == "cpu" else TorchDevice(device.type, device.index or 0)


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on the device; a mapping is copied, so that whoever gets it may take it apart."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return {key: to_device(batch[key], device) for key in batch.keys()}  # noqa: SIM118 (a BatchEncoding iterates otherwise)
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
