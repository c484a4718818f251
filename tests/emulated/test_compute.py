"""Compute mode: results on the emulated card equal those of the CPU, and peaks are the same with and without compute mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.emulated.conftest import RunOnCard

SCRIPTS = Path(__file__).parent / "scripts"
GPU = "a100-40gb"


def _computed(on_card: RunOnCard, script: str) -> Any:
    return on_card((SCRIPTS / script).read_text(), GPU, compute=True).result


def test_operators_and_their_gradients_equal_the_cpu(on_card: RunOnCard) -> None:
    result = _computed(on_card, "compute_operators.py")
    assert result["different"] == []
    assert result["uncomputed"] == {}
    assert result["cases"] > 100


def test_every_attention_kernel_equals_math_attention(on_card: RunOnCard) -> None:
    result = _computed(on_card, "compute_attention.py")
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
    assert result["cases"] >= 100
    assert {name.split()[0] for name in result["errors"]} == {"flash", "efficient", "math", "packed"}
    for name, error in result["errors"].items():
        assert error <= tolerance[name.split()[1]], name
    assert set(map(tuple, result["dropout"].values())) == {(True, False)}, "only the same seed gives the same mask"
    assert result["uncomputed"] == {}


def test_random_numbers_follow_the_generator_of_the_card(on_card: RunOnCard) -> None:
    result = _computed(on_card, "compute_random.py")
    dropout = result.pop("dropout")
    for name, draws in result.items():
        assert draws["reproduced"], name
        assert draws["advances"], name
        assert draws["own generator"], name
        assert draws["CPU untouched"], name
    means = {"normal": 0, "uniform": 0.5, "bernoulli": 0.3, "randint": 27, "randperm": 499.5, "multinomial": 66, "exponential": 1}
    for name, mean in means.items():
        assert result[name]["mean"] == pytest.approx(mean, rel=0.1, abs=0.1), name
    assert dropout.pop("kept") == pytest.approx(0.75, abs=0.03)
    assert all(dropout.values()), dropout


def test_models_train_as_on_the_cpu_and_their_memory_does_not_change(on_card: RunOnCard) -> None:
    computed = _computed(on_card, "compute_models.py")
    for name, (loss, gradient) in computed["errors"].items():
        half = "amp" in name
        assert loss <= (5e-3 if half else 1e-5), name
        assert gradient <= (5e-2 if half else 1e-5), name
    assert computed["uncomputed"] == {}
    plain = on_card((SCRIPTS / "compute_models.py").read_text(), GPU).result
    assert computed["peaks"] == plain["peaks"]


_UNTIL_OUT_OF_MEMORY = """
    import torch
    import torch.nn.functional as F

    kept, weight = [], torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    try:
        for size in range(1, 1000):
            hidden = F.gelu(F.linear(torch.randn(37 * size, 1024, device="cuda"), weight))
            kept.append(hidden)
            if size % 7 == 0:
                del kept[::2]
    except torch.OutOfMemoryError:
        pass
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated", "num_alloc_retries", "num_ooms")
    result = [size, *(stats[name] for name in names)]
"""


def test_a_full_card_fails_and_retries_at_the_same_points(on_card: RunOnCard) -> None:
    computed, plain = [on_card(_UNTIL_OUT_OF_MEMORY, memory="700MiB", compute=compute).result for compute in (True, False)]
    assert computed == plain
    retries, failures = computed[-2:]
    assert retries > 1
    assert failures == 1


def test_bitsandbytes_is_computed(on_card: RunOnCard) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    result = _computed(on_card, "compute_bitsandbytes.py")
    assert result.pop("uncomputed") == {}
    assert result.pop("AdamW") <= 1e-5
    for name in ("AdamW8bit", "PagedAdamW8bit"):
        assert result.pop(name) <= 2e-2, name
    for name, (quantization, output, gradient) in result.items():
        assert 0.05 < quantization < 0.15, name
        assert output <= 6e-3, name
        assert gradient <= 6e-3, name


def test_operators_that_are_not_computed_are_listed(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import brim_card
        import torch

        big = torch.empty(200 << 20, device="cuda")
        doubled = big + 1
        quantized = torch.ops.aten._convert_weight_to_int4pack(torch.zeros(64, 64, dtype=torch.uint8, device="cuda"), 2)
        torch.ops.aten._weight_int4pack_mm(
            torch.ones(16, 128, dtype=torch.bfloat16, device="cuda"), quantized, 128, torch.ones(1, 64, 2, dtype=torch.bfloat16, device="cuda")
        )
        result = brim_card.uncomputed_reasons()
        assert brim_card.uncomputed() == list(result)
        """,
        GPU,
        compute=True,
    )
    assert done.result == {"aten::add.Tensor": "larger than 512 MiB", "aten::_weight_int4pack_mm": "no kernel for the CPU"}


def test_triton_kernels_that_are_not_run_are_listed(on_card: RunOnCard) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = on_card(
        """
        import brim_card
        import torch
        import triton
        import triton.language as tl

        @triton.jit
        def doubled(x, count, BLOCK: tl.constexpr):
            index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + index, 2 * tl.load(x + index, mask=index < count), mask=index < count)

        x = torch.ones(100, device="cuda")
        doubled[(1,)](x, 100, BLOCK=128)
        result = brim_card.uncomputed_reasons()
        """,
        GPU,
        compute=True,
    )
    assert done.result == {"triton::doubled": "Triton kernels are not run"}
