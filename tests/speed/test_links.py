"""Links are named as people name them, and GPUs are joined as the catalogue says."""

from __future__ import annotations

import pytest

from brim.errors import UsageError
from brim.machine.catalogue import find_gpu
from brim.speed import constants
from brim.speed.links import inside_link, read_link
from brim.speed.rates import rates_of_cpu, rates_of_gpu

RDMA, TCP = constants.NODE_LINK_SHARE["rdma"], constants.NODE_LINK_SHARE["tcp"]


@pytest.mark.parametrize(
    ("name", "gbit", "share"),
    [
        ("100Gbit", 100, RDMA), ("400 Gbit/s", 400, RDMA), ("25gbit*2", 50, RDMA), ("infiniband-edr", 100, RDMA),
        ("InfiniBand-HDR", 200, RDMA), ("infiniband-ndr*8", 3200, RDMA), ("infiniband-xdr", 800, RDMA), ("roce-100*2", 200, RDMA),
        ("ethernet-10", 10, TCP), ("ethernet-2.5", 2.5, TCP),
    ],
)  # fmt: skip
def test_a_link_is_all_ports_of_a_node_as_far_as_they_are_reached(name: str, gbit: float, share: float) -> None:
    link = read_link(name)
    assert link.bytes_per_second == pytest.approx(share * gbit * 1e9 / 8)
    assert link.name == name
    assert 0 < link.ring_hop_seconds < link.tree_hop_seconds


@pytest.mark.parametrize(
    "name", ["", "fast", "100", "100GB", "infiniband", "infiniband-abc", "ethernet-", "0Gbit", "10Gbit*0", "10Gbit*x", "*8"]
)
def test_what_is_no_link_is_refused_with_what_to_type(name: str) -> None:
    with pytest.raises(UsageError, match="--link") as caught:
        read_link(name)
    assert "infiniband-hdr" in str(caught.value.hint)


def test_sockets_are_slower_and_later_than_what_reads_the_memory_itself() -> None:
    sockets, direct = read_link("ethernet-100"), read_link("roce-100")
    assert sockets.bytes_per_second < direct.bytes_per_second
    assert sockets.ring_hop_seconds > direct.ring_hop_seconds


def test_the_default_is_a_link_that_can_be_typed() -> None:
    assert read_link(constants.NODE_LINK).name == constants.NODE_LINK


@pytest.mark.parametrize(
    ("name", "pair", "eight"),
    [
        ("h100-sxm-80gb", "nvlink", "nvlink"), ("h100-pcie-80gb", "nvlink", "pcie"), ("h100-nvl-94gb", "nvlink", "pcie"),
        ("rtx-3090", "nvlink", "pcie"), ("rtx-a6000", "nvlink", "pcie"), ("a40", "nvlink", "pcie"), ("b200", "nvlink", "nvlink"),
        ("v100-16gb", "nvlink", "nvlink"), ("t4", "pcie", "pcie"), ("rtx-4090", "pcie", "pcie"), ("mi300x", "infinity-fabric", "infinity-fabric"),
    ],
)  # fmt: skip
def test_a_bridge_joins_two_cards_and_a_switch_all(name: str, pair: str, eight: str) -> None:
    gpu = find_gpu(name).gpu
    rates = rates_of_gpu(gpu)
    links = [inside_link(gpu, rates, gpus) for gpus in (2, 8)]
    assert [link.name for link in links] == [pair, eight]
    assert links[1].bytes_per_second == (rates.peer_bytes_per_second if pair == eight else rates.host_bytes_per_second)


def test_processes_on_a_cpu_meet_over_the_host() -> None:
    assert inside_link(None, rates_of_cpu(2), 2).name == "pcie"
