"""The GPU catalogue holds facts, and understands what people write."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from brim import GPU, UnknownNameError, UsageError, find_gpu, gpus
from brim.machine.catalogue import gpu_of_driver
from brim.sizes import GIB

ALL = gpus()
by_name = pytest.mark.parametrize("gpu", ALL, ids=lambda gpu: gpu.name)


def test_the_catalogue_is_large_enough() -> None:
    assert len(ALL) >= 45


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t4", "t4"), ("T4", "t4"), ("Tesla T4", "t4"), ("rtx-3080", "rtx-3080-10gb"), ("RTX 3080 20GB", "rtx-3080-20gb"),
        ("rtx3080-20gb", "rtx-3080-20gb"), ("RTX 3080 20 GiB", "rtx-3080-20gb"), ("NVIDIA GeForce RTX 3080", "rtx-3080-10gb"),
        ("3090", "rtx-3090"), ("rtx-3060", "rtx-3060-12gb"), ("rtx 3060 8gb", "rtx-3060-8gb"), ("h100", "h100-sxm-80gb"),
        ("H100 PCIe", "h100-pcie-80gb"), ("v100", "v100-16gb"), ("v100-32gb", "v100-32gb"), ("a100-40gb", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("rtx_4090", "rtx-4090-24gb"), ("RTX 4060 Ti 16GB", "rtx-4060-ti-16gb"),
        ("4060ti 16gb", "rtx-4060-ti-16gb"), ("rtx4070tisuper", "rtx-4070-ti-super"), ("mi300x", "mi300x"), ("L40S", "l40s"),
        ("rtx 3090 24gb", "rtx-3090"), ("t4 16gb", "t4"), ("a100 80g", "a100-80gb"), ("A100 40G", "a100-40gb"), ("a100-sxm", "a100-80gb"),
        ("h100 sxm", "h100-sxm-80gb"), ("gtx 1080 ti", "gtx-1080-ti"), ("2080ti 22g", "rtx-2080-ti-22gb"), ("m2 max", "apple-m2-max-32gb"),
        ("4090 laptop", "rtx-4090-laptop"), ("RTX 4060 Laptop GPU", "rtx-4060-laptop"), ("rtx 4070 mobile", "rtx-4070-laptop"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-3080-laptop-8gb"), ("rtx-3080-laptop-16gb", "rtx-3080-laptop-16gb"),
        ("a10g", "a10g"), ("RTX A6000", "rtx-a6000"), ("6000 Ada", "rtx-6000-ada"),
    ],
)  # fmt: skip
def test_what_people_write_is_understood(text: str, name: str) -> None:
    assert find_gpu(text).gpu.name == name


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("rtx-3080-20gb*2", "rtx-3080-20gb", 2), ("t4 * 4", "t4", 4), ("t4x8", "t4", 8), ("2x t4", "t4", 2), ("8*a100-80gb", "a100-80gb", 8),
        ("RTX 3090", "rtx-3090", 1), ("rtx3090", "rtx-3090", 1), ("rtx3090x2", "rtx-3090", 2), ("t4×2", "t4", 2), ("t4*1", "t4", 1),
        ("2x3090", "rtx-3090", 2), ("8x4090", "rtx-4090-24gb", 8), ("2x rtx 3090", "rtx-3090", 2), ("4X A100", "a100-80gb", 4), ("T4 X2", "t4", 2),
    ],
)  # fmt: skip
def test_a_count_may_follow(text: str, name: str, count: int) -> None:
    choice = find_gpu(text)
    assert (choice.gpu.name, choice.count) == (name, count)
    assert len(choice.machine().accelerators) == count


def test_a_bare_name_says_which_variant_it_means() -> None:
    assert "rtx-3080-10gb, the commonest variant" in find_gpu("rtx-3080").assumption
    assert "rtx-3080-20gb" in find_gpu("rtx-3080").assumption
    assert find_gpu("t4").assumption == ""


@pytest.mark.parametrize(
    ("text", "size", "count"),
    [("24GiB", 24 * GIB, 1), ("24 GB", 24 * 10**9, 1), ("24GiB*2", 24 * GIB, 2), ("1.5gib", 3 * GIB // 2, 1)],
)
def test_a_memory_size_is_a_card_of_that_size(text: str, size: int, count: int) -> None:
    choice = find_gpu(text)
    assert (choice.gpu.usable_bytes, choice.count) == (size, count)
    assert "only its memory is known" in choice.assumption


@pytest.mark.parametrize(
    ("text", "near"), [("rtx3088", "rtx-3080-10gb"), ("a1000", "a100-80gb"), ("t44", "t4"), ("h10", "h100-sxm-80gb")]
)
def test_an_unknown_name_lists_the_nearest(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_gpu(text)
    assert near in caught.value.nearest
    assert near in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", " ", "*2", "t4*0", "24", "0GiB", "-5GiB", "24GiBB", "24G", "gtx 1080x2", "?", "t4**2", "💥"]
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        find_gpu(text)


@given(st.text(max_size=20))
def test_any_text_is_an_answer_or_a_usage_error(text: str) -> None:
    try:
        choice = find_gpu(text)
    except UsageError:
        return
    assert choice.gpu.usable_bytes > 0


@by_name
def test_every_name_alias_and_driver_string_finds_its_entry(gpu: GPU) -> None:
    for text in (gpu.name, gpu.name.upper(), gpu.label, *gpu.aliases):
        assert find_gpu(text).gpu.family == gpu.family
    assert find_gpu(gpu.name).gpu is gpu
    for text in gpu.driver_names:
        assert gpu_of_driver(text, gpu.usable_bytes) is gpu


def test_a_laptop_gpu_is_not_the_desktop_card_of_its_name() -> None:
    desktop, laptop = find_gpu("rtx-4090").gpu, find_gpu("rtx-4090-laptop").gpu
    assert (laptop.memory_bytes, laptop.multiprocessors) == (16 * GIB, 76)
    assert laptop.dense_flops["fp16"] < desktop.dense_flops["fp16"] / 1.5
    assert gpu_of_driver("NVIDIA GeForce RTX 4090 Laptop GPU", 16376 << 20) is laptop
    assert gpu_of_driver("NVIDIA GeForce RTX 4090", 24076 << 20) is desktop
    assert gpu_of_driver("NVIDIA GeForce RTX 3080 Laptop GPU", 15993 << 20) is find_gpu("rtx-3080-laptop-16gb").gpu
    assert gpu_of_driver("NVIDIA GeForce RTX 3080 Laptop GPU", 7982 << 20) is find_gpu("rtx-3080-laptop-8gb").gpu


@by_name
def test_facts_are_plausible(gpu: GPU) -> None:
    assert 0.6 * gpu.memory_bytes <= gpu.usable_bytes <= gpu.memory_bytes
    assert gpu.name == gpu.name.lower()
    assert gpu.bandwidth_bytes_per_second is not None
    assert 50e9 <= gpu.bandwidth_bytes_per_second <= 10e12
    assert gpu.dense_flops["fp32"] > 1e12
    if "tf32" in gpu.dense_flops:
        assert gpu.dense_flops["fp32"] <= gpu.dense_flops["tf32"] <= gpu.dense_flops["fp16"]
    if gpu.vendor == "nvidia":
        assert gpu.sm is not None
        assert gpu.bf16 == gpu.flash_attention == (gpu.sm >= (8, 0))
        assert ("bf16" in gpu.dense_flops) == gpu.bf16
        assert ("fp8" in gpu.dense_flops) <= (gpu.sm >= (8, 9))
    if gpu.peer_link:
        assert gpu.peer_bytes_per_second


def test_each_family_has_one_commonest_variant() -> None:
    for family in {gpu.family for gpu in ALL}:
        assert sum(gpu.commonest for gpu in ALL if gpu.family == family) == 1


def test_names_are_unique() -> None:
    names = [name for gpu in ALL for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


def test_memory_decides_between_variants_that_report_one_name() -> None:
    name = "NVIDIA GeForce RTX 3080"
    found = {gib: gpu_of_driver(name, int(gib * 0.98 * GIB)) for gib in (10, 12, 20)}
    assert [gpu.name for gpu in found.values() if gpu] == ["rtx-3080-10gb", "rtx-3080-12gb", "rtx-3080-20gb"]


def test_a_card_with_another_memory_keeps_its_name_and_its_chip() -> None:
    listed, modified = (gpu_of_driver("Tesla T4", size * GIB) for size in (15, 2))
    assert listed is not None
    assert modified is not None
    assert (modified.name, modified.dense_flops) == (listed.name, listed.dense_flops)
    assert modified.memory_bytes == modified.usable_bytes == 2 * GIB


def test_a_slice_of_a_card_is_not_the_card() -> None:
    assert gpu_of_driver("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 * GIB) is None
    assert gpu_of_driver("Some Future Card", 96 * GIB) is None
