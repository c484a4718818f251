"""The properties of an emulated card, from the GPU catalogue, as environment variables for the native code.

Properties that the catalogue does not have are assumed: the size of a process' context, as in `brim estimate`, and the level-2 cache and
the bus width of a compute capability.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from brim.emulator.build import PATH
from brim.errors import UnsupportedError, UsageError
from brim.locale import _
from brim.machine.capability import CONTEXT_BYTES, multiprocessor
from brim.machine.catalogue import find_gpu
from brim.machine.records import GPU
from brim.sizes import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from brim.emulator.build import CompiledCard, TorchBuild

MOST_CARDS: Final = 16
SMALLEST_MEMORY: Final = 2 * MIB
"""Memory of a card beyond the context of a process."""
UNKNOWN_CAPABILITY: Final = (8, 6)
UNKNOWN_MULTIPROCESSORS: Final = 82
"""For a card of which only the memory is known: the count of an RTX 3090."""
# Level-2 cache in MiB and memory bus width in bits of a typical card. Programs print them; no allocation depends on them.
_TYPICAL: Final = {
    (6, 0): (4, 4096), (6, 1): (3, 384), (7, 0): (6, 4096), (7, 5): (4, 256), (8, 0): (40, 5120), (8, 6): (6, 384),
    (8, 9): (72, 384), (9, 0): (50, 5120), (10, 0): (126, 8192), (12, 0): (96, 512),
}  # fmt: skip


@dataclass(frozen=True)
class EmulatedCard:
    """One or several cards of the same model."""

    gpu: GPU
    count: int = 1
    memory_bytes: int = 0
    """Of each card: `total` of cudaMemGetInfo."""
    context_bytes: int = CONTEXT_BYTES
    assumption: str = ""
    """Assumptions about the card, as a sentence for the user."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return self.gpu.sm or UNKNOWN_CAPABILITY

    def properties(self) -> str:
        """The value of the variable BRIM_CARD."""
        sm = multiprocessor(self.capability)
        level2, bus = _TYPICAL[max((known for known in _TYPICAL if known <= self.capability), default=min(_TYPICAL))]
        fields = {
            "name": (self.gpu.driver_names or (self.gpu.label,))[0].replace(";", ","),
            "major": self.capability[0],
            "minor": self.capability[1],
            "sms": self.gpu.multiprocessors or UNKNOWN_MULTIPROCESSORS,
            "sm_threads": sm.threads,
            "sm_blocks": sm.blocks,
            "sm_registers": sm.registers,
            "sm_shared": sm.shared_bytes,
            "block_shared": sm.block_shared_bytes,
            "shared_unit": sm.shared_unit_bytes,
            "reserved_shared": sm.reserved_shared_bytes,
            "l2_bytes": level2 * MIB,
            "bus_bits": bus,
            "watts": int(self.gpu.watts or 250),
            "memory": self.memory_bytes,
        }
        return ";".join(f"{name}={value}" for name, value in fields.items())


def emulated_card(
    gpu: str, *, memory_bytes: int | None = None, count: int | None = None, context_bytes: int = CONTEXT_BYTES
) -> EmulatedCard:
    """The card of `--gpu`, `--memory` and `--count`. `rtx-3080*2` is two cards; `24GiB` is a card of which only the memory is known."""
    choice = find_gpu(gpu)
    if choice.gpu.backend != "cuda":
        raise UnsupportedError(
            _("{label} is not an NVIDIA GPU; only CUDA cards can be emulated.").format(label=choice.gpu.label),
            hint=_("`brim gpus` lists the catalogue."),
        )
    cards = choice.count if count is None else count
    if not 1 <= cards <= MOST_CARDS:
        raise UsageError(_("{count} cards cannot be emulated (at most {most}).").format(count=cards, most=MOST_CARDS))
    memory = choice.gpu.usable_bytes if memory_bytes is None else memory_bytes
    if memory < context_bytes + SMALLEST_MEMORY:
        text = _("--memory {memory} is too small: the context of a process alone takes {context}.")
        raise UsageError(text.format(memory=format_bytes(memory), context=format_bytes(context_bytes)))
    assumption = choice.assumption
    if choice.gpu.sm is None:
        text = _(
            "Only the memory of the card is known: it is emulated with compute capability {capability} and {sms} multiprocessors."
        )
        assumption = text.format(capability=".".join(map(str, UNKNOWN_CAPABILITY)), sms=UNKNOWN_MULTIPROCESSORS)
    return EmulatedCard(choice.gpu, cards, memory, context_bytes, assumption)


def has_kernels(capability: tuple[int, int], torch: TorchBuild) -> bool:
    """Whether this build of torch runs on a compute capability. Machine code also runs on later minor versions of its major version."""
    built = torch.capabilities()
    return not built or any(major == capability[0] and minor <= capability[1] for major, minor in built)


def check_capability(card: EmulatedCard, torch: TorchBuild) -> None:
    """Raise if this build of torch has no kernels for the card: on a real card the first launch would fail."""
    if has_kernels(card.capability, torch):
        return
    raise UnsupportedError(
        _("PyTorch {version} has no kernels for {label} (compute capability {capability}); it supports {built}.").format(
            version=torch.version, label=card.gpu.label, capability=".".join(map(str, card.capability)),
            built=", ".join(f"{major}.{minor}" for major, minor in torch.capabilities()),
        ),
        hint=_("Name another card, or use a PyTorch built with an older CUDA."),
    )  # fmt: skip


def environment(
    card: EmulatedCard,
    libraries: CompiledCard,
    shared: str,
    *,
    compute: bool = False,
    trace: int = 0,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a command on the card: `base` (default: that of this process) with the variables of the card."""
    kept = {name: value for name, value in (os.environ if base is None else base).items() if not name.startswith("BRIM_CARD")}
    return {
        "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "1",  # seconds: a thread that sleeps in pthread_exit (native/runtime.c) does not end
        **kept,
        "BRIM_CARD": card.properties(),
        "BRIM_CARD_COUNT": str(card.count),
        "BRIM_CARD_MEMORY": str(card.memory_bytes),
        "BRIM_CARD_CONTEXT": str(card.context_bytes),
        "BRIM_CARD_SHARED": shared,
        "BRIM_CARD_VALUES": str(libraries.values),
        **({"BRIM_CARD_COMPUTE": "1"} if compute else {}),
        **({"BRIM_CARD_TRACE": str(trace)} if trace else {}),
        "LD_PRELOAD": _prepend(libraries.library, kept.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _prepend(libraries.folder, kept.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _prepend(PATH, kept.get("PYTHONPATH")),
    }


def _prepend(entry: Path, rest: str | None) -> str:
    return os.pathsep.join([str(entry), *(part for part in (rest or "").split(os.pathsep) if part and part != str(entry))])


@contextmanager
def session(*, inherited: bool = False) -> Iterator[str]:
    """The value of BRIM_CARD_SHARED for the processes of one session: an anonymous file in memory.

    It is freed when all processes of the session have exited, even if they are killed. `inherited` keeps it open across exec.
    """
    descriptor = os.memfd_create("brim-card", 0 if inherited else os.MFD_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
