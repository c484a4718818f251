"""Scale on paper: the same batch on any number of GPUs, what they wait for, where adding them stops paying, and how the batch may grow."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st

import brim
from brim.planner.request import make_request
from brim.planner.scaling import KNEE_SHARE, counts_of, steps_over_fewest
from brim.planner.search import search
from brim.records import Plan
from brim.sizes import GIB
from brim.step.cuts import cut

if TYPE_CHECKING:
    from pathlib import Path

    from brim.records import ScalePoint, Scaling

WIDE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 5504, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
"""0.44 billion parameters: large enough that a network is felt."""
ASKED: dict[str, Any] = {
    "gpu": "h100", "gpus": 8, "nodes": 16, "seq_len": 512, "effective_batch": 200, "attention": "sdpa", "precision": "amp-bf16",
    "checkpointing": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(WIDE), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def planned(model: str) -> Plan:
    return brim.plan(model, **ASKED, sharding="fsdp", noise_scale=100.0)


def curve(plan: Plan) -> Scaling:
    assert plan.scaling is not None
    return plan.scaling


@given(gpus=st.integers(1, 16), nodes=st.integers(1, 300))
def test_the_curve_has_what_was_asked_for_doublings_and_what_lies_beyond(gpus: int, nodes: int) -> None:
    counts = counts_of(gpus, nodes)
    totals = [inside * across for inside, across in counts]
    assert totals == sorted(set(totals))
    assert totals[0] == 1
    assert (gpus, nodes) in counts
    assert totals[-1] == 4 * gpus * nodes
    assert all(across == 1 or inside == gpus for inside, across in counts)
    assert all(after <= 2 * before for before, after in pairwise(totals))


@given(effective=st.integers(1, 5000), micro=st.integers(1, 64), ranks=st.integers(1, 4096))
@settings(deadline=None)
def test_the_effective_batch_is_exact_on_any_number_of_gpus(effective: int, micro: int, ranks: int) -> None:
    made = cut(effective, micro, ranks)
    assert (sum(made.slices) if made.slices else made.micro_batch * made.accumulation * ranks) == effective
    assert made.micro_batch <= micro


def test_the_planned_number_is_on_the_curve_as_it_was_planned(planned: Plan) -> None:
    assert planned.best is not None
    assert planned.best.memory is not None
    assert planned.best.speed is not None
    point = next(each for each in curve(planned).points if each.gpus == 128)
    assert (point.micro_batch, point.accumulation) == (planned.best.micro_batch, planned.best.accumulation)
    assert point.device_bytes == planned.best.memory.peak_device_bytes
    assert point.step_seconds == pytest.approx(planned.best.speed.step_seconds)
    assert point.tokens_per_second == pytest.approx(planned.best.speed.tokens_per_second)


def test_a_step_is_what_is_computed_and_what_is_waited_for(planned: Plan) -> None:
    for point in curve(planned).points:
        assert point.step_seconds == pytest.approx(point.compute_seconds + point.exposed_seconds)
        assert (point.inside_seconds > 0) == (point.gpus > 1)
        assert (point.between_seconds > 0) == (point.nodes > 1)
        assert point.idle_gpus == max(0, point.gpus - 200)
        assert point.micro_batch * point.accumulation * min(point.gpus, 200) >= 200


def test_efficiency_is_at_most_one_and_is_one_where_it_is_measured_from(planned: Plan) -> None:
    scaling = curve(planned)
    found = {point.gpus: point for point in scaling.points}
    assert found[scaling.reference_gpus].efficiency == 1
    best = found[scaling.reference_gpus].tokens_per_second / scaling.reference_gpus
    for point in scaling.points:
        assert point.efficiency is not None
        assert 0 < point.efficiency <= 1
        assert point.efficiency == pytest.approx(point.tokens_per_second / point.gpus / best)


def test_up_to_the_knee_added_gpus_pay_and_beyond_it_they_do_not(planned: Plan) -> None:
    scaling = curve(planned)
    best = max(point.tokens_per_second / point.gpus for point in scaling.points)
    knee = next(point for point in scaling.points if point.gpus == scaling.knee_gpus)

    def gained(before: ScalePoint, after: ScalePoint) -> float:
        return (after.tokens_per_second - before.tokens_per_second) / (after.gpus - before.gpus) / best

    assert all(gained(knee, point) < KNEE_SHARE for point in scaling.points if point.gpus > knee.gpus)
    assert any(gained(point, knee) >= KNEE_SHARE for point in scaling.points if point.gpus < knee.gpus)
    # With more GPUs than sequences nothing is gained at all.
    assert scaling.knee_gpus <= 200


def test_shards_shrink_with_the_number_of_gpus(planned: Plan) -> None:
    alike = [point for point in curve(planned).points if point.micro_batch == 1 and point.accumulation == 1]
    sizes = [point.device_bytes for point in alike]
    assert len(sizes) >= 2
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_faster_link_never_makes_a_step_slower(model: str, sharding: str) -> None:
    found = [curve(brim.plan(model, **ASKED, sharding=sharding, link=link)) for link in ("ethernet-10", "infiniband-ndr*8")]
    for slow, fast in zip(*(each.points for each in found), strict=True):
        assert fast.step_seconds <= slow.step_seconds
        assert fast.between_seconds <= slow.between_seconds
        assert fast.compute_seconds <= slow.compute_seconds * 1.5
    assert found[0].knee_gpus < found[1].knee_gpus


def test_numbers_of_gpus_on_which_it_does_not_fit_have_no_efficiency(model: str) -> None:
    found = brim.plan(model, **ASKED, sharding="fsdp", memory=5 * GIB)
    assert found.fits
    first, *_more = curve(found).points
    assert not first.fits
    assert first.efficiency is None
    assert first.device_bytes + found.margin_bytes > 5 * GIB
    for point in curve(found).points:
        assert point.fits == (point.device_bytes + found.margin_bytes <= 5 * GIB)
    assert curve(found).reference_gpus > 1


def test_one_slice_is_looked_at_where_gradients_that_wait_for_another_do_not_fit(model: str) -> None:
    """FSDP2 holds whole gradients while it accumulates: half the GPUs with slices twice as large may fit where two slices do not."""
    asked = {**ASKED, "gpus": 4, "nodes": 4, "effective_batch": 16, "sharding": "fsdp"}
    several = next(each for each in curve(brim.plan(model, **asked, micro_batch=1)).points if each.gpus == 8)
    alone = next(each for each in curve(brim.plan(model, **asked)).points if each.gpus == 8)
    assert (several.accumulation, alone.accumulation) == (2, 1)
    assert alone.device_bytes < several.device_bytes
    tight = brim.plan(model, **asked, memory=(alone.device_bytes + several.device_bytes) // 2, margin=0.0)
    point = next(each for each in curve(tight).points if each.gpus == 8)
    assert (point.fits, point.micro_batch, point.accumulation) == (True, 2, 1)


def test_the_guide_follows_the_noise_scale(planned: Plan) -> None:
    guide = curve(planned).batches
    assert guide.noise_scale == 100
    assert [point.effective_batch for point in guide.points] == [200 << power for power in range(6)]
    assert guide.points[0].time == 1
    for point in guide.points:
        assert point.steps == 1 + 100 / point.effective_batch
        assert point.examples == 1 + point.effective_batch / 100
        # The two meet: (S / S' - 1)(E / E' - 1) = 1.
        assert (point.steps - 1) * (point.examples - 1) == pytest.approx(1)
    first, last = guide.points[0], guide.points[-1]
    assert last.time == pytest.approx(last.step_seconds * (1 + 100 / 6400) / (first.step_seconds * (1 + 100 / 200)))
    if guide.enough_batch is not None:
        assert next(point for point in guide.points if point.effective_batch == guide.enough_batch).efficiency >= KNEE_SHARE


@given(batch=st.floats(1, 1e6), noise=st.floats(1, 1e6))
def test_at_the_noise_scale_twice_the_fewest_steps_are_taken(batch: float, noise: float) -> None:
    assert steps_over_fewest(noise, noise) == 2
    assert steps_over_fewest(batch, noise) > 1
    assert steps_over_fewest(2 * batch, noise) < steps_over_fewest(batch, noise)


def test_without_a_noise_scale_the_guide_says_nothing_of_learning(model: str) -> None:
    guide = curve(brim.plan(model, **ASKED, sharding="ddp")).batches
    assert guide.noise_scale is None
    assert all(point.steps is None and point.examples is None and point.time is None for point in guide.points)


def test_slices_that_were_asked_for_are_kept_on_the_whole_curve(model: str) -> None:
    found = brim.plan(model, **ASKED, sharding="ddp", micro_batch=2)
    assert {point.micro_batch for point in curve(found).points} <= {1, 2}
    assert next(point for point in curve(found).points if point.gpus == 1).accumulation == 100


def test_one_gpu_and_the_cpu_have_no_curve(model: str) -> None:
    asked = {**ASKED, "gpus": 1, "nodes": 1, "effective_batch": 4}
    alone = brim.plan(model, **asked, link="ethernet-10")
    assert alone.scaling is None
    assert any("--link" in text for text in alone.warnings)


def test_a_training_asks_for_no_curve(model: str) -> None:
    from brim.planner.plan import plan_request

    assert plan_request(make_request(model, **ASKED, sharding="ddp")).scaling is None


def test_the_default_link_is_said(planned: Plan, model: str) -> None:
    assert any("no --link was given" in text for text in planned.assumptions)
    said = brim.plan(model, **ASKED, sharding="ddp", link="infiniband-hdr")
    assert not any("no --link was given" in text for text in said.assumptions)
    assert curve(said).between.name == "infiniband-hdr"


def test_the_curve_survives_its_file_and_older_files_have_none(planned: Plan, tmp_path: Path) -> None:
    path = planned.write(tmp_path / "plan.json")
    assert Plan.read(path) == planned
    older = json.loads(path.read_text())
    del older["scaling"]
    assert Plan.from_json(json.dumps(older)) == replace(planned, scaling=None)


def test_no_engine_is_chosen_that_another_beats_on_the_given_link(model: str) -> None:
    asked = {**ASKED, "effective_batch": 512}
    for link in ("ethernet-10", "infiniband-ndr*8"):
        found = search(make_request(model, **asked, link=link))
        assert found.best is not None
        assert all(found.best.seconds <= other.seconds for other in found.others)
