"""The device and the machine: who we are, the most memory that was used, how the machine felt. Nothing is reset or waited for."""

# ruff: noqa: PTH100, PTH109, PTH118, PTH120 (pathlib is not imported into somebody else's interpreter)

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from typing import Any

_PULSE_SECONDS = 1.0


def command_line() -> list[str]:
    """The words that started this interpreter, without secrets."""
    # By its path: this interpreter may not have brim.
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location("_brim_secrets", os.path.join(folder, "machine", "secrets.py"))
    assert spec is not None
    assert spec.loader is not None
    secrets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(secrets)
    return list(secrets.masked(getattr(sys, "orig_argv", sys.argv)))


def identity(torch: Any) -> dict[str, Any]:
    """This process among its ranks."""
    rank, world = _whole("RANK", 0), _whole("WORLD_SIZE", 1)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    return {
        "pid": os.getpid(), "rank": rank, "world": world, "local_world": _whole("LOCAL_WORLD_SIZE", world),
        "launch": os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("MASTER_PORT") or "",
        "restart": _whole("TORCHELASTIC_RESTART_COUNT", 0),
        "python": sys.version.split()[0], "torch": str(torch.__version__), "script": os.path.abspath(sys.argv[0]) if sys.argv else "",
        "folder": os.getcwd(), "cores": _cores(),
    }  # fmt: skip


def _cores() -> int | None:
    """Processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS, Windows
        return os.cpu_count()


class Memory:
    """Peaks as torch and the system count them."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kind = "cpu"

    def device(self, kind: str) -> dict[str, Any]:
        """The device that is trained on."""
        self._kind = kind
        if kind == "cuda" and self._on_cuda():
            index = self._torch.cuda.current_device()
            properties = self._torch.cuda.get_device_properties(index)
            return {
                "device": f"cuda:{index}", "card": properties.name, "limit": int(properties.total_memory),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            }  # fmt: skip
        return {"device": kind, "card": None, "limit": None}

    def read(self) -> dict[str, Any]:
        """The peaks since the process began, or since the script reset them."""
        if self._kind == "cuda" and self._on_cuda():
            stats = self._torch.cuda.memory_stats_as_nested_dict()
            return {"allocated": stats["allocated_bytes"]["all"]["peak"], "reserved": stats["reserved_bytes"]["all"]["peak"]}
        return {"allocated": _peak_resident_bytes() if self._kind == "cpu" else None, "reserved": None}

    def retries(self) -> int | None:
        """How often the allocator gave its cache back."""
        return int(self._torch.cuda.memory_stats_as_nested_dict()["num_alloc_retries"]) if self._on_cuda() else None

    def utilisation(self) -> float | None:
        """Share of time in which the GPU computed; None where NVML is not installed."""
        return float(self._torch.cuda.utilization()) / 100 if self._on_cuda() else None

    def _on_cuda(self) -> bool:
        return bool(self._torch.cuda.is_available() and self._torch.cuda.is_initialized())


class Pulse:
    """brim's meter of the machine, loaded by its path: it is the standard library only, as we are. At most one look a second."""

    def __init__(self, torch: Any, loaders: Any) -> None:
        self._memory = Memory(torch)
        self._loaders = loaders
        self._meter: Any = None
        self._read_at: float | None = None

    def read(self, now: float) -> dict[str, Any] | None:
        """What the machine did since the last look; None between two."""
        if self._read_at is None:
            self._read_at = now
            with suppress(Exception):
                self._meter = _meter_class()(
                    workers=self._loaders.workers, utilisation=self._memory.utilisation, retries=self._memory.retries
                )
        if self._meter is None or now - self._read_at < _PULSE_SECONDS:
            return None
        self._read_at = now
        try:
            return dict(self._meter.read())
        except Exception:  # noqa: BLE001 (a run is more than its pulse)
            self._meter = None
            return None


def _whole(name: str, otherwise: int) -> int:
    """A whole number of the environment."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else otherwise


def _meter_class() -> Any:
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "machine", "pulse.py")
    spec = importlib.util.spec_from_file_location("_brim_pulse", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PulseMeter


def _peak_resident_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
