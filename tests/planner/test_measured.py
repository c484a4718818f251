"""A plan on a probe: what was measured stands for what is predicted, and a probe of something else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import brim
from brim.errors import RecordError, UsageError
from brim.planner.budget import budget
from brim.planner.measured import scaled
from brim.planner.option import Option, Sampler
from brim.planner.rates import rates_of
from brim.planner.request import make_request
from brim.records import LoaderSettings, Measurement, ShapePoint
from brim.sizes import GIB, MIB
from brim.workload.settings import Settings
from tests.planner.measurements import LENGTH, measurement, predicted, probe_of

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 344, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip
PLAIN: dict[str, Any] = {"checkpointing": "none", "seq_len": LENGTH}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return str(folder)


def best_of(model: str, probe: Measurement, **wishes: Any) -> brim.Candidate:
    found = brim.plan(model, probe=probe, **{"effective_batch": 64, **PLAIN, **wishes})
    assert found.best is not None
    assert found.best.memory is not None
    assert found.best.memory.peak_device_bytes + found.margin_bytes <= found.best.memory.limit_bytes
    return found.best


def bytes_at(model: str, probe: Measurement, size: int, **wishes: Any) -> int:
    """What the plan says of a micro-batch of this size."""
    found = best_of(model, probe, micro_batch=size, **{"effective_batch": 2 * size, **wishes})
    assert found.memory is not None
    return found.memory.peak_device_bytes


def test_bytes_of_the_structure_that_ran_are_those_that_were_measured(tiny: str) -> None:
    probe = probe_of(tiny, 1.2)
    assert probe.fit is not None
    assert bytes_at(tiny, probe, 8) == probe.trials[1].peak_device_bytes
    assert bytes_at(tiny, probe, 6) == pytest.approx(1.2 * predicted(tiny, 6), rel=0.01)
    assert bytes_at(tiny, probe, 12) == pytest.approx(probe.fit.bytes_of(12) + probe.fit.residual_bytes, abs=2)
    found = best_of(tiny, probe)
    assert any("by what was measured" in text for text in found.reasons)


def test_the_parts_of_the_memory_still_add_up(tiny: str) -> None:
    memory = best_of(tiny, probe_of(tiny, 1.234)).memory
    assert memory is not None
    own = {kind: size for kind, size in memory.by_kind.items() if kind not in {"fragmentation", "context"}}
    assert sum(own.values()) == memory.peak_allocated_bytes
    assert sum(memory.by_kind.values()) == memory.peak_device_bytes
    assert scaled(memory, memory.peak_device_bytes) == memory


def test_what_ran_fits_and_what_failed_does_not_whatever_is_predicted(tiny: str) -> None:
    ran = probe_of(tiny, 0.5, limit_bytes=predicted(tiny, 8) * 6 // 10, margin_bytes=0)
    assert best_of(tiny, ran).micro_batch == 8
    failed = probe_of(tiny, 1.0, failed=(9,))
    assert best_of(tiny, failed).micro_batch <= 8
    assert not brim.plan(tiny, probe=failed, effective_batch=18, micro_batch=9, **PLAIN).fits
    # A failure with less memory than there is now says nothing.
    assert brim.plan(tiny, probe=failed, memory=2 * GIB, effective_batch=18, micro_batch=9, **PLAIN).fits


def test_seconds_follow_the_micro_batches_and_updates_that_were_timed(tiny: str) -> None:
    probe = probe_of(tiny, ran=(8,), seconds_of=lambda _size, _length: 7.0)
    found = best_of(tiny, probe, micro_batch=8)
    assert found.speed is not None
    assert found.speed.step_seconds == pytest.approx(8 * 7.0 + 0.02, rel=0.01)
    slower = best_of(tiny, probe, micro_batch=8, checkpointing="full")
    assert slower.speed is not None
    assert 1.1 < slower.speed.step_seconds / found.speed.step_seconds < 1.6


def test_the_order_of_two_cuts_is_that_of_the_sizes_that_were_timed(tiny: str) -> None:
    seconds = {17: 0.0816, 70: 0.482}
    probe = probe_of(tiny, ran=(17, 70), length=64, seconds_of=lambda size, _length: seconds[size], limit_bytes=4 * GIB)
    wishes: dict[str, Any] = {"seq_len": 64, "effective_batch": 64}
    small, large = (best_of(tiny, probe, micro_batch=size, **wishes).speed for size in (16, 64))
    assert small is not None
    assert large is not None
    assert small.step_seconds == pytest.approx(4 * 0.0816 * 16 / 17 + 0.02, rel=0.1)
    assert large.step_seconds == pytest.approx(0.482 * 64 / 70 + 0.02, rel=0.1)
    found = brim.plan(tiny, probe=probe, checkpointing="none", **wishes)
    assert found.best is not None
    assert found.best.micro_batch <= 17
    assert any("a curve of the 2 sizes that were timed" in text for text in found.assumptions)


def test_points_of_the_full_length_are_part_of_the_curve_and_others_are_not(tiny: str) -> None:
    def point(size: int, seconds: float, length: int = LENGTH, padded: bool = True) -> ShapePoint:
        return ShapePoint(sequences=size, length=length, padded=padded, peak_bytes=20 * MIB, seconds=seconds)

    probe = probe_of(tiny, ran=(8,), seconds_of=lambda _size, _length: 3.0)
    points = point(2, 1.0), point(2, 2.0), point(8, 2.5), point(4, 0.1, length=128), point(5, 0.1, padded=False), point(6, 0.0)
    request = make_request(tiny, probe=replace(probe, points=points), **PLAIN)
    assert request.measured is not None
    assert list(request.measured.factors) == [2, 8]
    option = Option(request, request.base, Sampler(request), rates_of(request.where, request.host_cores))
    option.trace()
    roofline = option.speed.roofline
    assert roofline.micro_batch_seconds(2, LENGTH) == pytest.approx(1.0, rel=0.01)
    assert roofline.micro_batch_seconds(8, LENGTH) == pytest.approx(2.5, rel=0.01)
    assert roofline.optimizer_seconds() == pytest.approx(0.02, rel=0.01)


def test_another_structure_takes_as_much_of_its_prediction_as_the_one_that_ran(tiny: str) -> None:
    probe = probe_of(tiny, 1.3)
    wishes: dict[str, Any] = {"checkpointing": "full", "micro_batch": 8, "effective_batch": 16}
    plain = brim.plan(tiny, device="cpu", memory=GIB, seq_len=LENGTH, **wishes).best
    assert plain is not None
    assert plain.memory is not None
    assert bytes_at(tiny, probe, 8, checkpointing="full") == pytest.approx(1.3 * plain.memory.peak_device_bytes, rel=0.001)
    said = brim.plan(tiny, probe=probe, seq_len=LENGTH, **wishes)
    assert any("Another structure was measured" in text for text in said.assumptions)
    assert said.best is not None
    assert any("4 percent" in text for text in said.best.reasons), "the margin of a prediction is kept"


def test_one_trial_cannot_say_that_predictions_are_too_high(tiny: str) -> None:
    single, several = (make_request(tiny, probe=probe_of(tiny, 0.8, ran=ran), **PLAIN).measured for ran in ((8,), (4, 8)))
    assert single is not None
    assert several is not None
    assert single.ratio == 1.0
    assert several.ratio == pytest.approx(0.8, rel=0.001)


def test_shorter_sequences_than_those_that_were_probed_need_less(tiny: str) -> None:
    probe = probe_of(tiny, 1.1)
    short, long = bytes_at(tiny, probe, 8, seq_len=128), bytes_at(tiny, probe, 8)
    told = brim.estimate(tiny, device="cpu", memory=GIB, micro_batch=8, seq_len=128, accumulation=2).peak_device_bytes
    assert told <= short < long


def test_gradients_are_added_where_the_probe_had_none_beside_it(tiny: str) -> None:
    alone = probe_of(tiny, 1.0, accumulation=1)
    request = make_request(tiny, probe=alone, effective_batch=16, **PLAIN)
    option = Option(request, request.base, Sampler(request), rates_of(request.where, request.host_cores))
    assert option.is_probed
    single = next(cut for cut in make_request(tiny, probe=alone, effective_batch=8, **PLAIN).cuts if cut.micro_batch == 8)
    several = next(cut for cut in request.cuts if cut.micro_batch == 8)
    assert option.device_bytes(single) == alone.trials[1].peak_device_bytes
    assert option.device_bytes(several) >= option.device_bytes(single) + option.gradient_bytes


@pytest.mark.slow
def test_a_size_that_ran_as_the_only_one_of_its_step_proves_that_cut_and_no_other(tiny: str) -> None:
    taken = predicted(tiny, 8, 1)
    # Alone, 8 fit to the byte: beside the gradients of another micro-batch they do not.
    probe = probe_of(
        tiny, accumulation=1, effective_batch=8, ran=(8,), bytes_of=lambda *_shape: taken, limit_bytes=taken, margin_bytes=0
    )
    found = best_of(tiny, probe, effective_batch=8)
    assert (found.micro_batch, found.accumulation) == (8, 1)
    assert not brim.plan(tiny, probe=probe, effective_batch=16, micro_batch=8, **PLAIN).fits
    request = make_request(tiny, probe=probe, effective_batch=16, **PLAIN)
    option = Option(request, request.base, Sampler(request), rates_of(request.where, request.host_cores))
    several = next(cut for cut in request.cuts if cut.micro_batch == 8)
    assert option.device_bytes(several) == taken + option.gradient_bytes


def test_gradients_are_those_that_the_probe_has_counted(tiny: str) -> None:
    probe = probe_of(tiny, 1.0, accumulation=1, gradient_bytes=50 * MIB)
    alone = probe.trials[1].peak_device_bytes
    assert alone is not None
    assert bytes_at(tiny, probe, 8) == alone + 50 * MIB
    assert bytes_at(tiny, probe, 6) == pytest.approx(predicted(tiny, 6, 1) + 50 * MIB, rel=0.01)
    assert budget(tiny, probe=probe) == brim.Budget.measured(probe)


def test_a_failure_beside_others_is_not_disproved_by_a_larger_size_that_ran_alone(tiny: str) -> None:
    probe = probe_of(tiny, 1.0, accumulation=1, effective_batch=8, ran=(2, 8), failed=(4,))
    found = brim.plan(tiny, probe=probe, effective_batch=8, **PLAIN)
    assert found.best is not None
    assert found.best.micro_batch == 8
    assert any("gradients of other micro-batches at 8 sequences" in text for text in found.assumptions)
    assert not brim.plan(tiny, probe=probe, effective_batch=8, micro_batch=4, **PLAIN).fits
    assert brim.plan(tiny, probe=probe, effective_batch=4, micro_batch=4, **PLAIN).fits


def test_the_loader_is_the_one_that_was_measured(tiny: str) -> None:
    loader = LoaderSettings(num_workers=3, prefetch_factor=4, pin_memory=True, wait_fraction=0.013, reasons=("Three hide it.",))
    found = best_of(tiny, probe_of(tiny, loader=loader))
    assert (found.num_workers, found.prefetch_factor, found.pin_memory) == (3, 4, True)
    assert found.reasons[-2:] == ("num_workers is 3: measured, and the step waits 1.3% of its time for data.", "Three hide it.")


def test_device_limit_margin_and_length_are_those_of_the_probe(tiny: str) -> None:
    found = brim.plan(tiny, probe=probe_of(tiny), checkpointing="none")
    assert not found.machine.accelerators
    assert found.machine.origin == "recorded"
    assert found.workload.max_length == LENGTH
    assert found.margin_bytes == 20 * MIB
    assert found.best is not None
    assert found.best.memory is not None
    assert found.best.memory.limit_bytes == GIB
    assert any(text.startswith("Measured: 2 trials on cpu ran up to 8 x 256 tokens") for text in found.assumptions)
    assert not any("of the usual kind" in text for text in found.assumptions)
    asked = brim.plan(tiny, probe=probe_of(tiny), device="cpu", memory="700MiB", margin="10%", checkpointing="none")
    assert asked.best is not None
    assert asked.best.memory is not None
    assert asked.best.memory.limit_bytes == 700 * MIB
    assert asked.margin_bytes == 70 * MIB


def test_a_card_is_known_again(tiny: str) -> None:
    probe = probe_of(tiny, gpu="t4", limit_bytes=2 * GIB)
    asked: list[dict[str, Any]] = [{}, {"gpu": "t4"}, {"device": "cuda"}]
    for wishes in asked:
        request = make_request(tiny, probe=probe, precision="amp-fp16", **PLAIN, **wishes)
        assert request.where.gpu is not None
        assert (request.where.gpu.name, request.where.limit_bytes) == ("t4", 2 * GIB)
    pins: dict[str, Any] = {"precision": "amp-fp16", "optimizer": "adamw", "attention": "sdpa"}
    assert bytes_at(tiny, probe, 8, **pins) == probe.trials[1].peak_device_bytes


@pytest.mark.parametrize(
    "wishes", [{"gpu": "t4"}, {"gpu": "t4", "memory": "8GiB"}, {"device": "cuda"}], ids=["t4", "t4-8", "cuda"]
)
def test_a_probe_of_the_cpu_does_not_speak_for_a_card(tiny: str, wishes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"The probe ran on the CPU, and the plan is for (NVIDIA T4|a GPU)"):
        brim.plan(tiny, probe=probe_of(tiny), **PLAIN, **wishes)


def test_a_probe_of_one_card_does_not_speak_for_another_nor_for_the_cpu(tiny: str) -> None:
    probe = probe_of(tiny, gpu="t4")
    with pytest.raises(UsageError, match=r"ran on NVIDIA T4, and the plan is for .*3090"):
        brim.plan(tiny, probe=probe, gpu="rtx-3090", **PLAIN)
    with pytest.raises(UsageError, match="ran on NVIDIA T4, and the plan is for the CPU"):
        brim.plan(tiny, probe=probe, device="cpu", **PLAIN)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"method": "lora"}, "--method full, and the plan is for --method lora"),
        ({"optimizer": "lion"}, "--optimizer adamw, and the plan is for --optimizer lion"),
        ({"freeze": ("embed",)}, "--freeze nothing, and the plan is for --freeze embed"),
        ({"loss": "chunked"}, "--loss standard, and the plan is for --loss chunked"),
        ({"task": "classification"}, "--task causal-lm, and the plan is for --task classification"),
        ({"seq_len": 512}, "up to 256 tokens, and the plan has 512"),
    ],
    ids=["method", "optimizer", "freeze", "loss", "task", "length"],
)
def test_another_recipe_is_refused_in_one_sentence(tiny: str, wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make_request(tiny, probe=probe_of(tiny), **{**PLAIN, **wishes})
    assert caught.value.hint


def test_adapters_of_another_rank_are_another_recipe(tiny: str) -> None:
    probe = probe_of(tiny, settings=Settings(method="lora", lora_rank=16, accumulation=2))
    with pytest.raises(UsageError, match="--lora-rank 16, and the plan is for --lora-rank 8"):
        make_request(tiny, probe=probe, method="lora", **PLAIN)
    assert make_request(tiny, probe=probe, method="lora", lora_rank=16, **PLAIN).measured is not None


def test_what_may_vary_is_not_refused_and_another_batch_is_no_other_recipe(tiny: str) -> None:
    probe = probe_of(tiny)
    assert make_request(tiny, probe=probe, optimizer="lion", vary="optimizer", **PLAIN).measured is not None
    assert make_request(tiny, probe=probe, optimizer="adamw-loop", **PLAIN).measured is not None
    assert make_request(tiny, probe=probe, effective_batch=7, samples=50, **PLAIN).measured is not None


def test_the_model_may_be_named_in_another_way_and_may_not_be_another(tiny: str, tmp_path: Path) -> None:
    assert make_request(f"{tiny}/config.json", probe=probe_of(tiny), **PLAIN).measured is not None
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 5}), encoding="utf-8")
    with pytest.raises(UsageError, match="The probe is of"):
        make_request(str(tmp_path), probe=probe_of(tiny), **PLAIN)


def test_files_that_hold_no_probe_are_errors_that_say_so(tiny: str, tmp_path: Path) -> None:
    path = probe_of(tiny).write(tmp_path / "probe.json")
    assert make_request(tiny, probe=path, **PLAIN).measured is not None
    torn = tmp_path / "torn.json"
    torn.write_text(path.read_text(encoding="utf-8")[:400], encoding="utf-8")
    with pytest.raises(RecordError, match="not valid JSON"):
        make_request(tiny, probe=torn, **PLAIN)
    with pytest.raises(RecordError, match=r"nowhere\.json"):
        make_request(tiny, probe=tmp_path / "nowhere.json", **PLAIN)
    other = brim.estimate(tiny, device="cpu", memory=GIB, seq_len=64).write(tmp_path / "estimate.json")
    with pytest.raises(RecordError, match=r"holds brim\.estimate/1, and brim\.probe/1 is needed"):
        make_request(tiny, probe=other, **PLAIN)
    probe = probe_of(tiny)
    with pytest.raises(UsageError, match=r"trials\[1\]\.max_length of the probe is more than"):
        make_request(tiny, probe=replace(probe, trials=(probe.trials[0], replace(probe.trials[1], max_length=10**9))), **PLAIN)


def test_an_unfinished_probe_is_used_with_a_warning_and_an_empty_one_is_not(tiny: str) -> None:
    found = brim.plan(tiny, probe=probe_of(tiny, complete=False), **PLAIN)
    assert any("not finished" in text for text in found.warnings)
    with pytest.raises(UsageError, match="Nothing ran in this probe"):
        make_request(tiny, probe=probe_of(tiny, ran=(), failed=(1,)), **PLAIN)


def test_a_probe_that_ended_before_anything_ran_does_not_blame_memory(tiny: str) -> None:
    with pytest.raises(UsageError, match="ended before any size had run: its time or its trials") as caught:
        make_request(tiny, probe=probe_of(tiny, ran=(), failed=(8,), complete=False), **PLAIN)
    assert "memory" not in str(caught.value.hint)


def test_an_unfinished_probe_of_one_size_says_that_all_bytes_come_from_it(tiny: str) -> None:
    one, two = (brim.plan(tiny, probe=probe_of(tiny, ran=ran, complete=False), **PLAIN).warnings for ran in ((8,), (4, 8)))
    assert any("Only one size ran, 8 x 256 tokens" in text for text in one)
    assert not any("Only one size" in text for text in two)


@pytest.mark.parametrize("factor", [0.9, 1.2])
def test_more_memory_never_makes_the_best_plan_slower_nor_its_micro_batch_unproven(tiny: str, factor: float) -> None:
    probe = probe_of(tiny, factor, limit_bytes=300 * MIB, margin_bytes=3 * MIB, failed=(10,))
    seconds: list[float] = []
    for size in (40, 80, 120, 200, 290, 300, 310, 400, 800):
        found = brim.plan(tiny, probe=probe, memory=size * MIB, seq_len=LENGTH, effective_batch=48)
        if found.best is not None:
            assert found.best.speed is not None
            seconds.append(found.best.speed.step_seconds)
        if size == 300:
            assert found.best is not None
    assert len(seconds) >= 5
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_nothing_fits_says_how_much_is_missing_by_the_measure(tiny: str) -> None:
    found = brim.plan(tiny, probe=probe_of(tiny, 1.5), memory=10 * MIB, **PLAIN)
    assert not found.fits
    assert found.missing_bytes > 0


def test_a_sweep_over_micro_batches_or_lengths_stands_on_the_probe(tiny: str) -> None:
    probe = probe_of(tiny, 1.2, failed=(12,))
    rows = brim.sweep(tiny, "4,8,12", probe=probe, accumulation=2, **PLAIN).rows
    assert [row.memory_bytes for row in rows[:2]] == [trial.peak_device_bytes for trial in probe.trials[:2]]
    assert [row.keeps_margin for row in rows] == [True, True, False]
    lengths = brim.sweep(tiny, "seq-len:128,256", probe=probe, effective_batch=8, micro_batch=4, checkpointing="none").rows
    assert lengths[0].memory_bytes < lengths[1].memory_bytes
    with pytest.raises(UsageError, match="up to 256 tokens"):
        brim.sweep(tiny, "seq-len:256,512", probe=probe, effective_batch=8)
    with pytest.raises(UsageError, match="--probe measured one device"):
        brim.sweep(tiny, "gpu:t4,l4", probe=probe, effective_batch=8)


def test_the_largest_micro_batch_and_the_longest_sequence_are_solved_on_the_probe(tiny: str) -> None:
    probe = probe_of(tiny, 1.2, failed=(12,))
    largest = brim.solve(tiny, "micro-batch", probe=probe, accumulation=2, **PLAIN)
    assert 8 <= int(largest.answers[0].value) < 12
    longest = brim.solve(tiny, "seq-len", probe=probe, checkpointing="none", micro_batch=4, accumulation=2)
    assert longest.answers[0].value == str(LENGTH)
    assert "no longer sequences were probed" in longest.answers[0].reason
    for what in ("gpu", "model"):
        with pytest.raises(UsageError, match=f"--solve {what} looks for another"):
            brim.solve(tiny if what == "gpu" else None, what, probe=probe)


def test_a_budget_is_that_of_the_probe(tiny: str) -> None:
    probe = probe_of(tiny, 1.2, failed=(10,))
    found = budget(tiny, probe=probe, seq_len=LENGTH)
    assert found == brim.Budget.measured(probe)
    assert found.cost_of(8, LENGTH) <= found.limit < found.cost_of(10, LENGTH)
    assert budget(tiny, probe=probe, seq_len=LENGTH, margin="100MiB").limit == GIB - 100 * MIB
    with pytest.raises(UsageError, match="--checkpointing none, and the plan is for --checkpointing full"):
        budget(tiny, probe=probe, seq_len=LENGTH, checkpointing="full")
    with pytest.raises(UsageError, match="--method full"):
        budget(tiny, probe=probe, seq_len=LENGTH, method="lora")


def test_a_budget_adds_the_gradients_that_the_probe_did_not_see(tiny: str) -> None:
    alone = probe_of(tiny, 1.0, accumulation=1)
    several, single = budget(tiny, probe=alone), budget(tiny, probe=alone, accumulation=1)
    parameters = brim.estimate(tiny, device="cpu", memory=GIB, seq_len=64).trainable_parameters
    assert several.cost_of(4, LENGTH) - single.cost_of(4, LENGTH) == pytest.approx(4 * parameters, rel=0.01)


def test_a_plan_on_a_probe_survives_its_file(tiny: str, tmp_path: Path) -> None:
    found = brim.plan(tiny, probe=probe_of(tiny), **PLAIN)
    found.write(tmp_path / "plan.json")
    assert brim.Plan.read(tmp_path / "plan.json") == found
    again = brim.plan(tiny, probe=probe_of(tiny), **PLAIN)
    assert replace(again, elapsed_seconds=0.0) == replace(found, elapsed_seconds=0.0)


def test_the_structure_that_ran_is_looked_at_even_where_another_is_thought_better(tiny: str) -> None:
    limit = predicted(tiny, 8, 2, "t4") * 6 // 10
    probe = probe_of(tiny, 0.5, gpu="t4", limit_bytes=limit, margin_bytes=0)
    found = brim.plan(tiny, probe=probe, precision="amp-fp16", effective_batch=16, micro_batch=8, **PLAIN)
    assert found.best is not None
    assert "adamw" in {each.optimizer for each in (found.best, *found.alternatives)}
    rows = brim.sweep(tiny, "4,8", probe=probe, accumulation=2, **PLAIN).rows
    assert [row.memory_bytes for row in rows] == [trial.peak_device_bytes for trial in probe.trials]


def test_a_point_that_was_measured_is_not_understated_by_the_line(tiny: str) -> None:
    probe = probe_of(tiny)
    point = ShapePoint(sequences=1, length=LENGTH, peak_bytes=90 * MIB, seconds=0.1)
    assert bytes_at(tiny, replace(probe, points=(point,)), 2) >= 90 * MIB


def test_a_module_of_ones_own_has_the_budget_that_was_measured() -> None:
    import torch

    net = torch.nn.Linear(64, 64)
    several = measurement(model="Linear", length=128, ran=(4, 16))
    found = budget(net, probe=several)
    assert found == brim.Budget.measured(several)
    alone = measurement(model="Linear", length=128, ran=(4, 16), settings=Settings(), effective_batch=1)
    gradients = 4 * (64 * 64 + 64)
    assert budget(net, probe=alone).cost_of(8, 128) == found.cost_of(8, 128) + gradients
