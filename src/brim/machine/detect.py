"""Which machine is this? The host and NVIDIA cards at once, everything else from what torch says.

Torch takes seconds to import, and may crash on a machine that it does not fit. So `detect` does without it, and `ask_torch` asks it
in a child process, for those who need to know more.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from brim.errors import UnsupportedError
from brim.locale import _
from brim.machine import nvml
from brim.machine.catalogue import gpu_of_driver
from brim.machine.host import host
from brim.machine.records import GPU, Accelerator, Machine
from brim.record import STRICT

if TYPE_CHECKING:
    from brim.machine.budget import ForkServer
    from brim.machine.records import Backend

_TORCH_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class TorchDeviceFacts:
    """One accelerator as torch sees it."""

    __pydantic_config__ = STRICT

    name: str
    total_bytes: int
    free_bytes: int | None = None
    compute_capability: str | None = None
    architecture: str | None = None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """What torch says of itself and of its accelerators."""

    __pydantic_config__ = STRICT

    version: str
    built_for: str
    """`CUDA 12.8`, `ROCm 6.4`, `CPU`."""
    backend: str | None = None
    """The accelerator in use: `cuda`, `rocm`, `mps`, `xpu`, ..., or None."""
    threads: int = 1
    cpu_capability: str = ""
    devices: tuple[TorchDeviceFacts, ...] = field(default_factory=tuple)


def detect(*, torch: TorchFacts | None = None) -> Machine:
    """This machine now. With what torch says (see `ask_torch`), accelerators that NVML does not know are found too."""
    accelerators, notes = _nvidia()
    if not accelerators:
        accelerators = _of_torch(torch) if torch is not None else _apple()
    return Machine(accelerators=accelerators, host=host(), origin="detected", notes=notes)


def ask_torch(server: ForkServer) -> tuple[TorchFacts | None, str]:
    """What torch says, asked in a child process; and why it says nothing, if it does not."""
    outcome = server.run(torch_facts, preload=("torch",), timeout_seconds=_TORCH_SECONDS)
    if outcome.verdict == "ok":
        return outcome.value, ""
    return None, _("torch cannot be used here. {why}").format(why=outcome.message)


def torch_facts() -> TorchFacts:
    """Ask torch. Imports it."""
    import torch

    built_for = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    )
    current = torch.accelerator.current_accelerator(check_available=True)
    kind = current.type if current is not None else None
    devices: tuple[TorchDeviceFacts, ...] = ()
    if kind is not None:
        devices = tuple(_torch_device(kind, index) for index in range(torch.accelerator.device_count()))
    return TorchFacts(
        version=torch.__version__,
        built_for=built_for,
        backend="rocm" if kind == "cuda" and torch.version.hip else kind,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        devices=devices,
    )


def _torch_device(kind: str, index: int) -> TorchDeviceFacts:
    import torch

    if kind == "mps":
        return TorchDeviceFacts(name=_apple_name() or "Apple GPU", total_bytes=torch.mps.recommended_max_memory())
    module: Any = torch.get_device_module(kind)
    properties = module.get_device_properties(index)
    free, total = module.mem_get_info(index)
    capability = module.get_device_capability(index) if kind == "cuda" and not torch.version.hip else None
    return TorchDeviceFacts(
        name=properties.name,
        total_bytes=total,
        free_bytes=free,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        architecture=getattr(properties, "gcnArchName", None) if kind == "cuda" and torch.version.hip else None,
    )


def bf16_works() -> bool:
    """Multiply and attend in bfloat16 on the CPU. On some virtual machines this ends the process with SIGILL."""
    import torch

    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    heads = torch.ones(1, 2, 16, 32, dtype=torch.bfloat16)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return bool((matrix @ matrix)[0, 0] == 64) and bool(attended.isfinite().all())


@cache
def why_no_flash_attention() -> str:
    """Why the package flash-attn cannot be used by this interpreter; empty where it can. Imports it, because a build for another torch
    is found and cannot be imported.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return _("the package flash-attn is not installed")
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # noqa: BLE001 (an undefined symbol, a missing library: whatever its native part raises)
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        return _("the package flash-attn cannot be imported: {why}").format(why=first)
    return ""


def require_flash_attention() -> None:
    """An error where `--attention flash2` cannot run here."""
    why = why_no_flash_attention()
    if why:
        raise UnsupportedError(
            _("--attention flash2 cannot run here: {why}.").format(why=why),
            hint=_("Use --attention sdpa, or install it: pip install flash-attn --no-build-isolation."),
        )


def _nvidia() -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    physical = nvml.cards()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = nvml.visible(physical, wanted)
    notes = []
    if len(shown) < len(physical):
        text = _("CUDA_VISIBLE_DEVICES={value} shows {shown} of {all} GPUs.")
        notes.append(text.format(value=wanted, shown=len(shown), all=len(physical)))
    if len({card.name for card in shown}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and wanted is None:
        notes.append(_("The GPUs differ, and CUDA may number them in another order: set CUDA_DEVICE_ORDER=PCI_BUS_ID."))
    return tuple(_accelerator_of_card(index, card) for index, card in enumerate(shown)), tuple(notes)


def _accelerator_of_card(index: int, card: nvml.Card) -> Accelerator:
    gpu = gpu_of_driver(card.name, card.total_bytes)
    return Accelerator(
        index=index,
        gpu=gpu or _unlisted(card.name, "nvidia", "cuda", card.total_bytes, card.compute_capability),
        total_bytes=card.total_bytes,
        free_bytes=card.free_bytes,
        physical_index=card.index,
        uuid=card.uuid,
        driver=card.driver,
    )


def _of_torch(facts: TorchFacts) -> tuple[Accelerator, ...]:
    vendors = {"cuda": "nvidia", "rocm": "amd", "mps": "apple", "xpu": "intel"}
    backend: Any = facts.backend if facts.backend in {"cuda", "rocm", "mps", "xpu", "npu"} else "npu"
    return tuple(
        Accelerator(
            index=index,
            gpu=gpu_of_driver(device.name, device.total_bytes)
            or _unlisted(device.name, vendors.get(backend, "unknown"), backend, device.total_bytes, device.compute_capability),
            total_bytes=device.total_bytes,
            free_bytes=device.free_bytes,
        )
        for index, device in enumerate(facts.devices)
    )


def _apple() -> tuple[Accelerator, ...]:
    name = _apple_name()
    if name is None:
        return ()
    import psutil

    total = psutil.virtual_memory().total
    gpu = gpu_of_driver(name, total) or _unlisted(name, "apple", "mps", total, None)
    return (Accelerator(index=0, gpu=gpu, total_bytes=total, free_bytes=psutil.virtual_memory().available),)


def _apple_name() -> str | None:
    if platform.system() != "Darwin" or platform.machine() != "arm64":
        return None
    answer = subprocess.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _unlisted(name: str, vendor: Any, backend: Backend, total_bytes: int, capability: str | None) -> GPU:
    """A device that is not in the catalogue: what it says of itself, and nothing invented."""
    modern = capability is not None and int(capability.partition(".")[0]) >= 8
    return GPU(
        name=name.lower().replace(" ", "-"),
        label=name,
        vendor=vendor,
        backend=backend,
        memory_bytes=total_bytes,
        usable_bytes=total_bytes,
        usable_is_measured=True,
        compute_capability=capability,
        bf16=modern,
        flash_attention=modern,
        tensor_cores=capability is not None and int(capability.partition(".")[0]) >= 7,
        unified_memory=vendor == "apple",
        note=_("Not in the catalogue: its speed is unknown."),
    )
