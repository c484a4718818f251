"""`brim.probe` on a tiny Llama: what it calls the largest really trains, and what it says of it can be checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.errors import OutOfMemoryError, RunError, UnsupportedError, UsageError
from brim.machine.budget import ForkServer
from brim.prober import results
from brim.prober.request import LEAST_MARGIN_BYTES, read_request
from brim.prober.runner import Runner
from brim.records import Measurement
from tests.clock import by_the_clock
from tests.prober.conftest import kept
from tests.prober.subjects import LLAMA, Plain, plain_step, train_plainly

MEMORY = "96MiB"
LENGTH = 256
WIDE = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
"""Gradients are half of what its step takes: a step that accumulates needs more than one in a single piece."""


@dataclass(frozen=True)
class Found:
    """A probe that was run, and where it was kept."""

    record: Measurement
    lines: list[str]
    cache: Path
    folder: str

    def again(self, **more: Any) -> Measurement:
        return brim.probe(self.folder, **{"device": "cpu", "memory": MEMORY, "seq_len": LENGTH, **more})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def found(tiny: str, server: ForkServer, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cache, lines = tmp_path_factory.mktemp("cache"), list[str]()
    (cache / "memory").symlink_to(traces, target_is_directory=True)
    with kept(server) as patch:
        patch.setenv("BRIM_CACHE", str(cache))
        record = brim.probe(tiny, device="cpu", memory=MEMORY, seq_len=LENGTH, say=lines.append)
    return Found(record, lines, cache, tiny)


@pytest.fixture
def known(found: Found, one_server: None, monkeypatch: pytest.MonkeyPatch) -> Found:
    """The same, beside what it left in the cache."""
    monkeypatch.setenv("BRIM_CACHE", str(found.cache))
    return found


def plainly(server: ForkServer, size: int, memory_bytes: int, steps: int = 5) -> str:
    modules = ("torch", "transformers.models.llama.modeling_llama")
    return server.run(train_plainly, size, LENGTH, steps, memory_bytes=memory_bytes, preload=modules, timeout_seconds=120).verdict


def test_the_largest_trains_in_somebody_elses_loop_and_more_does_not(found: Found, server: ForkServer) -> None:
    record = found.record
    assert record.largest is not None
    assert record.limit_bytes is not None
    size = record.largest.micro_batch
    assert size > 4
    assert plainly(server, size, record.limit_bytes) == "ok"
    assert plainly(server, size + 2, record.limit_bytes - record.margin_bytes, steps=2) == "out-of-memory"


def test_the_record_says_what_ran(found: Found) -> None:
    record = found.record
    assert record.complete
    assert (record.device, record.objective, record.limit_bytes) == ("cpu", "fastest", 96 << 20)
    assert record.margin_bytes == LEAST_MARGIN_BYTES == 2 << 20
    assert record.settings is not None
    assert record.largest is not None
    assert record.settings.micro_batch == record.largest.micro_batch
    assert (record.workload.max_length, record.workload.effective_batch) == (LENGTH, record.largest.micro_batch)
    assert not record.machine.accelerators
    assert {"torch", "brim", "transformers"} <= set(record.versions)
    assert record.loader is None


def test_it_took_a_handful_of_trials_and_said_so(found: Found) -> None:
    assert len(found.record.trials) <= 4
    told = [line for line in found.lines if line.startswith("Trial ")]
    assert len(told) == len(found.record.trials)
    assert f"x {LENGTH}: " in told[0]


def test_largest_and_fastest_are_sizes_that_ran(found: Found) -> None:
    record = found.record
    assert record.largest is not None
    assert record.fastest is not None
    ran = {trial.micro_batch for trial in record.trials if trial.verdict == "ok"}
    assert record.largest.micro_batch == max(ran)
    assert record.fastest.tokens_per_second >= record.largest.tokens_per_second > 0
    assert record.largest.peak_bytes <= (record.limit_bytes or 0)


def test_the_line_goes_through_what_was_measured(found: Found) -> None:
    record = found.record
    assert record.fit is not None
    assert record.largest is not None
    assert record.fit.bytes_per_sequence > 0
    assert record.fit.bytes_of(record.largest.micro_batch) == pytest.approx(record.largest.peak_bytes, rel=0.02)


def test_the_prediction_is_held_against_what_was_measured(found: Found) -> None:
    record = found.record
    assert record.versus is not None
    assert record.predicted is not None
    assert record.largest is not None
    assert record.versus.micro_batch == record.largest.micro_batch
    assert record.versus.measured_bytes == record.largest.peak_bytes
    assert record.versus.predicted_bytes == record.predicted.peak_device_bytes
    assert record.versus.error == pytest.approx(record.versus.predicted_bytes / record.versus.measured_bytes - 1)
    assert abs(record.versus.error) < 0.25
    assert record.versus.predicted_largest > 0


def test_smaller_shapes_are_points_of_a_cost_model(found: Found) -> None:
    points = found.record.points
    assert found.record.largest is not None
    assert len({point.length for point in points}) > 1
    assert {point.padded for point in points} == {True, False}
    assert all(0 < point.peak_bytes <= found.record.largest.peak_bytes * 1.05 and point.seconds > 0 for point in points)


def test_written_and_read_it_is_the_same(found: Found, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    found.record.write(path)
    assert Measurement.read(path) == found.record
    assert json.loads(path.read_text())["schema"] == "brim.probe/1"


def test_the_same_question_is_answered_from_the_cache(known: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_trials(*_arguments: Any, **_keywords: Any) -> Any:
        raise AssertionError("a trial ran")

    monkeypatch.setattr(Runner, "run", no_trials)
    output = tmp_path / "probe.json"
    assert known.again(output=output) == known.record
    assert Measurement.read(output) == known.record
    with pytest.raises(AssertionError, match="a trial ran"):
        known.again(memory="95MiB")
    with pytest.raises(AssertionError, match="a trial ran"):
        known.again(objective="largest")
    with pytest.raises(AssertionError, match="a trial ran"):
        known.again(cache=False)


def test_the_same_model_elsewhere_is_known_under_the_name_that_was_asked(known: Found, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    lines = list[str]()
    record = brim.probe(other, device="cpu", memory=MEMORY, seq_len=LENGTH, say=lines.append)
    assert not lines
    assert record.workload.model == str(other)
    assert record.trials == known.record.trials


def test_a_damaged_file_in_the_cache_is_no_answer(known: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = read_request(known.folder, device="cpu", memory=MEMORY, settings={"seq_len": LENGTH})
    assert results.find(request) == known.record
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path))
    results.keep(request, known.record)
    (path,) = (tmp_path / "probe").iterdir()
    for text in ("", "{", path.read_text()[:-200], '{"schema": "brim.plan/1"}'):
        path.write_text(text)
        assert results.find(request) is None


def test_a_cache_that_cannot_be_written_is_done_without(known: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "file"))
    request = read_request(known.folder, device="cpu", memory=MEMORY, settings={"seq_len": LENGTH})
    results.keep(request, known.record)
    assert results.find(request) is None


def test_no_size_is_larger_than_the_effective_batch(found: Found, one_server: None) -> None:
    record = found.again(effective_batch=6, objective="largest", cache=False)
    assert record.largest is not None
    assert (record.largest.micro_batch, record.workload.effective_batch) == (6, 6)
    assert len(record.trials) == 1
    assert record.points == ()


def test_a_size_below_the_effective_batch_is_examined_among_gradients(tiny: str) -> None:
    request = read_request(tiny, device="cpu", memory=MEMORY, effective_batch=6, settings={"seq_len": LENGTH})
    assert request.most == 6
    assert [request.exam(size).accumulates for size in (1, 5, 6)] == [True, True, False]
    alone = read_request(tiny, device="cpu", memory=MEMORY, settings={"seq_len": LENGTH})
    assert not alone.exam(5).accumulates


@pytest.mark.long
def test_the_effective_batch_in_one_piece_is_tried_though_smaller_pieces_take_more(tmp_path: Path, one_server: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE), encoding="utf-8")
    for _attempt in range(4):  # the whole takes 112 to 117 of 120 MiB, as the heap happens to grow
        record = brim.probe(
            tmp_path,
            device="cpu",
            memory="120MiB",
            seq_len=16,
            effective_batch=8,
            optimizer="sgd",
            objective="largest",
            cache=False,
        )
        assert record.largest is not None
        if record.largest.micro_batch == 8:
            break
    assert record.largest is not None
    assert record.largest.micro_batch == 8
    assert record.versus is not None
    assert record.versus.predicted_largest < 8  # what a search from below would come to
    assert {trial.micro_batch for trial in record.trials} & {1, 2, 3}
    assert all(trial.accumulates == (trial.micro_batch < 8) for trial in record.trials)


def test_smaller_shapes_accumulate_where_they_would(tiny: str) -> None:
    request = read_request(tiny, device="cpu", memory=MEMORY, effective_batch=8, settings={"seq_len": LENGTH})
    exams = request.smaller_exams(8)
    assert {exam.longest.sequences for exam in exams} >= {1, 4, 8}
    assert all(exam.accumulates == (exam.longest.sequences < 8) for exam in exams)


def test_a_limit_on_trials_leaves_what_was_found(found: Found, one_server: None) -> None:
    record = found.again(max_trials=1, micro_batch=2, cache=False)
    assert not record.complete
    assert [trial.micro_batch for trial in record.trials] == [2]
    assert record.largest is not None
    assert record.largest.micro_batch == 2


def test_a_limit_on_time_that_ends_before_the_first_trial_is_told(found: Found, one_server: None) -> None:
    with pytest.raises(RunError, match="before the first trial") as caught:
        found.again(time_limit=0.001, cache=False)
    assert "--time-limit" in str(caught.value.hint)


@pytest.fixture(scope="module")
def with_data(tiny: str, server: ForkServer, traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    folder = tmp_path_factory.mktemp("data")
    (folder / "memory").symlink_to(traces, target_is_directory=True)
    data = folder / "data.jsonl"
    rows = [{"text": "a word " * (20 + 7 * number)} for number in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with kept(server) as patch:
        patch.setenv("BRIM_CACHE", str(folder))
        return brim.probe(tiny, data=data, device="cpu", memory=MEMORY)


def test_the_lengths_are_those_of_the_data(with_data: Measurement) -> None:
    assert with_data.workload.samples == 12
    assert with_data.workload.lengths
    assert max(trial.micro_batch for trial in with_data.trials) <= 12
    assert 20 < with_data.workload.max_length <= 256
    assert any("guessed" in text for text in with_data.assumptions)
    assert len({point.length for point in with_data.points}) >= 3


def test_the_loader_is_measured_with_the_data(with_data: Measurement) -> None:
    assert with_data.loader is not None
    assert with_data.loader.num_workers >= 0
    assert with_data.loader.reasons


def test_a_function_that_builds_a_model_of_transformers(one_server: None) -> None:
    record = brim.probe(
        "tests.prober.subjects:tiny_llama", device="cpu", memory=MEMORY, seq_len=64, objective="largest", effective_batch=8
    )
    assert record.largest is not None
    assert record.trials[0].verdict in {"ok", "out-of-memory"}
    assert record.workload.model == "tests.prober.subjects:tiny_llama"


def test_a_module_of_ones_own_with_its_step(one_server: None) -> None:
    record = brim.probe(
        Plain(), step=plain_step, device="cpu", memory="64MiB", seq_len=512, objective="largest", effective_batch=40
    )
    assert record.largest is not None
    assert record.complete
    assert record.largest.micro_batch > 1


def test_a_module_that_nobody_says_how_to_call_is_refused() -> None:
    with pytest.raises(UsageError, match="does not know how to call it") as caught:
        brim.probe(Plain(), device="cpu", memory="64MiB", seq_len=32)
    assert "step" in str(caught.value.hint)


def test_an_error_of_the_model_is_told_in_its_words(one_server: None) -> None:
    with pytest.raises(RunError, match=r"expanded size \(2048\) must match \(2\)"):
        brim.probe("tests.prober.subjects:broken_llama", device="cpu", memory=MEMORY, seq_len=64)


def test_where_not_even_one_sequence_trains_it_says_so(found: Found, one_server: None) -> None:
    with pytest.raises(OutOfMemoryError, match="even one sequence of 256 tokens") as caught:
        found.again(memory="5400KiB", cache=False)
    assert "brim plan" in str(caught.value.hint)


def test_what_is_far_beyond_the_limit_is_refused_without_a_trial(found: Found, one_server: None) -> None:
    lines = list[str]()
    with pytest.raises(OutOfMemoryError, match="for one sequence of 256 tokens") as caught:
        found.again(memory="3MiB", cache=False, say=lines.append)
    assert "2.25 MiB may be taken" in str(caught.value)  # the margin is a quarter at most
    assert "brim plan" in str(caught.value.hint)
    assert not [line for line in lines if line.startswith("Trial ")]


def test_without_a_gpu_and_without_a_device_nothing_is_guessed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from brim.machine import detect
    from brim.machine.records import Machine

    here = detect.detect()
    monkeypatch.setattr(detect, "detect", lambda: Machine(accelerators=(), host=here.host, origin="detected"))
    with pytest.raises(UsageError, match="no GPU") as caught:
        brim.probe(tiny, seq_len=64)
    assert "--device cpu" in str(caught.value.hint)


@by_the_clock  # other processes take memory and give it back between the two looks
def test_without_a_limit_the_cpu_may_take_most_of_what_is_free(tiny: str) -> None:
    from brim.machine.host import host

    request = read_request(tiny, device="cpu", settings={"seq_len": 64})
    assert request.where.limit_bytes == pytest.approx(0.8 * host().available_bytes, rel=0.2)
    assert any("80%" in text and "--memory" in text for text in results.record(request, trials=()).assumptions)
    asked = read_request(tiny, device="cpu", memory=MEMORY, settings={"seq_len": 64})
    assert not any("80%" in text for text in results.record(asked, trials=()).assumptions)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sharding": "fsdp", "gpus": 2}, "one process"),
        ({"offload": "optimizer"}, "one process"),
    ],
    ids=["sharding", "offload"],
)
def test_what_takes_several_devices_is_refused(tiny: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises((UnsupportedError, UsageError), match=words):
        brim.probe(tiny, device="cpu", memory=MEMORY, seq_len=64, **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"objective": "best"}, "fastest or largest"),
        ({"effective_batch": 0}, "effective-batch"),
        ({"max_trials": True}, "max-trials"),
        ({"time_limit": 0}, "time-limit"),
        ({"effective_batch": 8, "accumulation": 2}, "give one"),
        ({"gpu_index": 1}, "contradict"),
        ({"margin": "100%"}, "margin"),
        ({"tokenizer": "gpt2"}, "--data"),
        ({"memory": "900TiB"}, "of this machine"),
    ],
    ids=["objective", "effective batch", "trials", "time", "accumulation", "index", "margin", "tokenizer", "memory"],
)
def test_a_wrong_wish_is_told_before_anything_runs(tiny: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        brim.probe(tiny, **{"device": "cpu", "memory": MEMORY, "seq_len": 64, **asked})
