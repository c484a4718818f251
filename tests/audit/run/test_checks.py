"""What a run shows is told with its cause and its cure, and what only looks like it is not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brim.audit.found import Found
from brim.audit.run.examine import RunReport, examine_run
from brim.records import Slice, Split
from brim.records.findings import InForce
from tests.audit.run.ledgers import GIB, STEPS, Change, examined, observed, pulse, rules, step_of, write

WAITS = {"wait_seconds": 0.5}


def only(report: RunReport) -> Found:
    [found] = report.found
    return found


# Promises.


def test_a_clamped_batch_is_told_once_with_promise_and_fact(tmp_path: Path) -> None:
    found = only(observed(tmp_path, lambda _step: {"sequences": 2, "slices": ()}))
    assert (found.rule, found.line, found.confidence) == ("run-promise-broken", 2, "high")
    assert found.message == "Step 1 took 2 sequences, and 8 were promised. More of this kind: 119."
    assert found.in_force == (InForce(setting="effective_batch", set=8, in_force=2),)


def test_a_watched_script_may_take_a_short_last_window(tmp_path: Path) -> None:
    def short(step: int) -> dict[str, Any]:
        return {"sequences": 3, "slices": ()} if step % 10 == 0 else {}

    assert not observed(tmp_path, short).found


def test_a_watched_script_that_takes_more_than_promised_now_and_then_is_told(tmp_path: Path) -> None:
    def more(step: int) -> dict[str, Any]:
        return {"sequences": 12, "slices": ()} if step % 10 == 0 else {}

    assert rules(observed(tmp_path, more)) == ["run-promise-broken"]


def test_what_a_watched_script_promised_need_not_be_known(tmp_path: Path) -> None:
    report = observed(tmp_path, lambda _step: {"promised_sequences": None, "sequences": 3, "slices": ()}, effective_batch=None)
    assert not report.found


def test_different_breaches_are_told_apart(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        ids = step_of(step).sequence_ids
        if step in {5, 7}:
            return {"sequence_ids": (ids[0], *ids[:-1])}
        return {"padded_tokens": 1000} if step == 9 else {}

    report = examined(tmp_path, change)
    assert set(rules(report)) == {"run-promise-broken"}
    lines = {found.line: found.message for found in report.found}
    assert "took sequences more than once" in lines[6]
    assert lines[10] == "Step 9 counts 1000 padded tokens, and its micro-batches make 1024."


def test_a_summary_of_another_run_is_one_finding(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", [step_of(number) for number in range(1, 31)])
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    del lines[-2]
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    found = only(examine_run(tmp_path, "ledger.jsonl"))
    assert found.message.startswith("The summary says last_step = 30, and its steps make 29. More of this kind: ")


# Loading.


@pytest.mark.parametrize(
    ("fields", "rule", "cure"),
    [
        ({"workers": 0, "main_cpu": 0.9}, "run-data-bound", "give the loader num_workers=2"),
        ({"workers": 2, "worker_cpu": 0.99}, "run-data-bound", "they are too few: about 3 would keep up"),
        ({"workers": 4, "worker_cpu": 0.1, "main_cpu": 0.99}, "run-data-bound", "it does their work"),
        ({"workers": 4, "worker_cpu": 0.1, "main_cpu": 0.2}, "run-data-bound", "storage over the network"),
        ({"workers": 4, "worker_cpu": 0.7}, "run-data-bound", "try twice as many"),
        ({"workers": 4}, "run-data-bound", "try twice as many"),
        ({"workers": 4, "worker_cpu": 0.1, "blocked_seconds": 2.0, "read_bytes": 15 << 20}, "run-disk-bound", "10.0 MiB a second"),
        ({"workers": 0, "main_cpu": 0.3, "blocked_seconds": 0.6, "read_bytes": 1 << 20}, "run-disk-bound", "local disk"),
        ({"workers": 4, "worker_cpu": 0.95, "blocked_seconds": 0.6, "read_bytes": 1 << 20}, "run-data-bound", "too few"),
        ({"workers": 4, "worker_cpu": 0.1, "blocked_seconds": 2.0, "read_bytes": 0}, "run-data-bound", "network"),
        ({}, "run-data-bound", "more workers"),
    ],
    ids=[
        "no-workers", "busy-workers", "busy-main", "idle-workers", "middling-workers", "workers-only", "slow-disk",
        "slow-disk-without-workers", "busy-although-blocked", "blocked-by-others", "nothing-known",
    ],
)  # fmt: skip
def test_a_run_that_waits_is_told_which_knob_to_turn(tmp_path: Path, fields: dict[str, Any], rule: str, cure: str) -> None:
    found = only(examined(tmp_path, lambda _step: {**WAITS, "pulse": pulse(**fields)}))
    assert found.rule == rule
    assert found.message.startswith("Steps wait for data in 33% of their time. ")
    assert cure in found.message
    assert (found.line, found.end_line) == (2, STEPS + 1)


@pytest.mark.parametrize(
    ("fields", "cores", "cure"),
    [
        ({"workers": 0}, None, "num_workers=8, if there are cores for them."),
        ({"workers": 0}, 16, "num_workers=8."),
        ({"workers": 0}, 2, "num_workers=2. More workers would share the same cores (for each rank: 2)"),
        ({"workers": 2, "worker_cpu": 0.99}, 4, "they are too few: try 4."),
        ({"workers": 4, "worker_cpu": 0.99}, 4, "busy 99% of the time. More workers would share the same cores"),
        ({"workers": 4}, 4, "Workers of the loader: 4. More workers would share"),
    ],
    ids=["unknown", "many", "two", "room-for-two", "all-taken", "all-taken-and-nothing-known"],
)
def test_no_more_workers_are_asked_for_than_the_run_had_cores(
    tmp_path: Path, fields: dict[str, Any], cores: int | None, cure: str
) -> None:
    configuration = {} if cores is None else {"cores": cores}
    report = observed(tmp_path, lambda _step: {"wait_seconds": 9.0, "pulse": pulse(**fields)}, configuration=configuration)
    assert cure in only(report).message


def test_without_a_pulse_the_wait_is_told_with_less_confidence(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda _step: {**WAITS, "pulse": None}))
    assert (found.rule, found.confidence) == ("run-data-bound", "medium")


def test_waiting_at_the_start_of_each_epoch_is_a_loader_that_starts_anew(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        return {"epoch": step / 20, "wait_seconds": 8.0 if step % 20 == 1 else 0.01, "pulse": pulse(workers=4, worker_cpu=0.2)}

    found = only(observed(tmp_path, change))
    assert "persistent_workers=True" in found.message


def test_a_wait_behind_which_the_device_is_busy_costs_nothing_and_is_a_note(tmp_path: Path) -> None:
    report = examined(tmp_path, lambda _step: {**WAITS, "pulse": pulse(workers=2, worker_cpu=0.9, device_utilisation=0.98)})
    assert not report.found
    assert "the device is busy all the same" in report.notes[0]


def test_a_slow_start_is_no_slow_loader(tmp_path: Path) -> None:
    assert not examined(tmp_path, lambda step: {"wait_seconds": 20.0 if step == 1 else 0.01}).found


# Memory.


def test_room_is_told_with_how_far_the_micro_batches_could_go(tmp_path: Path) -> None:
    slices = (Slice(rank=0, sequences=1, length=128),) * 8
    report = examined(tmp_path, lambda _step: {"peak_reserved_bytes": 4 * GIB, "slices": slices})
    found = only(report)
    assert found.rule == "run-headroom"
    assert "held 4.00 GiB of 16.0 GiB (25%)" in found.message
    assert "about 3.6 times as large" in found.message


def test_what_is_fixed_in_memory_is_told_from_what_grows_with_the_micro_batch(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        length = 64 + step % 64
        slices = (Slice(rank=0, sequences=1, length=length),) * 8
        return {
            "slices": slices, "padded_tokens": 8 * length, "tokens": 8 * length,
            "peak_reserved_bytes": 3 * GIB + length * (GIB // 128),
        }  # fmt: skip

    # 3 GiB are fixed, and the longest row of 127 takes 1 GiB: 0.9 * 16 - 3 = 11.4 of them fit, of which a step has only 8.
    assert "about 8.0 times as large" in only(examined(tmp_path, change)).message


@pytest.mark.parametrize(
    ("changes", "header"),
    [
        ({"peak_reserved_bytes": 12 * GIB}, {}),
        ({"peak_reserved_bytes": 4 * GIB}, {"device": "cpu"}),
        ({"peak_reserved_bytes": 4 * GIB}, {"memory_limit_bytes": None}),
        ({"peak_reserved_bytes": 4 * GIB, "slices": (Slice(rank=0, sequences=8, length=128),)}, {}),
        ({"peak_reserved_bytes": None, "peak_allocated_bytes": None}, {}),
    ],
    ids=["full", "on-a-processor", "no-limit-known", "one-micro-batch", "no-peak-known"],
)
def test_room_that_nobody_could_use_is_not_told(tmp_path: Path, changes: dict[str, Any], header: dict[str, Any]) -> None:
    assert not examined(tmp_path, lambda _step: changes, **header).found


def test_an_allocator_that_gives_its_cache_back_again_and_again_thrashes(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda step: {"pulse": pulse(retries=step % 2)}))
    assert found.rule == "run-thrashing"
    assert "gave its cache back 57 times" in found.message


def test_swap_is_thrashing_on_the_host(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda step: {"pulse": pulse(swapped_bytes=64 << 20 if step % 3 == 0 else 0)}))
    assert found.rule == "run-thrashing"
    assert "to swap" in found.message


@pytest.mark.parametrize("fields", [{"retries": 3}, {"swapped_bytes": 1 << 30}], ids=["retries", "swap"])
def test_a_bad_moment_is_no_thrashing(tmp_path: Path, fields: dict[str, Any]) -> None:
    quiet = dict.fromkeys(fields, 0)
    assert not examined(tmp_path, lambda step: {"pulse": pulse(**(fields if step in {2, 60, 61} else quiet))}).found


def test_many_splits_are_told_with_the_budget_that_held(tmp_path: Path) -> None:
    split = Split(rank=0, phase="forward", sequences=4, into=2)
    found = only(examined(tmp_path, lambda step: {"splits": (split,) if step % 10 == 5 else (), "limit": 900.0}))
    assert (found.rule, found.line) == ("run-splits", 16)
    assert "11 of 114 steps" in found.message
    assert "A budget of 900 tokens held in half of the others; it was given as 1024." in found.message


def test_a_few_splits_are_what_splitting_is_for(tmp_path: Path) -> None:
    split = Split(rank=0, phase="forward", sequences=4, into=2)
    assert not examined(tmp_path, lambda step: {"splits": (split,) if step in {30, 60, 90} else ()}).found


# Speed.


def test_a_run_that_computes_ever_slower_is_told_so_with_its_growing_memory(tmp_path: Path) -> None:
    found = only(
        examined(tmp_path, lambda step: {"compute_seconds": 1 + step / 300, "peak_reserved_bytes": 14 * GIB + step * GIB // 100})
    )
    assert (found.rule, found.line, found.end_line) == ("run-slowing", 84, STEPS + 1)
    assert "slower than its first" in found.message
    assert "Computing itself takes longer" in found.message
    assert "Its memory grew by" in found.message


def test_a_run_that_waits_ever_longer_is_told_that_it_is_the_waiting(tmp_path: Path) -> None:
    report = examined(tmp_path, lambda step: {"wait_seconds": 0.01 + step / 400, "pulse": None})
    [found] = [each for each in report.found if each.rule == "run-slowing"]
    assert "Waiting for data has grown" in found.message


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_is_no_trend(tmp_path: Path, seed: int) -> None:
    seconds = np.random.default_rng(seed).lognormal(0.0, 0.25, STEPS + 1)
    assert not examined(tmp_path, lambda step: {"compute_seconds": float(seconds[step])}).found


def test_a_bad_spell_at_the_end_is_no_trend(tmp_path: Path) -> None:
    assert not examined(tmp_path, lambda step: {"compute_seconds": 3.0 if step > STEPS - 10 else 1.0}).found


def test_longer_sequences_at_the_end_are_no_slowness(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, Any]:
        length = 128 if step <= 60 else 256
        return {
            "slices": (Slice(rank=0, sequences=8, length=length),), "padded_tokens": 8 * length, "compute_seconds": (length / 128) ** 1.5,
        }  # fmt: skip

    assert not examined(tmp_path, change).found


# Loss.


def losses(value: Any) -> Change:
    return lambda step: {"loss": float(value(step, float(np.random.default_rng(step).normal())))}


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (lambda step, noise: 2 - 0.01 * step + 0.01 * noise if step < 80 else 1.2 + 0.2 * (step - 80), "loss-diverges"),
        (lambda step, noise: 2 + 0.4 * math.sin(step / 2) + 0.02 * noise, "loss-oscillates"),
        (lambda step, noise: 2 - 0.0008 * step + 0.005 * noise, "loss-crawls"),
        (lambda _step, noise: 2 + 0.02 * noise, "loss-flat"),
    ],
    ids=["diverges", "oscillates", "crawls", "flat"],
)
def test_a_loss_that_goes_wrong_is_told_by_the_rules_of_the_planner(tmp_path: Path, value: Any, rule: str) -> None:
    report = examined(tmp_path, losses(value))
    found = only(report)
    assert found.rule == rule
    assert report.loss is not None
    if report.loss.advice is not None:
        assert "Try a learning rate of " in found.message


def test_a_loss_that_is_not_a_number_is_told_at_its_step(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda step: {"loss": float("nan")} if step >= 70 else {}))
    assert (found.rule, found.line) == ("loss-diverges", 71)
    assert "The loss is nan at step 70" in found.message


def test_an_overflow_that_the_scaler_skipped_is_no_divergence(tmp_path: Path) -> None:
    assert not examined(tmp_path, lambda step: {"loss": float("inf"), "skipped": True} if step in {3, 50} else {}).found


def test_a_loss_that_was_not_written_down_says_nothing(tmp_path: Path) -> None:
    report = examined(tmp_path, lambda _step: {"loss": None})
    assert not report.found
    assert report.loss is None


def test_a_few_dozen_steps_need_not_have_learned_anything(tmp_path: Path) -> None:
    assert not examined(tmp_path, losses(lambda _step, noise: 2 + 0.02 * noise), steps=40).found


def test_a_loss_of_exactly_zero_is_told_at_its_first_step(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda step: {"loss": 0.0, "grad_norm": 0.0} if step >= 70 else {}))
    assert (found.rule, found.severity, found.line) == ("loss-flat", "high", 71)
    assert "exactly 0 from step 70 on" in found.message


def test_a_loss_of_zero_with_a_gradient_is_that_of_a_policy(tmp_path: Path) -> None:
    assert "exactly 0" not in " ".join(found.message for found in examined(tmp_path, lambda _step: {"loss": 0.0}).found)


def test_a_run_that_skips_most_of_its_steps_is_told(tmp_path: Path) -> None:
    found = only(examined(tmp_path, lambda step: {"skipped": step > 30}))
    assert (found.rule, found.line) == ("run-skipped", 32)
    assert "90 of 120 steps were skipped" in found.message


def test_a_flat_loss_of_a_run_that_began_elsewhere_is_no_fault(tmp_path: Path) -> None:
    def flat(step: int) -> dict[str, Any]:
        return {"step": step + 5000, "epoch": 0.5, "loss": 2 + 0.02 * float(np.random.default_rng(step).normal()), "slices": ()}

    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    assert "loss-flat" in rules(observed(tmp_path / "whole", flat))
    assert "loss-flat" not in rules(observed(tmp_path / "resumed", flat, resumed_from_step=5000))


def test_no_higher_rate_is_advised_where_the_schedule_has_come_down(tmp_path: Path) -> None:
    def flat(step: int, rate: float) -> dict[str, Any]:
        return {"loss": 2 + 0.02 * float(np.random.default_rng(step).normal()), "learning_rate": rate}

    for name in ("steady", "falling"):
        (tmp_path / name).mkdir()
    steady = only(examined(tmp_path / "steady", lambda step: flat(step, 2e-4)))
    falling = only(examined(tmp_path / "falling", lambda step: flat(step, 2e-4 * (1 - step / 150))))
    assert steady.rule == falling.rule == "loss-flat"
    assert "Try a learning rate" in steady.message
    assert "Try a learning rate" not in falling.message


# Noise.


def noisy(noise: float, signal: float = 1.0) -> Change:
    """Gradients whose noise for one token is `noise`, up to a tenth."""

    def change(step: int) -> dict[str, Any]:
        entry = step_of(step)
        this = noise * (1 + 0.1 * float(np.random.default_rng(step).normal()))
        slices = tuple(dataclasses.replace(one, gradient_square=signal + this / (one.items or 1)) for one in entry.slices)
        return {"slices": slices, "grad_norm": math.sqrt(signal + this / (entry.supervised_tokens or 1))}

    return change


def test_the_noise_scale_is_a_note(tmp_path: Path) -> None:
    report = examined(tmp_path, noisy(600.0))
    assert not report.found
    assert report.noise is not None
    assert report.noise.tokens == pytest.approx(600, rel=0.05)
    assert report.noise.sequences == pytest.approx(600 / 75, rel=0.1)
    assert report.noise.steps == STEPS // 2
    [note] = report.notes
    assert "noise scale is about" in note


@pytest.mark.parametrize(("noise", "word"), [(30.0, "smaller"), (100_000.0, "larger")])
def test_a_batch_far_from_the_noise_scale_is_told_as_a_guide(tmp_path: Path, noise: float, word: str) -> None:
    found = only(examined(tmp_path, noisy(noise)))
    assert (found.rule, found.confidence) == ("batch-beyond-noise", "low")
    assert f"a {word} effective batch" in found.message


def test_few_steps_give_a_rough_noise_scale_and_no_finding(tmp_path: Path) -> None:
    report = examined(tmp_path, noisy(30.0), steps=40)
    assert not report.found
    assert "how sure that is cannot be told from 40 steps" in report.notes[0]


def test_a_noise_scale_that_cannot_be_told_is_said_to_be_so(tmp_path: Path) -> None:
    report = examined(tmp_path, noisy(600.0, signal=0.0))
    assert not report.found
    assert "cannot be told" in report.notes[0]


def test_a_learning_rate_of_zero_trains_nothing_and_no_advice_follows_from_it(tmp_path: Path) -> None:
    report = examined(tmp_path, lambda step: {"loss": 2.0 + 0.05 * (step % 3), "learning_rate": 0.0})
    found = only(report)
    assert (found.rule, found.severity) == ("loss-flat", "high")
    assert found.message == "The learning rate is 0 at all 120 steps: nothing is trained."


def test_a_watched_run_that_counts_no_tokens_is_judged_by_its_sequences(tmp_path: Path) -> None:
    plain = {
        "tokens": None,
        "padded_tokens": None,
        "supervised_tokens": None,
        "slices": (Slice(rank=0, sequences=8, length=None),),
    }
    report = observed(tmp_path, lambda _step: plain, seed=None, drop_last=None, data_fingerprint=None)
    assert not report.found
    assert report.tokens_per_second is None
    assert report.sequences_per_second == pytest.approx(8, rel=0.1)
