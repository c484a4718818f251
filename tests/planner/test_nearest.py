"""Nothing fits: what is missing, and what would do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from brim.planner.nearest import MOST_ANSWERS, missing_bytes, nearest_that_fit
from brim.planner.request import Request, make_request
from brim.records import Candidate

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 8000, "num_hidden_layers": 6, "intermediate_size": 1024,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(path)


def again(model: str, candidate: Candidate, **asked: Any) -> Request:
    """The question with the flags of an answer typed behind it."""
    words = shlex.split(candidate.reasons[0])
    typed = {flag.removeprefix("--").replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {name: int(value) if value.isdecimal() else value for name, value in typed.items()}
    return make_request(model, **{**asked, **numbers})


def test_missing_bytes_are_what_the_smallest_configuration_lacks(llama: str) -> None:
    small = make_request(llama, memory="400MiB", gpu="t4", seq_len=1024)
    missing = missing_bytes(small)
    assert missing > 0
    limit = small.where.limit_bytes + missing
    enough = make_request(llama, memory=limit, gpu="t4", seq_len=1024, margin=small.margin.bytes)
    assert missing_bytes(enough) == 0
    short = make_request(llama, memory=limit - 1, gpu="t4", seq_len=1024, margin=small.margin.bytes)
    assert missing_bytes(short) == 1


@pytest.mark.slow
def test_every_answer_fits_when_its_flags_are_typed_and_a_shorter_sequence_is_the_longest_that_does(llama: str) -> None:
    asked: dict[str, Any] = {"memory": "900MiB", "gpu": "t4", "seq_len": 4096, "effective_batch": 8, "loss": "standard"}
    request = make_request(llama, **asked)
    assert missing_bytes(request) > 0
    found = nearest_that_fit(request)
    assert 1 <= len(found) <= MOST_ANSWERS
    for candidate in found:
        assert candidate.memory is not None
        assert candidate.memory.fits
        assert candidate.effective_batch == 8
        typed = {**asked, "memory": None} if "--gpu" in candidate.reasons[0] and candidate.world_size == 1 else asked
        assert missing_bytes(again(llama, candidate, **typed)) == 0
    shorter = next(each for each in found if each.reasons[0].startswith("--seq-len"))
    length = int(shorter.reasons[0].split()[1])
    assert missing_bytes(make_request(llama, **{**asked, "seq_len": length + 128})) > 0


@pytest.mark.slow
def test_a_pinned_micro_batch_that_is_too_large_is_answered_with_smaller_ones(llama: str) -> None:
    request = make_request(llama, gpu="t4", memory="8GiB", seq_len=1024, micro_batch=512, checkpointing="none")
    first = nearest_that_fit(request)[0]
    assert first.reasons[0].startswith("--micro-batch ")
    assert first.effective_batch == 512
    assert first.micro_batch < 512


@pytest.mark.slow
def test_weights_that_alone_are_too_much_leave_adapters_shards_and_larger_cards() -> None:
    request = make_request("gpt2-large", memory="3GiB", gpu="rtx-3060-12gb", seq_len=256)
    flags = [candidate.reasons[0] for candidate in nearest_that_fit(request)]
    assert any("--method lora" in each for each in flags)
    assert any("--sharding fsdp" in each for each in flags)
    assert any(each.startswith("--gpu") and "--sharding" not in each for each in flags)
    assert not any("--seq-len" in each for each in flags)


@pytest.mark.slow
def test_offload_is_offered_where_the_hosts_memory_is_known() -> None:
    asked: dict[str, Any] = {"memory": "3GiB", "gpu": "rtx-3060-12gb", "seq_len": 256}
    with_host = nearest_that_fit(make_request("gpt2-large", host_memory="64GiB", **asked))
    without = nearest_that_fit(make_request("gpt2-large", **asked))
    assert any("--offload" in each.reasons[0] for each in with_host)
    assert not any("--offload" in each.reasons[0] for each in without)


@pytest.mark.slow
def test_a_model_too_large_for_a_t4_is_offered_as_qlora_before_other_cards() -> None:
    found = nearest_that_fit(make_request("qwen2.5-7b", gpu="t4", effective_batch=32))
    first = found[0]
    assert first.reasons[0] == "--method qlora"
    assert (first.precision, first.loss, first.checkpointing) == ("amp-fp16", "chunked", "full")
    assert first.speed is not None
    assert first.speed.tokens_per_second > 400
    assert [each.reasons[0].split()[0] for each in found[1:]] == ["--gpu", "--gpu"]
