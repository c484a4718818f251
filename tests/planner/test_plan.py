"""The plan: exact batches, memory within its margin, never slower with more memory, and a because for every choice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import brim
from brim.errors import UsageError
from brim.machine.catalogue import find_gpu
from brim.memory.compatibility import check
from brim.planner.request import make_request
from brim.planner.search import TIME_ERROR, search
from brim.sizes import GIB, MIB
from brim.workload.resolve import find_model

if TYPE_CHECKING:
    from pathlib import Path

    from brim.records import Candidate, Plan

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 688, "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(folder)


def _shown(plan: Plan) -> list[Candidate]:
    return [each for each in (plan.best, *plan.alternatives) if each is not None]


def _check_each(plan: Plan, effective_batch: int) -> None:
    gpu = plan.machine.accelerators[0].gpu
    config = find_model(plan.workload.model).config
    for each in _shown(plan):
        sizes = [size for rank in range(each.world_size) for size in each.slices_of_rank(rank)]
        assert sum(sizes) == each.effective_batch == effective_batch
        assert max(sizes) == each.micro_batch
        assert each.memory is not None
        assert each.memory.peak_device_bytes + plan.margin_bytes <= each.memory.limit_bytes
        assert each.memory.fits
        chosen = brim.Settings(
            precision=each.precision, attention=each.attention, optimizer=each.optimizer, method=each.method, sharding=each.sharding,
            checkpointing=each.checkpointing, offload=each.offload, gpus=each.world_size, seq_len=512, task="causal-lm",
        )  # fmt: skip
        assert not [text for text in check(chosen, config, gpu) if "bfloat16" in text]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(effective_batch=st.integers(1, 1024), ranks=st.sampled_from([1, 2, 3, 8]))
@pytest.mark.slow
def test_every_configuration_shown_is_exact_fits_and_is_allowed(tiny: str, effective_batch: int, ranks: int) -> None:
    found = brim.plan(
        tiny, gpu=f"t4*{ranks}", seq_len=512, effective_batch=effective_batch, sharding="ddp" if ranks > 1 else None
    )
    assert found.fits
    _check_each(found, effective_batch)


@pytest.mark.long
def test_engines_that_shard_are_weighed_against_each_other(tiny: str) -> None:
    found = brim.plan(tiny, gpu="t4*3", seq_len=512, effective_batch=7)
    assert found.fits
    _check_each(found, 7)
    assert {each.sharding for each in _shown(found)} > {"ddp"} or len({each.sharding for each in _shown(found)}) > 1


@pytest.mark.long
def test_more_memory_never_makes_the_best_plan_slower(tiny: str) -> None:
    seconds: list[float] = []
    for size in (700, 900, 1200, 1600, 2400, 4000, 8000, 16000):
        found = brim.plan(tiny, gpu="t4", memory=size * MIB, seq_len=512, effective_batch=48)
        if found.best is not None:
            assert found.best.speed is not None
            seconds.append(found.best.speed.step_seconds)
    assert len(seconds) >= 5
    assert seconds == sorted(seconds, reverse=True)


BIG_VOCABULARY = {**TINY, "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 100_000, "intermediate_size": 256}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose logits are most of what it needs."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(BIG_VOCABULARY), encoding="utf-8")
    return str(folder)


@pytest.mark.long
def test_a_chunked_loss_is_found_where_logits_leave_no_room(wide: str) -> None:
    asked: dict[str, Any] = {"gpu": "t4", "memory": 1500 * MIB, "seq_len": 1024, "effective_batch": 16, "method": "lora"}
    found = brim.plan(wide, **asked)
    assert found.best is not None
    assert (found.best.loss, found.workload.loss) == ("chunked", "chunked")
    assert any(text.startswith("Chunked loss") for text in found.best.reasons)
    told = brim.plan(wide, loss="chunked", **asked).best
    assert told is not None
    assert (told.micro_batch, told.memory) == (found.best.micro_batch, found.best.memory)
    standard = brim.plan(wide, loss="standard", **asked)
    assert standard.best is None or standard.best.speed.step_seconds > 1.1 * found.best.speed.step_seconds  # type: ignore[union-attr]


@pytest.mark.long
def test_a_standard_loss_that_was_pinned_and_does_not_fit_is_answered_with_a_chunked_one(wide: str) -> None:
    found = brim.plan(wide, gpu="t4", memory=1600 * MIB, seq_len=2048, effective_batch=4, loss="standard")
    assert found.best is None
    assert found.alternatives[0].reasons[0] == "--loss chunked"
    assert found.alternatives[0].loss == "chunked"
    again = brim.plan(wide, gpu="t4", memory=1600 * MIB, seq_len=2048, effective_batch=4, loss="chunked").best
    assert again is not None
    assert again.speed == found.alternatives[0].speed


@pytest.mark.long
def test_where_memory_is_plenty_the_loss_is_the_standard_one(wide: str) -> None:
    best = brim.plan(wide, gpu="a100-80gb", seq_len=512, effective_batch=8).best
    assert best is not None
    assert best.loss == "standard"


@pytest.mark.long
def test_engines_that_gain_less_than_the_error_of_times_leave_the_simplest(tiny: str) -> None:
    found = brim.plan(tiny, gpu="t4*2", seq_len=512, effective_batch=32, method="lora")
    assert found.best is not None
    assert found.best.sharding == "ddp"
    faster = [each for each in found.alternatives if each.speed.step_seconds < found.best.speed.step_seconds]  # type: ignore[union-attr]
    for each in faster:
        assert each.speed.step_seconds > (1 - TIME_ERROR) * found.best.speed.step_seconds  # type: ignore[union-attr]
        assert "within the error" in each.reasons[0]


def test_the_best_plan_is_never_slower_than_micro_batches_of_one(tiny: str) -> None:
    for effective_batch in (4, 37):
        best = brim.plan(tiny, gpu="t4", seq_len=512, effective_batch=effective_batch).best
        naive = brim.plan(tiny, gpu="t4", seq_len=512, effective_batch=effective_batch, micro_batch=1).best
        assert best is not None
        assert naive is not None
        assert naive.micro_batch == 1
        assert best.speed is not None
        assert naive.speed is not None
        assert best.speed.step_seconds <= naive.speed.step_seconds


def test_what_is_given_is_pinned(tiny: str) -> None:
    pins: dict[str, Any] = {
        "precision": "fp32", "checkpointing": "full", "attention": "eager", "optimizer": "lion", "method": "lora", "micro_batch": 3,
    }  # fmt: skip
    found = brim.plan(tiny, gpu="t4", seq_len=256, effective_batch=12, **pins)
    assert found.best is not None
    assert found.considered == 1
    for name, value in pins.items():
        assert getattr(found.best, name) == value


@pytest.mark.slow
def test_the_recipe_varies_only_where_that_is_allowed(tiny: str) -> None:
    pins: dict[str, Any] = {"attention": "sdpa", "precision": "amp-bf16", "checkpointing": "none"}
    fixed = search(make_request(tiny, gpu="rtx-3090", seq_len=256, effective_batch=8, **pins))
    assert {option.settings.method for option in fixed.options} == {"full"}
    assert {option.settings.optimizer for option in fixed.options} == {"adamw-fused"}
    assert {option.settings.offload for option in fixed.options} == {"none"}
    free = search(make_request(tiny, gpu="rtx-3090", seq_len=256, effective_batch=8, vary=("optimizer", "method"), **pins))
    assert {option.settings.method for option in free.options} == {"full", "lora", "qlora"}
    assert len({option.settings.optimizer for option in free.options}) > 2


@pytest.mark.slow
def test_offload_is_tried_only_within_the_host_memory(tiny: str) -> None:
    def offloads(host: str) -> set[str]:
        pins: dict[str, Any] = {"attention": "sdpa", "precision": "amp-bf16", "checkpointing": "none"}
        request = make_request(tiny, gpu="rtx-3090", seq_len=256, effective_batch=8, vary="offload", host_memory=host, **pins)
        return {option.settings.offload for option in search(request).options}

    assert offloads("32GiB") > {"none"}
    assert offloads("2GiB") == {"none"}


def test_data_give_the_lengths_and_the_steps(tiny: str, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "word " * (5 + 7 * (index % 40)), "response": "answer"}) for index in range(300)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    found = brim.plan(tiny, gpu="t4", data=path, effective_batch=32)
    assert found.best is not None
    assert found.best.speed is not None
    assert found.best.speed.steps_per_epoch == 10
    assert found.data is not None
    assert found.data.sequences == 300
    assert found.data.padding["sliced"] < found.data.padding["shuffled"]
    assert found.workload.max_length == max(bar.tokens for bar in found.workload.lengths)
    dropped = brim.plan(tiny, gpu="t4", data=path, effective_batch=32, drop_last=True)
    assert dropped.best is not None
    assert dropped.best.speed is not None
    assert dropped.best.speed.steps_per_epoch == 9
    equal = brim.plan(tiny, gpu="t4", seq_len=found.workload.max_length, effective_batch=32, samples=300)
    assert equal.best is not None
    assert equal.best.speed is not None
    assert found.best.speed.step_seconds < equal.best.speed.step_seconds


def test_advice_is_applied_only_when_asked(tiny: str) -> None:
    keywords: dict[str, Any] = {"gpu": "t4", "seq_len": 256, "effective_batch": 64, "from_batch": 16, "learning_rate": 1e-4}
    told = brim.plan(tiny, **keywords)
    assert told.best is not None
    assert told.best.learning_rate == 1e-4
    assert {each.setting: each.then for each in told.advice}["learning_rate"] == pytest.approx(2e-4)
    applied = brim.plan(tiny, apply=True, **keywords)
    assert applied.best is not None
    assert applied.best.learning_rate == pytest.approx(2e-4)


def test_margins_are_bytes_or_shares(tiny: str) -> None:
    limit = find_gpu("t4").gpu.usable_bytes
    for given_margin, expected in (("10%", limit // 10), ("0.1", limit // 10), (0.1, limit // 10), ("1GiB", GIB), (GIB, GIB)):
        found = make_request(tiny, gpu="t4", margin=given_margin).margin
        assert abs(found.bytes - expected) <= 1
    with pytest.raises(UsageError, match="margin"):
        make_request(tiny, gpu="t4", margin="much")


def test_contradictions_are_refused(tiny: str) -> None:
    with pytest.raises(UsageError, match="effective-batch"):
        _ = make_request(tiny, gpu="t4", micro_batch=4, accumulation=4, effective_batch=100).cuts
    with pytest.raises(UsageError, match="accumulation"):
        _ = make_request(tiny, gpu="t4", accumulation=9, effective_batch=4).cuts
    with pytest.raises(UsageError, match="tokenizer"):
        make_request(tiny, gpu="t4", tokenizer="somewhere")
    with pytest.raises(UsageError, match="vary"):
        make_request(tiny, gpu="t4", vary="colour")


def test_without_an_effective_batch_it_follows_from_the_rest(tiny: str) -> None:
    assert make_request(tiny, gpu="t4").effective_batch == 32
    assert make_request(tiny, gpu="t4*2", micro_batch=4, accumulation=3).effective_batch == 24
    assert make_request(tiny, gpu="t4*2", micro_batch=4).effective_batch == 8


def test_a_plan_survives_its_file(tiny: str, tmp_path: Path) -> None:
    found = brim.plan(tiny, gpu="t4*2", seq_len=256, effective_batch=7, sharding="ddp")
    found.write(tmp_path / "plan.json")
    assert brim.Plan.read(tmp_path / "plan.json") == found


def test_a_t4_gets_half_precision_without_bfloat16_and_without_flash() -> None:
    found = brim.plan("tinyllama-1.1b", gpu="t4", method="lora", seq_len=2048, effective_batch=64)
    best = found.best
    assert best is not None
    assert best.precision == "amp-fp16"
    assert best.attention == "sdpa"
    assert best.micro_batch > 1
    assert best.accumulation > 1
    assert best.effective_batch == 64
    assert best.reasons


@pytest.mark.long
def test_a_small_t5_on_two_rtx_3080() -> None:
    def of(host: str) -> Candidate:
        found = brim.plan(
            "chatlm-mini-chinese", gpu="rtx-3080-20gb*2", freeze=("embeddings", "encoder"), samples=5000, seq_len=256, target_len=256,
            precision="amp-bf16", optimizer="adafactor", effective_batch=256, host_memory=host, host_cores=4, sharding="zero1",
            checkpointing="none",
        )  # fmt: skip
        assert found.best is not None, found.alternatives
        return found.best

    much = of("13GB")
    assert much.speed is not None
    assert much.speed.steps_per_epoch == 20
    assert much.micro_batch >= 48
    assert (much.num_workers, much.prefetch_factor, much.pin_memory) == (4, 2, True)
    little = of("6GB")
    assert (little.num_workers, little.prefetch_factor, little.pin_memory) == (0, None, False)
    assert little.effective_batch == much.effective_batch == 256


def test_the_same_question_gives_the_same_plan(tiny: str) -> None:
    first, second = (brim.plan(tiny, gpu="t4", seq_len=256, effective_batch=10) for _ in range(2))
    assert replace(first, elapsed_seconds=0.0) == replace(second, elapsed_seconds=0.0)


def test_short_sequences_take_little_time_and_never_less_than_none(tiny: str, tmp_path: Path) -> None:
    rows = [{"text": "word " * 4}] * 400 + [{"text": "word " * 500}]
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    found = brim.plan(tiny, device="cpu", memory="8GiB", data=path, effective_batch=64)
    assert found.best is not None
    assert found.best.speed is not None
    assert found.best.speed.step_seconds > 0
    for each in found.alternatives:
        assert each.speed is not None
        assert each.speed.step_seconds >= found.best.speed.step_seconds


@pytest.mark.slow
def test_adafactor_is_not_put_under_an_engine_that_flattens_what_it_factors(tiny: str) -> None:
    pins: dict[str, Any] = {"attention": "sdpa", "precision": "amp-fp16", "checkpointing": "none", "optimizer": "adafactor"}
    request = make_request(tiny, gpu="t4*2", seq_len=256, effective_batch=8, **pins)
    assert {option.settings.sharding for option in search(request).options} == {"ddp", "fsdp"}
    asked = make_request(tiny, gpu="t4*2", seq_len=256, effective_batch=8, sharding="zero1", **pins)
    assert {option.settings.sharding for option in search(asked).options} == {"zero1"}


@pytest.mark.slow
def test_a_paged_optimizer_is_offload_and_pays_for_it(tiny: str) -> None:
    pins: dict[str, Any] = {
        "attention": "sdpa",
        "precision": "amp-bf16",
        "checkpointing": "none",
        "seq_len": 256,
        "effective_batch": 8,
    }
    free = search(make_request(tiny, gpu="rtx-3090", vary="optimizer", host_memory="32GiB", **pins))
    assert "paged-adamw-8bit" not in {option.settings.optimizer for option in free.options}
    both = search(make_request(tiny, gpu="rtx-3090", vary="optimizer,offload", host_memory="32GiB", sharding="none", **pins))
    seconds = {option.settings.optimizer: option.bound() for option in both.options if option.settings.offload == "none"}
    assert seconds["paged-adamw-8bit"] > seconds["adamw-8bit"]


def test_bfloat16_is_slow_on_a_card_that_emulates_it(tiny: str) -> None:
    def seconds(precision: str) -> float:
        best = brim.plan(tiny, gpu="t4", seq_len=512, effective_batch=8, precision=precision, checkpointing="none").best
        assert best is not None
        assert best.speed is not None
        return best.speed.step_seconds

    assert seconds("amp-bf16") > 1.5 * seconds("amp-fp16")


def test_one_micro_batch_alone_is_looked_at_where_accumulating_ones_do_not_fit(tiny: str) -> None:
    """Gradients that wait for the next micro-batch may weigh more than a larger micro-batch."""
    request = make_request(tiny, gpu="t4", seq_len=128, effective_batch=2, checkpointing="full", precision="fp32")
    option = search(request).options[0]
    single, several = option.device_bytes(request.cuts[-1]), option.device_bytes(request.cuts[0])
    assert request.cuts[-1].accumulation == 1
    assert single < several
    between = (single + several) // 2
    found = brim.plan(
        tiny, gpu="t4", memory=between, margin=0.0, seq_len=128, effective_batch=2, checkpointing="full", precision="fp32"
    )
    assert found.best is not None
    assert found.best.accumulation == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"effective_batch": 8.0}, {"effective_batch": "64"}, {"effective_batch": 10**9}, {"samples": 2.5}, {"epochs": float("inf")},
        {"learning_rate": float("nan")}, {"learning_rate": "5e-5"}, {"host_cores": float("inf")}, {"from_batch": 1.5},
        {"margin": float("inf")}, {"margin": "30"}, {"micro_batch": 10**10}, {"samples": 5, "drop_last": True},
    ],
)  # fmt: skip
def test_numbers_that_are_none_are_refused_in_words(tiny: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_request(tiny, gpu="t4", **wrong)


def test_a_length_that_was_given_is_a_limit_and_the_data_decide_below_it(tiny: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word " * count}) + "\n" for count in (3, 60, 107)), encoding="utf-8")
    longest = brim.plan(tiny, gpu="t4", data=rows, effective_batch=4)
    limited = brim.plan(tiny, gpu="t4", data=rows, effective_batch=4, seq_len=1024)
    assert limited.workload.max_length == longest.workload.max_length < 200
    assert limited.sources["seq_len"] == longest.sources["seq_len"] == "data"
    assert any("--seq-len 1024 cuts none" in text for text in limited.assumptions)
    cut = brim.plan(tiny, gpu="t4", data=rows, effective_batch=4, seq_len=32)
    assert (cut.workload.max_length, cut.sources["seq_len"]) == (32, "given")


def test_a_plan_says_where_every_setting_came_from_and_shares_its_defaults_with_estimate(tiny: str) -> None:
    found = brim.plan(tiny, gpu="t4", seq_len=256, method="lora")
    assert found.best is not None
    assert {
        "method": "given",
        "seq_len": "given",
        "effective_batch": "default",
        "precision": "plan",
    }.items() <= found.sources.items()
    usual = brim.estimate(tiny, gpu="t4", seq_len=256, method="lora").settings
    assert (found.best.precision, found.best.optimizer, found.best.attention) == (
        usual.precision,
        usual.optimizer,
        usual.attention,
    )
