"""The GPU catalogue, and how a person's words become one of its entries.

`gpus.toml` holds the facts and their sources. A GPU is named by its catalogue name (`rtx-3080-20gb`), as it is written on the box
("RTX 3080 20GB"), as the driver reports it ("NVIDIA A100-SXM4-80GB"), by its bare name, which means the commonest variant, or by a
memory size alone (`24GiB`), which is a card of that size of which nothing else is known. `*2` behind any of them means two.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, overload

from brim.errors import UnknownNameError, UsageError
from brim.locale import _, sentences
from brim.machine.records import GPU, Accelerator, Machine
from brim.printing import Printable
from brim.sizes import GIB, MIB, format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

# Left out when names are compared: people and drivers disagree on them, and no two devices differ by them alone.
_NOISE: Final = frozenset(
    {"nvidia", "amd", "apple", "geforce", "tesla", "quadro", "instinct", "radeon", "graphics", "gpu", "generation"}
)
_SIZE_ONLY: Final = re.compile(r"[0-9.]+\s*[gmt](?:i?b)?", re.IGNORECASE)
_COUNT_LAST: Final = re.compile(r"(?P<what>.+?)\s*[*x×]\s*(?P<count>[0-9]{1,6})", re.IGNORECASE)
_COUNT_FIRST: Final = re.compile(r"(?P<count>[0-9]{1,6})\s*[*x×]\s*(?P<what>.+)", re.IGNORECASE)
_BACKENDS: Final = {"nvidia": "cuda", "amd": "rocm", "apple": "mps"}


@dataclass(frozen=True)
class GPUChoice(Printable):
    """What `--gpu` names: a device model, how many of it, and what had to be assumed."""

    gpu: GPU
    count: int = 1
    assumption: str = ""

    def machine(self, *, nodes: int = 1) -> Machine:
        """The machine on paper that has these devices in each node."""
        accelerators = tuple(
            Accelerator(index=index, gpu=self.gpu, total_bytes=self.gpu.usable_bytes) for index in range(self.count)
        )
        notes = (self.assumption,) if self.assumption else ()
        return Machine(accelerators=accelerators, nodes=nodes, origin="catalogue", notes=notes)


@overload
def gpus() -> tuple[GPU, ...]: ...
@overload
def gpus(name: str) -> GPU: ...
def gpus(name: str | None = None) -> GPU | tuple[GPU, ...]:
    """All devices of the catalogue, in its order; with a name as `--gpu` takes it, that device.

    `find_gpu` also says how many of them a text such as `t4*2` means, and what was assumed.
    """
    if name is None:
        return _catalogue()
    choice = find_gpu(name)
    if choice.count != 1:
        text = _("{name!r} names {count} GPUs, and brim.gpus describes one.").format(name=name, count=choice.count)
        raise UsageError(text, hint=_("brim.find_gpu({name!r}) has the number too.").format(name=name))
    return choice.gpu


@cache
def _catalogue() -> tuple[GPU, ...]:
    text = files("brim.machine").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(_gpu(entry) for entry in tomllib.loads(text)["gpu"])


def find_gpu(text: str) -> GPUChoice:
    """Read what a person gave to `--gpu`: `t4`, "RTX 3080 20GB", `rtx-3080-20gb*2`, `2x3090`, `24GiB`."""
    given = str(text).strip()
    # "rtx" ends in the letter that also multiplies, and "2x3090" can be read from both ends: the reading whose name is known wins.
    for what, count in _readings(given):
        choice = _find_one(what)
        if choice is not None:
            if count < 1:
                raise UsageError(_("{text!r} asks for 0 GPUs.").format(text=given), hint=_("Write for example t4*2."))
            return replace(choice, count=count)
    nearest = _nearest(_key(given))
    text_ = _("There is no GPU {given!r} in the catalogue.").format(given=given)
    raise UnknownNameError(
        sentences(text_, _("Nearest: {names}.").format(names=", ".join(nearest)) if nearest else ""),
        nearest=nearest,
        hint=_("`brim gpus` lists all; a memory size such as 24GiB stands for any card of that size."),
    )


def _readings(text: str) -> Iterator[tuple[str, int]]:
    yield text, 1
    for pattern in (_COUNT_LAST, _COUNT_FIRST):
        match = pattern.fullmatch(text)
        if match is not None:
            yield match["what"].strip(), int(match["count"])


def _find_one(what: str) -> GPUChoice | None:
    if _SIZE_ONLY.fullmatch(what):
        gpu = generic_gpu(parse_size(what))
        return GPUChoice(gpu, 1, _("{label}: only its memory is known.").format(label=gpu.label))
    by_name, by_family = _index()
    key = _key(what)
    if key in by_name:
        return GPUChoice(by_name[key])
    if key not in by_family:
        return None
    gpu = by_family[key]
    others = ", ".join(other.name for other in gpus() if other.family == gpu.family and other is not gpu)
    taken = _("{given} is taken as {name}, the commonest variant; others: {others}.")
    return GPUChoice(gpu, 1, taken.format(given=what, name=gpu.name, others=others) if others else "")


def gpu_of_driver(driver_name: str, total_bytes: int) -> GPU | None:
    """The catalogue entry of a device that a driver reports, its memory deciding between variants; None if unknown.

    The name identifies the chip. If the memory is not that of any variant (a modified card, an emulated one), the entry has the memory that
    the driver reports. Slices of a card (MIG, vGPU) have names of their own and are unknown.
    """
    key = _key(driver_name)
    matches = [gpu for gpu in gpus() if key in {_key(name) for name in (*gpu.driver_names, *gpu.aliases, gpu.name)}]
    if not matches and key in _index()[1]:
        family = _index()[1][key].family
        matches = [gpu for gpu in gpus() if gpu.family == family]
    best = min(matches, key=lambda gpu: abs(gpu.usable_bytes - total_bytes), default=None)
    if best is None or abs(best.usable_bytes - total_bytes) <= best.usable_bytes / 3:
        return best
    return replace(best, memory_bytes=total_bytes, usable_bytes=total_bytes, usable_is_measured=True)


def generic_gpu(memory_bytes: int) -> GPU:
    """A card of which only the memory is known. All of it counts as usable: that is what the person said it has."""
    label = _("a GPU with {size}").format(size=format_bytes(memory_bytes))
    return GPU(
        name=f"gpu-{format_bytes(memory_bytes).replace(' ', '').lower()}",
        label=label, vendor="unknown", backend="cuda", memory_bytes=memory_bytes, usable_bytes=memory_bytes,
    )  # fmt: skip


def _key(name: str) -> str:
    """One spelling for comparison: lower case, no vendor, no punctuation, `20 GB` and `20gib` as `20gb`."""
    text = re.sub(r"[\s_\-/()®™,]+", " ", name.lower())
    text = re.sub(r"\b([0-9]+)\s*g(?:i?b)?\b", r"\1gb", text)
    # "rtx3080" and "rtx 3080", "3080ti" and "3080 ti", "4070 tisuper": the same card.
    text = re.sub(r"\b(rtx|gtx|gh|mi|rx)\s*(?=[0-9])", r"\1 ", text)
    text = re.sub(r"(?<=[0-9])\s*(ti|super)\b", r" \1", text)
    words = [word for word in text.split() if word not in _NOISE]
    return "".join(words)


@cache
def _index() -> tuple[dict[str, GPU], dict[str, GPU]]:
    """Two look-ups: every name and alias; every name that leaves the variant open, with the commonest one."""
    names: dict[str, GPU] = {}
    families: dict[str, GPU] = {}
    for gpu in sorted(gpus(), key=lambda gpu: not gpu.commonest):
        spelled = [gpu.name, gpu.label, *gpu.aliases]
        if gpu.name == gpu.family:
            spelled.append(f"{gpu.name} {gpu.memory_bytes // GIB}gb")  # the size of a card that has one size may be said
        for name in spelled:
            key = _key(name)
            names.setdefault(key, gpu)
            names.setdefault(key.removeprefix("rtx"), gpu)  # "4060 ti 16gb", as people say it
            families.setdefault(re.sub(r"[0-9]+gb$", "", key), gpu)  # "h100 sxm", "a100 pcie"
        if gpu.commonest:
            families[_key(gpu.family)] = gpu
            families.setdefault(_key(gpu.family).removeprefix("rtx"), gpu)
    # A bare name that is also an alias means the family, so that the choice of a variant is said aloud.
    for key, gpu in families.items():
        if key in names and key != _key(gpu.name):
            del names[key]
    return names, families


def _nearest(key: str) -> tuple[str, ...]:
    by_name, by_family = _index()
    known = {**{name: gpu.name for name, gpu in by_family.items()}, **{name: gpu.name for name, gpu in by_name.items()}}
    close = get_close_matches(key, known, n=8, cutoff=0.5)
    inside = [name for name in known if len(key) > 1 and key in name]
    return tuple(dict.fromkeys(known[name] for name in (*close[:3], *inside[:3], *close)))[:5]


def _gpu(entry: dict[str, Any]) -> GPU:
    memory, link, features = entry.get("memory", {}), entry.get("link", {}), entry.get("features", {})
    peer = link.get("peer", "none")
    vendor = entry["vendor"]
    return GPU(
        name=entry["name"],
        label=entry["label"],
        vendor=vendor,
        backend=_BACKENDS[vendor],  # type: ignore[arg-type]
        memory_bytes=int(entry["memory_gib"] * GIB),
        usable_bytes=int(entry["usable_mib"] * MIB),
        usable_is_measured=entry["usable_from"] == "measured",
        compute_capability=entry.get("compute_capability"),
        multiprocessors=entry.get("multiprocessors"),
        architecture=entry.get("architecture"),
        dense_flops={number: tera * 1e12 for number, tera in entry["dense_tflops"].items()},
        bandwidth_bytes_per_second=memory["bandwidth_gb_per_second"] * 1e9,
        host_link=link.get("host"),
        host_bytes_per_second=link["host_gb_per_second"] * 1e9 if "host_gb_per_second" in link else None,
        peer_link=None if peer == "none" else peer,
        peer_bytes_per_second=link["peer_gb_per_second"] * 1e9 if peer != "none" else None,
        watts=entry.get("power", {}).get("watts"),
        bf16=features["bf16"],
        flash_attention=features["flash_attention"],
        tensor_cores=features["tensor_cores"],
        unified_memory=entry.get("unified_memory", False),
        family=entry["family"],
        commonest=entry["commonest"],
        aliases=tuple(entry.get("aliases", ())),
        driver_names=tuple(entry.get("driver_names", ())),
        note=entry.get("note", ""),
    )
