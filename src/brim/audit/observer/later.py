"""Numbers that lie on a device, read when they are there and not before: a look at a GPU's number would make the script wait for it."""

from __future__ import annotations

from typing import Any


def total(numbers: list[Any]) -> Any:
    """The sum: a number where all are known here, else a tensor; None where one is unknown, or there is none."""
    if not numbers or any(number is None for number in numbers):
        return None
    here = sum(number for number in numbers if isinstance(number, (int, float)))
    there = [number for number in numbers if not isinstance(number, (int, float))]
    for number in there:
        here = number + here
    return here


def known(number: Any) -> Any:
    """A number of the CPU's at once; a GPU's stays a tensor; None for what is neither (a tensor that is only traced)."""
    if number is None or isinstance(number, (int, float)):
        return number
    try:
        if number.device.type == "cpu":
            return number.item()
        return number.detach() if number.device.type == "cuda" else None
    except Exception:  # noqa: BLE001 (fake and functional tensors have no number)
        return None


class Waiting:
    """The numbers of one step on their way from the GPU: copied to pinned memory behind the work that makes them."""

    def __init__(self, torch: Any, record: dict[str, Any]) -> None:
        self.record = record
        self._names = [name for name, value in record.items() if hasattr(value, "is_cuda")]
        self._event = None
        if not self._names:
            return
        if torch.cuda.is_current_stream_capturing():
            self._forget()
            return
        numbers = torch.stack([record[name].double().reshape(()) for name in self._names])
        self._host = torch.empty(len(self._names), dtype=torch.float64, device="cpu", pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def is_here(self) -> bool:
        """Whether every number can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self, *, wait: bool = False) -> dict[str, Any]:
        """The record with numbers in it."""
        if self._event is not None:
            if wait:
                self._event.synchronize()
            for name, value in zip(self._names, self._host.tolist()):  # noqa: B905 (Python 3.9)
                self.record[name] = value if name == "loss" else int(value)
            self._event = None
        return self.record

    def _forget(self) -> None:
        for name in self._names:
            self.record[name] = None
        self._names = []
