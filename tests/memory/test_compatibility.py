"""A wrong combination is refused with the reason and the alternative, or warned about; a right one gets silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from brim import BrimError, find_gpu
from brim.memory.compatibility import check
from brim.memory.parallel import parallel_of
from brim.workload.settings import Settings

T4, A100 = find_gpu("t4").gpu, find_gpu("a100-80gb").gpu
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def settings(**changes: Any) -> Settings:
    return Settings(**{"task": "causal-lm", "seq_len": 512, "sharding": "none", **changes})


@pytest.mark.parametrize(
    ("changes", "gpu", "reason", "alternative"),
    [
        ({"attention": "flash2", "precision": "amp-fp16"}, T4, "8.0 or newer", "--attention sdpa"),
        ({"attention": "flash2"}, A100, "half precision", "amp-bf16"),
        ({"attention": "flash2", "precision": "bf16"}, None, "no CPU kernel", "sdpa"),
        ({"optimizer": "paged-adamw-8bit"}, None, "nothing to page", "adamw-8bit"),
        ({"method": "lora-8bit", "sharding": "zero3", "gpus": 2}, A100, "cannot be cut into shards", "qlora"),
        ({"method": "lora-8bit", "sharding": "fsdp", "gpus": 2}, A100, "cannot be cut into shards", "qlora"),
        ({"offload": "parameters", "sharding": "zero2"}, A100, "cannot offload", "zero3"),
        ({"offload": "optimizer"}, A100, "needs an engine", "zero2"),
        ({"offload": "optimizer", "sharding": "fsdp"}, A100, "together", "parameters"),
        ({"offload": "optimizer", "sharding": "zero2", "optimizer": "lion"}, A100, "its own AdamW", "adamw"),
        ({"optimizer": "adamw-8bit", "sharding": "fsdp", "gpus": 2}, A100, "DTensor", "zero2"),
        ({"gpus": 2}, A100, "would not train together", "ddp"),
        ({"lora_rank": 8}, A100, "the method is full", "--method lora"),
        ({"lora_alpha": 8}, A100, "--lora-alpha: these belong to LoRA", "--method lora"),
        ({"lora_dropout": 0.1}, A100, "--lora-dropout: these belong to LoRA", "--method lora"),
        ({"base_dtype": "float32"}, A100, "the method is full", "--method lora"),
        ({"loss": "chunked", "task": "classification"}, A100, "next-token", "standard"),
        ({"target_len": 8}, A100, "seq2seq", ""),
        ({"freeze": ("(",)}, A100, "regular expression", ""),
        ({"gradient_as_bucket_view": True}, A100, "ddp", ""),
    ],
)
def test_a_wrong_combination_is_refused(changes: dict[str, Any], gpu: Any, reason: str, alternative: str) -> None:
    with pytest.raises(BrimError) as caught:
        check(settings(**changes), LLAMA, gpu)
    assert reason in caught.value.message
    assert alternative in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "gpu", "reason"),
    [
        ({"precision": "fp16"}, A100, "expect NaN"),
        ({"precision": "fp16", "optimizer": "sgd"}, A100, "small gradients vanish"),
        ({"precision": "bf16"}, T4, "has no bfloat16"),
        ({"precision": "amp-bf16"}, T4, "amp-fp16"),
        ({"method": "qlora", "sharding": "zero3", "gpus": 2}, A100, "bnb_4bit_quant_storage"),
        ({"optimizer": "adamw-8bit", "sharding": "zero2", "gpus": 2}, A100, "zero_allow_untested_optimizer"),
        ({"seq_len": 8192}, A100, "made for 4096"),
        ({"method": "qlora", "base_dtype": "float32"}, A100, "--base-dtype changes nothing"),
        ({"sharding": "zero2", "offload": "optimizer", "gpus": 2}, None, "On the CPU --offload saves nothing"),
    ],
)
def test_a_doubtful_combination_is_warned_about(changes: dict[str, Any], gpu: Any, reason: str) -> None:
    (warning,) = check(settings(**changes), LLAMA, gpu)
    assert reason in warning


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
def test_a_right_combination_gets_silence(precision: Any) -> None:
    assert check(settings(precision=precision), LLAMA, T4) == []
    assert check(settings(precision="amp-bf16", attention="flash2"), LLAMA, A100) == []
    assert check(settings(precision="bf16"), LLAMA, None) == []


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BrimError, match="does not divide by its 5"):
        check(settings(), {**LLAMA, "num_attention_heads": 5}, A100)
    with pytest.raises(BrimError, match="do not divide by its 3"):
        check(settings(), {**LLAMA, "num_key_value_heads": 3}, A100)


def test_a_table_of_positions_ends() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_positions": 1024}
    with pytest.raises(BrimError, match="ends at 1024"):
        check(settings(seq_len=2048), gpt2, A100)
    assert check(settings(seq_len=1024), gpt2, A100) == []


@pytest.mark.parametrize(("sharding", "offload"), [("zero2", "optimizer"), ("zero3", "parameters"), ("fsdp", "parameters")])
def test_what_is_offloaded_is_counted_on_the_cpu_and_not_on_a_card(sharding: Any, offload: Any) -> None:
    parallel = settings(sharding=sharding, offload=offload, gpus=2)
    assert parallel_of(parallel, LLAMA, on_cpu=True) == parallel_of(replace(parallel, offload="none"), LLAMA)
    on_a_card = parallel_of(parallel, LLAMA)
    assert on_a_card is not None
    assert on_a_card.offload == offload
