"""Any module with a step of its own is estimated; what brim cannot set on it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import brim
from brim.memory.setup import Setup, Target
from brim.memory.tracing.kernels import CudaFlash
from brim.memory.tracing.modules import without_memory
from brim.memory.tracing.reference import trace_step
from brim.memory.tracing.trace import Tracer

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.last = nn.Linear(4 * WIDTH, WIDTH)
        self.twin = self.first
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.first(x))) * self.scale
        return result


def step(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(micro_batch, seq_len, WIDTH)).square().mean()
    return loss


def test_a_module_is_estimated_as_it_really_runs() -> None:
    from torch.profiler import ProfilerActivity, profile

    answer = brim.estimate(Net(), step=step, micro_batch=16, seq_len=64, device="cpu", memory=1 << 30, optimizer="sgd")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    held = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _step in range(2):
            step(net, 16, 64).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert answer.peak_allocated_bytes == pytest.approx(held + peak, rel=0.01)


def test_what_is_shared_stays_shared_and_takes_no_memory() -> None:
    copy: Any = without_memory(Net())
    assert copy.twin is copy.first
    assert all(tensor.is_meta for tensor in (*copy.parameters(), *copy.buffers()))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "lora"}, "method is a property of the module"),
        ({"checkpointing": "full"}, "checkpointing is a property"),
        ({"precision": "bf16"}, "a module's dtype is its own"),
    ],
)
def test_a_property_of_the_module_is_not_set_from_outside(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(brim.UsageError, match=said):
        brim.estimate(Net(), step=step, gpu="t4", **settings)


def test_a_step_that_fails_is_told_in_words() -> None:
    def wrong(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.randn(micro_batch, seq_len, WIDTH + 1)).mean()
        return loss

    with pytest.raises(brim.RunError, match="failed on tensors without memory"):
        brim.estimate(Net(), step=wrong, gpu="t4")
    with pytest.raises(brim.UsageError, match="must return the loss"):
        brim.estimate(Net(), step=lambda _model, _batch, _length: 3, gpu="t4")


def test_a_question_about_values_is_answered_and_said() -> None:
    def asks(model: nn.Module, micro_batch: int, seq_len: int) -> torch.Tensor:
        x = torch.randn(micro_batch, seq_len, WIDTH)
        if x.sum() > 0:
            x = x * 2
        more: torch.Tensor = model(x).mean()
        return step(model, micro_batch, seq_len) + more

    said = " ".join(brim.estimate(Net(), step=asks, gpu="t4", seq_len=32).assumptions)
    assert "values of tensors" in said


@pytest.mark.parametrize("heads_first", [True, False])
def test_flash_attention_writes_in_the_memory_order_of_its_query(heads_first: bool) -> None:
    """And so the copy that transformers makes of another order is counted (Phi-3 concatenates its rotated heads)."""
    shapes = (2, 4, 16, 8) if heads_first else (2, 16, 4, 8)
    tensors = [torch.empty(shapes, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    query, key, value = tensors if heads_first else [tensor.transpose(1, 2) for tensor in tensors]
    out: torch.Tensor = CudaFlash.apply(query, key, value, True)  # type: ignore[no-untyped-call]
    assert out.stride() == query.stride()
    assert out.transpose(1, 2).is_contiguous() is not heads_first


def test_flash_attention_frees_its_copy_of_the_output_before_the_output() -> None:
    """A checkpointed layer keeps the output alive by the kernel's names alone (GPT-NeoX concatenates its rotated heads)."""
    tensors = [torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    tracer = Tracer()

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = CudaFlash.apply(*tensors, True, 1, tracer)  # type: ignore[no-untyped-call]
        return out

    with tracer:
        tracer.go("forward", 0, None)
        out: torch.Tensor = checkpoint(attend, *tensors, use_reentrant=False)
        loss = out.transpose(1, 2).contiguous().sum()
        tracer.go("backward", 0, None)
        loss.backward()  # type: ignore[no-untyped-call]
    size = tensors[0].nbytes
    of_backward = [
        (number, birth.operator)
        for number, birth in enumerate(tracer.trace.births)
        if birth.size == size and tracer.trace.places[birth.place].phase == "backward"
    ]
    recomputed = next(number for number, operator in of_backward if operator == "aten::empty_like")
    copied = [number for number, operator in of_backward if operator == "aten::clone"][-1]
    assert recomputed < copied
    assert tracer.trace.events.index(~copied) < tracer.trace.events.index(~recomputed)


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("full", 2)])
def test_dropout_in_the_mathematical_form_of_attention_keeps_a_byte_per_score_on_a_gpu(checkpointing: Any, times: int) -> None:
    """StarCoder2 in float32: no fused kernel takes its grouped heads. The CPU keeps noise in float32."""
    config = {
        "model_type": "starcoder2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500, "attention_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    setup = Setup(config=config, task="causal-lm", micro_batch=3, length=40, padded=False, checkpointing=checkpointing)
    scores = 3 * 4 * 40 * 40

    def births_of_scores(target: Target) -> list[tuple[str, int]]:
        trace = trace_step(setup, target).trace
        of_first = [birth for birth in trace.births if trace.places[birth.place].round == 0]
        return [(birth.operator, birth.size) for birth in of_first if birth.size in {scores, 4 * scores}]

    on_gpu, on_cpu = births_of_scores(Target("cuda", (8, 0))), births_of_scores(Target("cpu"))
    masks = [index for index, (operator, _size) in enumerate(on_gpu) if operator == "aten::empty_like"]
    assert [on_gpu[index][1] for index in masks] == [scores] * 2 * times
    assert all(on_gpu[index + 1] == ("aten::mul", 4 * scores) for index in masks), "the mask before the result"
    assert on_cpu.count(("aten::empty_like", 4 * scores)) == 2 * times
