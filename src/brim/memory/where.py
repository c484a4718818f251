"""The device that an estimate is for: a card of the catalogue, a size of memory, the CPU, or what is in this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from brim.errors import UsageError
from brim.locale import _
from brim.machine.catalogue import find_gpu, generic_gpu
from brim.machine.host import multiplies_bf16
from brim.machine.records import GPU
from brim.memory.outside import Outside, outside
from brim.memory.setup import Target
from brim.sizes import MIB, parse_size

DEFAULT_GPUS = ("t4", "rtx-3090", "rtx-4090", "a100-80gb")
"""The rows of an answer where nothing was said and no accelerator is here."""
_OLDEST_ASSUMED = (8, 0)


@dataclass(frozen=True)
class Where:
    """One kind of device, and what one process may take of it."""

    gpu: GPU | None
    """None: the CPU."""
    limit_bytes: int
    count: int | None = None
    """How many, where the name said so."""
    assumptions: tuple[str, ...] = ()
    is_here: bool = False
    """Whether it is in this machine."""

    @property
    def name(self) -> str:
        """As records name it."""
        return self.gpu.name if self.gpu is not None else "cpu"

    @property
    def label(self) -> str:
        """As a person writes it."""
        return self.gpu.label if self.gpu is not None else _("the CPU")

    @property
    def target(self) -> Target:
        """What kernels run there. The choice of kernels changes at compute capability 8.0 and nowhere else."""
        if self.gpu is None:
            return Target("cpu", threads=_threads(), multiplies_bf16=multiplies_bf16())
        return Target("cuda", _OLDEST_ASSUMED if self.compute_capability >= _OLDEST_ASSUMED else (7, 5))

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of the card; what is not known counts as a current one."""
        return (self.gpu.sm if self.gpu is not None else None) or _OLDEST_ASSUMED

    def outside(self, ranks: int) -> Outside:
        """What a training process holds there besides tensors."""
        multiprocessors = self.gpu.multiprocessors if self.gpu is not None else None
        return outside(self.compute_capability, multiprocessors=multiprocessors, gpus=ranks)


def find_where(gpu: GPU | str | None, memory: int | str | None, device: Literal["cpu", "cuda"] | None) -> Where | None:
    """What was said; None where nothing was said and no accelerator is here."""
    memory = _read_limit(memory)
    if device == "cpu":
        if gpu is not None:
            raise UsageError(_("--device cpu and --gpu contradict each other."))
        return _cpu(memory)
    if isinstance(gpu, str):
        choice = find_gpu(gpu)
        said = (choice.assumption,) if choice.assumption else ()
        return _card(choice.gpu, memory, count=choice.count if choice.count > 1 else None, said=said)
    if gpu is not None:
        return _card(gpu, memory)
    found = _here(memory)
    if found is not None:
        return found
    if device == "cuda":
        raise UsageError(_("--device cuda, and no GPU is found here."), hint=_("Name one: --gpu t4."))
    return _card(generic_gpu(memory), memory) if memory is not None else None


def _read_limit(memory: int | str | None) -> int | None:
    if memory is None:
        return None
    limit = parse_size(memory)
    if limit < MIB:
        text = _("A limit of {count} bytes holds nothing.").format(count=limit)
        raise UsageError(text, hint=_("Did you mean {count}GiB?").format(count=limit))
    return limit


def default_places() -> list[Where]:
    """The cards of the default table."""
    return [_card(find_gpu(name).gpu, None) for name in DEFAULT_GPUS]


def _cpu(memory: int | None) -> Where:
    if memory is not None:
        return Where(None, memory)
    from brim.machine.host import host

    free = host().available_bytes
    return Where(None, free, assumptions=(_("The limit is the memory that is free on this machine now."),))


def _card(gpu: GPU, memory: int | None, *, count: int | None = None, said: tuple[str, ...] = ()) -> Where:
    notes = list(said)
    if gpu.vendor == "unknown":
        notes.append(_("The card counts as an NVIDIA one of compute capability 8.0 or newer."))
    elif gpu.backend != "cuda":
        notes.append(
            _("{gpu}: brim has no memory model of its own for this backend; CUDA's kernels and allocator stand for it.").format(
                gpu=gpu.label
            )
        )
    if memory is None and not gpu.usable_is_measured and gpu.vendor != "unknown":
        notes.append(_("How much of {gpu}'s memory is usable is a rule of thumb.").format(gpu=gpu.label))
    return Where(gpu, memory or gpu.usable_bytes, count, tuple(notes))


def _here(memory: int | None) -> Where | None:
    from brim.machine.detect import detect

    accelerators = detect().accelerators
    if not accelerators:
        return None
    first = accelerators[0]
    return Where(
        first.gpu,
        memory or first.free_bytes or first.total_bytes,
        assumptions=(_("The GPU of this machine: {gpu}.").format(gpu=first.gpu.label),),
        is_here=True,
    )


def _threads() -> int:
    """OpenMP threads that torch would start: `OMP_NUM_THREADS`, else the cores it may use."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said):
        return int(said)
    from brim.machine.host import host

    return max(1, host().physical_cores or host().affinity_cores)


def on_chosen_card(where: Where, index: int, *, is_limited: bool) -> Where:
    """The GPU of this machine with that index. The limit is at most what is free on the card."""
    from brim.machine.detect import detect

    cards = detect().accelerators
    chosen = next((card for card in cards if card.index == index), None)
    if chosen is None:
        known = ", ".join(str(card.index) for card in cards)
        raise UsageError(_("There is no GPU {index} here; there are: {known}.").format(index=index, known=known))
    free = chosen.free_bytes or chosen.total_bytes
    return replace(where, gpu=chosen.gpu, limit_bytes=min(where.limit_bytes, free) if is_limited else free)
