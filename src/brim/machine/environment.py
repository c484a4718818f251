"""The bug-report block: everything about this installation and this machine that decides how a run goes, and nothing private."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from brim.extras import INSTALL, missing
from brim.locale import _
from brim.machine.budget import ForkServer
from brim.machine.detect import TorchFacts, ask_torch, bf16_works, detect
from brim.machine.host import cache_folder
from brim.machine.records import Machine
from brim.machine.secrets import mask_text
from brim.record import Record
from brim.sizes import MIB, format_bytes

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "pyarrow", "trl", "deepspeed", "bitsandbytes", "flash-attn", "xformers", "liger-kernel", "triton", "lightning", "nvidia-ml-py",
)  # fmt: skip
"""Whose versions a bug report needs."""

VARIABLES = (
    "BRIM_CACHE", "BRIM_CONFIG", "BRIM_DEBUG", "BRIM_LANG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MKL_NUM_THREADS",
    "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "WORLD_SIZE", "RANK", "LOCAL_RANK",
)  # fmt: skip
"""Environment variables that change a run. None holds a secret; tokens are never printed."""


@dataclass(frozen=True, kw_only=True)
class Environment(Record):
    """The answer of `brim env`."""

    schema: ClassVar[str] = "brim.env/1"

    brim: str
    python: str
    platform: str
    packages: dict[str, str | None]
    """Versions; None for what is not installed."""
    machine: Machine
    torch: TorchFacts | None = None
    cpu_bf16: bool | None = None
    """Whether bfloat16 arithmetic works on this CPU; None where it could not be tried."""
    variables: dict[str, str] = field(default_factory=dict)
    cache_folder: str
    problems: tuple[str, ...] = ()
    """What will cause trouble, each with its cure."""


def env() -> Environment:
    """Look at this installation and this machine. Takes the seconds that torch needs to start."""
    problems: list[str] = []
    torch, cpu_bf16 = _try_torch(problems)
    machine = detect(torch=torch)
    problems += _troubles_of_host(machine)
    return Environment(
        brim=metadata.version("brim"),
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
        machine=replace(machine, accelerators=tuple(replace(device, uuid=None) for device in machine.accelerators)),
        torch=torch,
        cpu_bf16=cpu_bf16,
        variables={name: _discreet(os.environ[name]) for name in VARIABLES if name in os.environ},
        cache_folder=_discreet(str(cache_folder())),
        problems=tuple(problems),
    )


def _try_torch(problems: list[str]) -> tuple[TorchFacts | None, bool | None]:
    """What torch says, and whether bfloat16 works; what does not work is added to the problems."""
    if missing("torch"):
        text = _("torch is not installed, so brim can predict and train nothing here. Install it with: {command}")
        problems.append(text.format(command=INSTALL))
        return None, None
    with ForkServer() as server:
        torch, trouble = ask_torch(server)
        cpu_bf16, bf16_trouble = _try_bf16(server) if torch is not None else (None, "")
    problems += [text for text in (trouble, bf16_trouble) if text]
    return torch, cpu_bf16


def _try_bf16(server: ForkServer) -> tuple[bool | None, str]:
    outcome = server.run(bf16_works, preload=("torch",), timeout_seconds=60)
    if outcome.verdict == "ok":
        return bool(outcome.value), ""
    return False, _("bfloat16 does not work on this CPU. {why}").format(why=outcome.message)


def _troubles_of_host(machine: Machine) -> list[str]:
    host = machine.host
    if host is None or host.shm_bytes is None or host.shm_bytes > 64 * MIB:
        return []
    text = _("/dev/shm has only {size}: DataLoader workers may die of a bus error. In Docker, start with --shm-size=8g.")
    return [text.format(size=format_bytes(host.shm_bytes))]


def _discreet(value: str) -> str:
    """Without secrets, and with ~ for the home folder, whose name is the person's."""
    return mask_text(value).replace(str(Path.home()), "~")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
