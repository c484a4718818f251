"""`brim.estimate`: what it says adds up, holds under its own limits, and never falls when more is asked of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.memory.estimate import Question
from brim.memory.peaks import walk_plain
from brim.memory.where import find_where
from brim.workload.settings import read_settings

MIB = 1 << 20
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3000, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 5,
    "num_decoder_layers": 5, "num_heads": 4, "vocab_size": 500, "is_encoder_decoder": True, "decoder_start_token_id": 0,
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any], **changes: Any) -> str:
    path = tmp_path / f"model-{abs(hash(json.dumps({**config, **changes}, sort_keys=True)))}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return str(path)


def live_bytes(model: str, gpu: str = "a100-80gb", **settings: Any) -> int:
    where = find_where(gpu, None, None)
    assert where is not None
    question = Question.ask(model, read_settings(settings), where)
    return int(walk_plain(question.stream(question.obtain())).allocated.max())


SEVERAL: list[dict[str, Any]] = [
    {},
    {"micro_batch": 4, "seq_len": 384, "precision": "amp-bf16", "accumulation": 4},
    {"method": "lora", "lora_rank": 16, "lora_targets": ("all-linear",), "precision": "bf16", "checkpointing": "full"},
    {"method": "qlora", "precision": "amp-fp16", "optimizer": "paged-adamw-8bit", "seq_len": 200},
    {"method": "lora-8bit", "precision": "amp-fp16", "seq_len": 256},
    {"precision": "bf16", "attention": "flash2", "optimizer": "adamw-fused", "loss": "chunked"},
    {"attention": "eager", "optimizer": "adafactor", "eval_batch": 8, "seq_len": 128},
    {"gpus": 4, "sharding": "fsdp", "precision": "amp-bf16"},
    {"gpus": 4, "sharding": "zero3", "precision": "amp-bf16", "offload": "parameters"},
    {"gpus": 2, "sharding": "ddp", "gradient_as_bucket_view": True, "optimizer": "lion"},
]


@pytest.mark.parametrize(
    "settings", SEVERAL, ids=lambda settings: "-".join(str(value) for value in settings.values()) or "default"
)
def test_figures_add_up_and_hold_under_their_own_limit(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = folder(tmp_path, LLAMA)
    settings = {"seq_len": 512, **settings}
    answer = brim.estimate(model, gpu="a100-80gb", **settings)
    outside = {"fragmentation", "context"}
    assert sum(size for kind, size in answer.by_kind.items() if kind not in outside) == answer.peak_allocated_bytes
    assert sum(answer.by_kind.values()) == answer.peak_device_bytes
    assert answer.peak_allocated_bytes <= answer.peak_reserved_bytes <= answer.peak_device_bytes
    assert answer.smallest_surviving_limit_bytes <= answer.peak_device_bytes
    assert max(answer.by_phase.values()) == answer.peak_allocated_bytes
    assert answer.by_phase[answer.peak_phase] == answer.peak_allocated_bytes
    assert answer.fits
    least = answer.smallest_surviving_limit_bytes
    assert brim.estimate(model, gpu="a100-80gb", memory=least, **settings).fits
    assert not brim.estimate(model, gpu="a100-80gb", memory=least - 2 * MIB, **settings).fits


def test_the_record_is_read_back_equal(tmp_path: Path) -> None:
    answer = brim.estimate(folder(tmp_path, LLAMA), gpu="t4", method="lora", seq_len=256)
    assert brim.Estimate.read(answer.write(tmp_path / "estimate.json")) == answer
    named = {
        "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "smallest_surviving_limit_bytes", "limit_bytes", "fits",
        "peak_phase", "by_phase", "by_kind", "attention_kernel", "total_parameters", "trainable_parameters", "assumptions",
        "elapsed_seconds",
    }  # fmt: skip
    assert named <= set(answer.to_dict())
    assert answer.to_dict()["schema"] == "brim.estimate/1"


@pytest.mark.parametrize(
    ("name", "values"),
    [("micro_batch", (1, 2, 3, 5, 8)), ("seq_len", (64, 128, 200, 256, 384, 1024)), ("lora_rank", (1, 4, 8, 64))],
)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_live_bytes_never_fall_when_more_is_asked(tmp_path: Path, name: str, values: tuple[int, ...], checkpointing: str) -> None:
    model = folder(tmp_path, LLAMA)
    base: dict[str, Any] = {"method": "lora", "seq_len": 128, "checkpointing": checkpointing}
    found = [live_bytes(model, **{**base, name: value}) for value in values]
    assert found == sorted(found)


def test_dropout_before_the_adapters_takes_memory_and_alpha_takes_none(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    base: dict[str, Any] = {"method": "lora", "seq_len": 128}
    usual = brim.estimate(model, gpu="t4", **base)
    assert usual.settings.lora_alpha == 16
    assert brim.estimate(model, gpu="t4", lora_rank=32, **base).settings.lora_alpha == 64
    assert brim.estimate(model, gpu="t4", lora_alpha=3, **base).peak_allocated_bytes == usual.peak_allocated_bytes
    assert brim.estimate(model, gpu="t4", lora_dropout=0.1, **base).peak_allocated_bytes > usual.peak_allocated_bytes


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_live_bytes_never_fall_when_the_model_gets_deeper(tmp_path: Path, config: dict[str, Any]) -> None:
    found = [live_bytes(folder(tmp_path, config, num_hidden_layers=depth), seq_len=128) for depth in (1, 2, 4, 5, 9, 20)]
    assert found == sorted(found)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_more_gpus_never_need_more_of_each(tmp_path: Path, sharding: str, method: str) -> None:
    """From two on: one GPU alone needs no buffers to gather in."""
    model = folder(tmp_path, LLAMA)
    base: dict[str, Any] = {"sharding": sharding, "method": method, "precision": "amp-bf16", "seq_len": 128}
    found = [live_bytes(model, gpus=gpus, nodes=nodes, **base) for gpus, nodes in ((2, 1), (4, 1), (8, 1), (8, 8), (8, 128))]
    assert found == sorted(found, reverse=True)
    alone = brim.estimate(model, gpu="a100-80gb", gpus=1, **base)
    pair = brim.estimate(model, gpu="a100-80gb", gpus=2, **base)
    assert pair.peak_allocated_bytes - pair.by_kind.get("communication", 0) <= alone.peak_allocated_bytes


def test_the_cache_answers_the_same_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "own"))
    model = folder(tmp_path, LLAMA)
    first = brim.estimate(model, gpu="t4", micro_batch=4, seq_len=256, precision="fp32")
    program = (
        "import sys, brim\n"
        f"answer = brim.estimate({model!r}, gpu='t4', micro_batch=4, seq_len=256, precision='fp32')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        f"other = brim.estimate({model!r}, gpu='t4*2', sharding='fsdp', micro_batch=7, seq_len=1024, precision='fp32')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(answer.to_json())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    again = brim.Estimate.from_json(ended.stdout)
    assert dataclasses.replace(again, elapsed_seconds=0.0) == dataclasses.replace(first, elapsed_seconds=0.0)


def test_a_damaged_cache_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "own"))
    model = folder(tmp_path, LLAMA)
    first = brim.estimate(model, gpu="t4", seq_len=256)
    files = list((tmp_path / "own" / "memory").glob("*.npz"))
    assert files
    for damage in (
        lambda content: content[: len(content) // 2],
        lambda content: content[:-9] + b"x" + content[-8:],
        lambda _content: b"",
    ):
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        assert brim.estimate(model, gpu="t4", seq_len=256).by_kind == first.by_kind


def test_a_window_that_stands_in_no_config_is_known(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    said = brim.estimate(
        folder(tmp_path, mistral, sliding_window=4096), gpu="a100-80gb", precision="bf16", padded=False, seq_len=8192
    )
    silent = brim.estimate(folder(tmp_path, mistral), gpu="a100-80gb", precision="bf16", padded=False, seq_len=8192)
    assert silent.by_kind == said.by_kind
    assert silent.attention_kernel == "efficient"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": "300"}, "positive integer"),
        ({"num_hidden_layers": 1_000_000}, "more layers than any model"),
        ({"hidden_size": -64}, "positive integer"),
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"text_config": 3}, "mapping"),
        ({"rope_scaling": 7}, ""),
        ({"pad_token_id": 10**6}, ""),
    ],
)
def test_a_bad_config_is_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(brim.BrimError) as caught:
        brim.estimate(folder(tmp_path, LLAMA, **changes), gpu="t4", seq_len=128)
    assert caught.value.exit_code == 2
    assert said in str(caught.value)


def test_what_is_no_model_and_what_no_device_holds_is_refused(tmp_path: Path) -> None:
    number: Any = 5
    with pytest.raises(brim.UsageError, match="int is not a model"):
        brim.estimate(number, gpu="t4")
    with pytest.raises(brim.UsageError, match="tokens in one micro-batch"):
        brim.estimate(folder(tmp_path, LLAMA), gpu="t4", seq_len=10**7, micro_batch=1000)


@pytest.mark.slow
def test_large_models_take_little_of_the_host() -> None:
    program = (
        "import resource, brim\n"
        "for name in ('llama-3-70b', 'mixtral-8x7b'):\n"
        "    answer = brim.estimate(name, gpu='a100-80gb', precision='bf16', checkpointing='full', cache=False)\n"
        "    assert answer.assumptions\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 2 << 20


def test_one_rank_with_its_parameters_on_the_host_still_brings_them(tmp_path: Path) -> None:
    answer = brim.estimate(
        folder(tmp_path, LLAMA), gpu="t4", sharding="zero3", offload="parameters", precision="bf16", seq_len=128
    )
    assert answer.by_kind["communication"] + answer.by_kind["parameters"] > answer.total_parameters


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "file" / "below"))
    assert brim.estimate(folder(tmp_path, LLAMA), gpu="t4", seq_len=256).fits


def test_what_was_not_said_is_stated(tmp_path: Path) -> None:
    said = " ".join(brim.estimate(folder(tmp_path, MIXTRAL), memory=8 << 30).assumptions)
    assert "2048 tokens" in said
    assert "spread evenly over the experts" in said
    assert "compute capability 8.0" in said
    said = " ".join(brim.estimate(folder(tmp_path, T5), gpu="t4*2", seq_len=256).assumptions)
    assert "Targets are as long as sources" in said
    assert "train with DDP" in said


def test_the_cpu_holds_what_was_asked_for(tmp_path: Path) -> None:
    answer = brim.estimate(folder(tmp_path, LLAMA), device="cpu", memory=1 << 30, seq_len=128)
    assert answer.peak_allocated_bytes == answer.peak_reserved_bytes == answer.peak_device_bytes == sum(answer.by_kind.values())
    assert answer.device == "cpu"
    assert not brim.estimate(folder(tmp_path, LLAMA), device="cpu", memory=answer.peak_allocated_bytes - 1, seq_len=128).fits


def test_without_a_device_python_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(brim.UsageError) as caught:
        brim.estimate(folder(tmp_path, LLAMA))
    assert 'gpu="t4"' in (caught.value.hint or "")


def test_a_pattern_freezes_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path, T5)
    whole = brim.estimate(model, gpu="t4", seq_len=128)
    frozen = brim.estimate(model, gpu="t4", seq_len=128, freeze=("shared", "^encoder"))
    assert frozen.trainable_parameters < whole.trainable_parameters
    assert frozen.by_kind["optimizer"] < whole.by_kind["optimizer"]
    with pytest.raises(brim.UsageError, match="matches no parameter"):
        brim.estimate(model, gpu="t4", seq_len=128, freeze="nowhere")


def test_a_wish_that_the_library_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(brim.UnsupportedError, match="nonsense"):
        brim.estimate(folder(tmp_path, LLAMA), gpu="t4", method="lora", lora_targets="nonsense", seq_len=128)
    with pytest.raises(brim.UnsupportedError):
        brim.estimate(folder(tmp_path, LLAMA), gpu="t4", task="seq2seq", seq_len=128)


@pytest.mark.parametrize(
    ("device", "precision", "optimizer"),
    [
        ({"gpu": "t4"}, "amp-fp16", "adamw-fused"),
        ({"gpu": "a100-80gb"}, "amp-bf16", "adamw-fused"),
        ({"memory": 8 << 30}, "amp-bf16", "adamw-fused"),
        ({"device": "cpu", "memory": 8 << 30}, "fp32", "adamw"),
    ],
)
def test_defaults_are_those_of_the_device(tmp_path: Path, device: dict[str, Any], precision: str, optimizer: str) -> None:
    model = folder(tmp_path, LLAMA)
    silent = brim.estimate(model, seq_len=128, **device)
    assert (silent.settings.precision, silent.settings.optimizer) == (precision, optimizer)
    told = brim.estimate(model, seq_len=128, precision=precision, optimizer=optimizer, **device)
    assert told.by_kind == silent.by_kind
    assert (silent.sources["precision"], told.sources["precision"], told.sources["seq_len"]) == ("default", "given", "given")
    text = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")
    assert f"{precision}" in next(line for line in text.splitlines() if line.startswith("| `--precision` |"))


def test_what_is_given_is_not_replaced_by_a_default(tmp_path: Path) -> None:
    answer = brim.estimate(folder(tmp_path, LLAMA), gpu="t4", seq_len=128, precision="fp32", optimizer="adamw")
    assert (answer.settings.precision, answer.settings.optimizer) == ("fp32", "adamw")
