"""Autocast on tensors without memory casts what the real one casts, and keeps its copies as long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.machine.host import multiplies_bf16
from brim.memory.setup import Setup, Target
from brim.memory.tracing.autocast import Autocast, policies
from brim.memory.tracing.kernel_scratch import scratch_of
from brim.memory.tracing.reference import trace_step

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=requires_grad)


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_every_operator_of_the_lists_is_one_that_torch_itself_casts(backend: str) -> None:
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}[backend]
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in policies(backend) if not has_kernel(f"aten::{name}", key)] == []


def test_cudas_list_is_complete_but_for_recurrent_cells_and_what_torch_forbids() -> None:
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    names: list[str] = torch._C._dispatch_get_all_op_names()
    real = {name[6:] for name in names if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")}
    # cuDNN's recurrent cell has a kernel once torch's module for it was imported.
    assert real - set(policies("cuda")) - {"_cudnn_rnn"} == {
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "cudnn_convolution", "cudnn_convolution_transpose", "norm.Scalar",
        "norm.ScalarOpt_dim", "binary_cross_entropy",
    }  # fmt: skip


def test_operators_cast_as_cudas_lists_say() -> None:
    layer = nn.Linear(8, 8, device="meta")
    cast = Autocast("cuda", torch.bfloat16)
    with cast.around(layer), cast.region():
        half = layer(meta(4, 8))
        assert half.dtype == torch.bfloat16
        assert (half @ half.T).dtype == torch.bfloat16
        assert half.softmax(-1).dtype == torch.float32
        assert F.layer_norm(half, (8,)).dtype == torch.float32
        assert half.sum().dtype == torch.float32
        assert half.pow(2).dtype == torch.float32
        assert F.silu(half).dtype == torch.bfloat16
        assert torch.addcmul(half, half, meta(4, 8)).dtype == torch.float32
        # cross_entropy is not in the list: log_softmax inside of it is.
        assert F.cross_entropy(half, torch.empty(4, dtype=torch.long, device="meta")).dtype == torch.float32
    assert layer(meta(4, 8)).dtype == torch.float32


def test_the_cpu_leaves_softmax_alone() -> None:
    cast = Autocast("cpu", torch.bfloat16)
    with cast.around(nn.Identity()), cast.region():
        assert meta(4, 8, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16


def test_a_weight_is_cast_once_a_region_and_an_activation_each_time() -> None:
    weight, x = nn.Parameter(meta(8, 8)), meta(4, 8)
    cast = Autocast("cuda", torch.float16)
    with cast.around(nn.Identity()):
        with cast.region():
            assert cast.lower((weight,), {})[0][0] is cast.lower((weight,), {})[0][0]
            assert cast.lower((x,), {})[0][0] is not cast.lower((x,), {})[0][0]
            first = cast.lower((weight,), {})[0][0]
        with cast.region():
            assert cast.lower((weight,), {})[0][0] is not first
        assert cast.lower((weight,), {})[0][0] is weight


def test_a_recomputation_in_backward_is_cast_like_the_forward() -> None:
    layer = nn.Linear(8, 8, device="meta")
    seen: list[tuple[torch.dtype, bool]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x)
        seen.append((result.dtype, torch.is_autocast_enabled()))
        return layer(result)  # type: ignore[no-any-return]

    cast = Autocast("cuda", torch.bfloat16)
    with cast.around(layer):
        with cast.region():
            out = checkpoint(body, meta(4, 8, requires_grad=True), use_reentrant=False)
        out.sum().backward()
    assert seen == [(torch.bfloat16, True)] * 2
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_on_the_cpu_needs_what_the_trace_says(checkpointing: str) -> None:
    """Weights, gradients, two moments and the copies that autocast makes, against a real run."""
    from torch.profiler import ProfilerActivity, profile

    from brim.memory.tracing.building import build_model, make_batch
    from brim.memory.tracing.optimizers import make_optimizer

    setup = Setup(
        config=TINY, task="causal-lm", micro_batch=2, length=64, padded=False, precision="amp-bf16", checkpointing=checkpointing
    )
    target = Target("cpu", threads=torch.get_num_threads(), multiplies_bf16=multiplies_bf16())
    peaks = trace_step(setup, target).trace.peaks()
    traced = max(size for place, size in peaks.items() if place.round == 1)

    model, batch = build_model(setup, "cpu"), make_batch(setup, "cpu")
    trainable = list(model.parameters())
    optimizer = make_optimizer("adamw", trainable, target)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        del loss
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    changes: list[tuple[int, int, int]] = []

    def walk(event: Any) -> None:
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
        for child in event.children:
            walk(child)

    kineto: Any = recorded.profiler
    for event in kineto.kineto_results.experimental_event_tree():
        walk(event)
    live: dict[int, int] = {}
    peak = 0
    for _time, size, address in sorted(changes):
        if size > 0:
            live[address] = size
        else:
            live.pop(address, None)  # None: garbage of an earlier test, which the collector may free at any time
        peak = max(peak, sum(live.values()))
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state, *inputs))
    assert traced == pytest.approx(peak + held, rel=0.02)


def test_lora_keeps_the_frozen_base_in_half_precision_and_adapters_in_float32() -> None:
    from brim.memory.tracing.building import build_model

    setup = Setup(config=TINY, task="causal-lm", micro_batch=1, length=16, method="lora", precision="amp-fp16")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in build_model(setup).parameters()}
    assert dtypes == {False: torch.float16, True: torch.float32}


def test_without_bf16_instructions_a_product_takes_a_float32_buffer() -> None:
    left, right = meta(3, 128, 64, dtype=torch.bfloat16), meta(3, 64, 96, dtype=torch.bfloat16)
    plain = Target("cpu", threads=2, multiplies_bf16=False)
    assert scratch_of(plain, torch.ops.aten.mm.default, (left[0], right[0]), {}).after == (("aten::mm", (4 * 128 * 96 + 128,)),)
    assert scratch_of(plain, torch.ops.aten.bmm.default, (left, right), {}).after == (("aten::bmm", (4 * 2 * 128 * 96 + 128,)),)
    assert scratch_of(Target("cpu"), torch.ops.aten.mm.default, (left[0], right[0]), {}).after == ()
