"""The wires between GPUs: inside a node as the catalogue knows them, between nodes as they are named.

A node's link is all its ports together, one direction: `400Gbit`, `infiniband-hdr`, `infiniband-ndr*8` (a DGX H100), `roce-100*2`,
`ethernet-10`. `ethernet-N` is TCP over sockets; everything else reads and writes the other node's memory by itself (RDMA), also where only
a number is said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from brim.errors import UsageError
from brim.locale import _
from brim.speed import constants

if TYPE_CHECKING:
    from brim.machine.records import GPU
    from brim.speed.rates import Rates

Kind = Literal["rdma", "tcp"]
_INFINIBAND: Final = {"edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gbit/s of a port of four lanes (InfiniBand Trade Association, roadmap)."""
_BRIDGED: Final = re.compile(r"\b(pcie|nvl|rtx|titan|quadro|geforce|a30|a40)\b", re.IGNORECASE)
"""Cards whose NVLink is a bridge between two (see the head of gpus.toml): more of them in a node meet over PCIe."""
_PAIR: Final = 2
_PORTS: Final = re.compile(r"(?P<what>[a-z0-9.-]+?)(?:\*(?P<ports>[0-9]{1,3}))?", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(?P<gbit>[0-9]{1,6}(?:\.[0-9]{1,3})?)\s*gbit(?:/s)?", re.IGNORECASE)
_NAMED: Final = re.compile(r"(?P<kind>ethernet|roce)-(?P<gbit>[0-9]{1,6}(?:\.[0-9]{1,3})?)", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """One kind of wire."""

    name: str
    bytes_per_second: float
    """As it is reached: inside a node of one GPU, between nodes of a whole node; one direction."""
    ring_hop_seconds: float
    tree_hop_seconds: float


@dataclass(frozen=True)
class Network:
    """The wires of a group of ranks."""

    inside: Link
    between: Link


def read_link(text: str) -> Link:
    """What `--link` names."""
    given = text.strip().lower()
    number = _NUMBER.fullmatch(given.partition("*")[0])
    match = _PORTS.fullmatch(given.replace("/s", "").replace(" ", ""))
    if match is None:
        raise _unknown(text)
    what, ports = match["what"], int(match["ports"] or 1)
    kind: Kind = "rdma"
    if number is not None:
        gbit = float(number["gbit"])
    elif what.startswith("infiniband-") and what.removeprefix("infiniband-") in _INFINIBAND:
        gbit = _INFINIBAND[what.removeprefix("infiniband-")]
    elif (named := _NAMED.fullmatch(what)) is not None:
        gbit = float(named["gbit"])
        kind = "tcp" if named["kind"] == "ethernet" else "rdma"
    else:
        raise _unknown(text)
    if not gbit or not ports:
        raise _unknown(text)
    reached = constants.NODE_LINK_SHARE[kind] * ports * gbit * 1e9 / 8
    return Link(text.strip(), reached, constants.NODE_HOP_SECONDS[kind], constants.NODE_TREE_HOP_SECONDS[kind])


def _unknown(text: str) -> UsageError:
    said = _("--link {text!r} is not possible.").format(text=text)
    hint = _("Write 100Gbit, infiniband-hdr, infiniband-ndr*8 (eight ports a node), roce-100 or ethernet-10.")
    return UsageError(said, hint=hint)


def inside_link(gpu: GPU | None, rates: Rates, gpus: int) -> Link:
    """Between the GPUs of a node, by the catalogue; bridges join two cards and no more."""
    name = (gpu.peer_link if gpu is not None else None) or "pcie"
    speed = rates.peer_bytes_per_second
    if name == "nvlink" and gpus > _PAIR and gpu is not None and _BRIDGED.search(gpu.label):
        name, speed = "pcie", rates.host_bytes_per_second
    return Link(name, speed, constants.RING_HOP_SECONDS[name], constants.TREE_HOP_SECONDS[name])
