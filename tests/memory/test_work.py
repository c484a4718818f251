"""What a traced step computes: operations and bytes that follow the shape, and agree with what everybody counts by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from brim.memory.family import Family, trace_family
from brim.memory.setup import Setup, Target
from brim.memory.stream import Place
from brim.memory.work import PHASES, Call, Shallow, Work, understand
from brim.workload.parameters import count_parameters

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 688, "vocab_size": 2048, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
GPU = Target("cuda", (8, 0))


def _family(**changes: Any) -> Family:
    setup = Setup(**{"config": CONFIG, "task": "causal-lm", "micro_batch": 2, "length": 256, "precision": "bf16", **changes})
    return trace_family(setup, GPU)


@pytest.fixture(scope="module")
def full() -> Work:
    return _family().work


def _flops(work: Work, phase: str, batch: int, length: int) -> float:
    of_phase = work.phases == PHASES.index(phase)
    return float((work.flops_at(batch, length) * work.times)[of_phase].sum())


def test_forward_is_two_operations_a_weight_and_token_and_attention(full: Work) -> None:
    weights = (
        count_parameters(CONFIG, "LlamaForCausalLM") - CONFIG["vocab_size"] * CONFIG["hidden_size"]
    )  # the table is looked up
    attention = 4 * 256 * CONFIG["hidden_size"] * CONFIG["num_hidden_layers"]
    norms = (2 * CONFIG["num_hidden_layers"] + 1) * CONFIG["hidden_size"]
    expected = 3 * 256 * (2 * (weights - norms) + attention)
    # Rotary embeddings add a hair of their own products.
    assert _flops(full, "forward", 3, 256) == pytest.approx(expected, rel=2e-3)


def test_backward_of_all_weights_is_twice_forward(full: Work) -> None:
    assert _flops(full, "backward", 4, 256) == pytest.approx(2 * _flops(full, "forward", 4, 256), rel=0.1)


def test_checkpointing_computes_again_and_lora_computes_less(full: Work) -> None:
    again = _family(checkpointing="full").work
    assert _flops(again, "backward", 2, 256) > 1.2 * _flops(full, "backward", 2, 256)
    adapters = _family(method="lora").work
    assert _flops(adapters, "backward", 2, 256) < 0.7 * _flops(full, "backward", 2, 256)


def test_operations_grow_with_the_batch_and_faster_with_the_length(full: Work) -> None:
    assert full.total_flops(6, 256) == pytest.approx(3 * full.total_flops(2, 256), rel=1e-9)
    assert full.total_flops(2, 1024) > 4 * full.total_flops(2, 256)


def test_figures_of_another_shape_are_those_of_its_own_trace(full: Work) -> None:
    other = trace_family(
        Setup(config=CONFIG, task="causal-lm", micro_batch=3, length=320, precision="bf16"), GPU, one_length=True
    ).work
    assert full.total_flops(3, 320) == pytest.approx(other.total_flops(3, 320), rel=1e-9)
    assert (full.bytes_at(3, 320) * full.times).sum() == pytest.approx((other.bytes_at(3, 320) * other.times).sum(), rel=1e-3)


def test_depth_is_counted_though_four_layers_are_traced() -> None:
    deep = _family(config={**CONFIG, "num_hidden_layers": 30}).work
    whole = _family(config={**CONFIG, "num_hidden_layers": 4}).work
    head = 2 * CONFIG["hidden_size"] * CONFIG["vocab_size"] * 2 * 256
    ratio = (_flops(deep, "forward", 2, 256) - head) / (_flops(whole, "forward", 2, 256) - head)
    assert ratio == pytest.approx(30 / 4, rel=2e-3)


def test_padded_flash_attention_packs_sequences_and_does_not_mix_them() -> None:
    packed = _family(attention="flash2").work
    is_attention = np.array([name == "attention" for name in packed.operators])
    flops = (packed.flops_at(8, 256) * packed.times)[is_attention & (packed.phases == 0)].sum()
    pairs = 8 * 256 * 256 / 2 * CONFIG["num_hidden_layers"]
    assert flops == pytest.approx(4 * pairs * CONFIG["hidden_size"], rel=1e-9)


def test_a_family_keeps_its_work_in_its_file(full: Work) -> None:
    family = _family()
    arrays = {name: np.array(column) for name, column in family.to_arrays().items()}
    again = Family.from_arrays(arrays).work
    assert again.operators == family.work.operators
    assert (again.flops_at(5, 384) == family.work.flops_at(5, 384)).all()
    assert (again.bytes_at(5, 384) == family.work.bytes_at(5, 384)).all()


def test_calls_that_do_not_match_between_shapes_grow_with_the_tokens() -> None:
    places = [Place("forward", 0, None)]
    one = Shallow(2, 128, [Call("mm", 0, 1, 100, (8,))], places)
    other = Shallow(3, 128, [Call("bmm", 0, 1, 900, (8,))], places)
    work = understand([one, other], {}, 1.0)
    assert work.total_flops(4, 256) == 400


def test_the_config_given_is_left_as_it_was() -> None:
    scaled = {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    before = json.dumps(scaled, sort_keys=True)
    _family(config=scaled)
    assert json.dumps(scaled, sort_keys=True) == before
