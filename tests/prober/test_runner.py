"""Real children: however a trial ends is a result, told apart from every other end, and the next trial runs."""

from __future__ import annotations

from typing import Any

import pytest

from brim.machine.budget import ForkServer
from brim.machine.device import Reading
from brim.machine.recorded import RecordedDevice, Recording
from brim.prober.promise import Promise
from brim.prober.runner import Runner
from brim.prober.shapes import Shape
from brim.prober.subjects import Configured
from brim.prober.trial import Exam
from brim.records import Trial
from brim.sizes import GIB, MIB
from tests.clock import by_the_clock
from tests.prober.subjects import Toy, setup

LLAMA_MODULES = ("transformers", "transformers.models.llama.modeling_llama")
PHASES = ("forward", "backward", "optimizer", "evaluation", "saving")


def exam(size: int, **more: Any) -> Exam:
    longest = Shape(size, 16)
    return Exam(longest, **{"mixed": (Shape(1, 8), Shape(1, 4)), "evaluation": longest, "soak_seconds": 0.0, **more})


def runner(subject: Any, server: ForkServer, **more: Any) -> Runner:
    return Runner(subject, **{"device": "cpu", "promise": Promise(8, 1, 16), "server": server, **more})


@pytest.fixture(scope="module")
def passed(server: ForkServer) -> tuple[Trial, list[tuple[int, str | None]]]:
    """A tiny Llama, and what was seen while it ran."""
    seen: list[tuple[int, str | None]] = []
    tried = runner(
        Configured(setup()), server, memory_bytes=256 * MIB, preload=LLAMA_MODULES,
        watch=lambda size, phase, seconds: seen.append((size, phase)),
    )  # fmt: skip
    return tried.run(exam(4, accumulates=True)), seen


def test_a_size_that_runs_tells_what_it_took(passed: tuple[Trial, list[tuple[int, str | None]]]) -> None:
    trial, _seen = passed
    assert (trial.verdict, trial.phase, trial.message) == ("ok", None, "")
    assert (trial.micro_batch, trial.max_length, trial.steps, trial.allocator_retries) == (4, 16, 2, 0)
    assert trial.peak_device_bytes is not None
    assert trial.one_sequence_bytes is not None
    assert 0 < trial.one_sequence_bytes <= trial.peak_device_bytes < 256 * MIB
    assert trial.peak_device_bytes == trial.peak_reserved_bytes == trial.peak_allocated_bytes


def test_a_step_has_as_many_micro_batches_as_the_promise_says(passed: tuple[Trial, list[tuple[int, str | None]]]) -> None:
    trial, _seen = passed
    assert trial.micro_batch_seconds
    assert trial.update_seconds
    assert trial.step_seconds
    assert trial.step_seconds == pytest.approx(2 * trial.micro_batch_seconds + trial.update_seconds)
    assert trial.tokens_per_second == pytest.approx(8 * 16 / trial.step_seconds)
    assert trial.wait_seconds is not None
    assert trial.elapsed_seconds >= trial.step_seconds


def test_somebody_may_watch(passed: tuple[Trial, list[tuple[int, str | None]]]) -> None:
    assert all(size == 4 and phase in {None, *PHASES} for size, phase in passed[1])


@pytest.mark.parametrize("phase", PHASES)
def test_memory_runs_out_in_a_phase_that_has_a_name(phase: str, server: ForkServer) -> None:
    tried = runner(Toy(takes_bytes={phase: 64 * MIB}), server, memory_bytes=96 * MIB)
    trial = tried.run(exam(2))
    assert (trial.verdict, trial.phase) == ("out-of-memory", phase)
    assert "134217728" in trial.message
    assert trial.steps == (0 if phase in PHASES[:3] else 2)
    assert trial.step_seconds is None


@pytest.mark.parametrize(
    ("trouble", "where", "verdict", "words"),
    [
        ("killed", "forward", "killed", "SIGKILL"),
        ("illegal", "backward", "killed", "ONEDNN_MAX_CPU_ISA"),
        ("error", "forward", "crash", "the shapes of my layers do not agree"),
        ("error", "optimizer", "crash", "the shapes of my layers do not agree"),
        ("hang", "backward", "timeout", "longer than"),
        ("exit", "forward", "crash", "4"),
        ("exit without a word", "backward", "crash", "own code ended the process"),
        ("exit at once", "optimizer", "crash", "exit code 3"),
        ("killed", "evaluation", "killed", "SIGKILL"),
    ],
)
def test_every_end_is_a_verdict(trouble: str, where: str, verdict: str, words: str, server: ForkServer) -> None:
    process = server._process
    # One that hangs is given longer where the machine is so busy that it has not come that far.
    for seconds in (1.5, 6.0, 24.0) if trouble == "hang" else (60.0,):
        trial = runner(Toy(trouble=trouble, where=where), server, trial_seconds=seconds).run(exam(3))
        if trial.phase == where:
            break
    assert (trial.verdict, trial.phase) == (verdict, where)
    assert trial.steps == (2 if where == "evaluation" else 0)
    assert words in trial.message
    assert process is not None
    assert process is server._process
    assert process.poll() is None


def test_after_all_that_the_next_trial_runs(server: ForkServer) -> None:
    assert runner(Toy(), server).run(exam(3)).verdict == "ok"


def recorded(*readings: dict[str, int]) -> RecordedDevice:
    return RecordedDevice(
        Recording(
            device="cuda:0",
            readings=tuple(
                Reading(**{"total_bytes": 8 * GIB, "free_bytes": 5 * GIB, "reserved_bytes": 2 * GIB, **each}) for each in readings
            ),
        )
    )


def on_a_gpu(subject: Any, server: ForkServer, *readings: dict[str, int], **more: Any) -> Runner:
    return runner(subject, server, device="cuda:0", recorded=recorded(*readings), **more)


def test_a_device_that_is_recorded_stands_for_one_that_is_not_here(server: ForkServer) -> None:
    peaks = {"peak_allocated_bytes": GIB, "peak_reserved_bytes": 3 * GIB, "allocator_retries": 7}
    trial = on_a_gpu(Toy(), server, peaks).run(exam(2, others_bytes=GIB // 2))
    assert (trial.verdict, trial.allocator_retries) == ("ok", 0)
    assert (trial.peak_allocated_bytes, trial.peak_reserved_bytes) == (GIB, 3 * GIB)
    assert trial.peak_device_bytes == 3 * GIB + GIB // 2


def test_an_allocator_that_gives_memory_back_to_go_on_is_thrashing(server: ForkServer) -> None:
    counts = (2, 2, 3, 4, 5)
    trial = on_a_gpu(Toy(), server, *({"allocator_retries": count} for count in counts)).run(exam(2))
    assert (trial.verdict, trial.allocator_retries) == ("thrashing", 3)
    assert "3 times" in trial.message
    assert trial.step_seconds is not None


def test_memory_that_smaller_steps_left_in_the_cache_may_be_given_back_once(server: ForkServer) -> None:
    trial = on_a_gpu(Toy(), server, *({"allocator_retries": count} for count in (2, 2, 5))).run(exam(2))
    assert (trial.verdict, trial.allocator_retries) == ("ok", 3)


def test_memory_in_the_swap_is_thrashing(server: ForkServer) -> None:
    trial = on_a_gpu(Toy(), server, {}, {}, {"swapped_bytes": 300 * MIB}).run(exam(2))
    assert trial.verdict == "thrashing"
    assert "300 MiB" in trial.message
    assert on_a_gpu(Toy(), server, {}, {}, {"swapped_bytes": MIB}).run(exam(2)).verdict == "ok"


@by_the_clock
def test_a_cliff_in_speed_is_thrashing_on_a_gpu_alone(server: ForkServer) -> None:
    subject = Toy(sleeps={2: 0.03, 3: 0.03, 4: 0.15})
    tried = on_a_gpu(subject, server, {})
    verdicts = [tried.run(exam(size)).verdict for size in (2, 3, 4)]
    assert verdicts == ["ok", "ok", "thrashing"]
    here = runner(subject, server)
    if [here.run(exam(size)).verdict for size in (2, 4)] != ["ok", "ok"]:
        pytest.fail("a cliff on the CPU is no thrashing, however the clock ran")


@by_the_clock
def test_a_survey_times_smaller_shapes_and_stops_where_the_curve_falls(server: ForkServer) -> None:
    tried = runner(Toy(sleeps={8: 0.01, 4: 0.005, 2: 0.05}), server, memory_bytes=256 * MIB)
    largest = tried.run(exam(8))
    assert largest.verdict == "ok"
    shapes = (Shape(4, 16), Shape(2, 16), Shape(8, 4), Shape(1, 16), Shape(4, 16, padded=False))
    exams = tuple(Exam(shape, accumulates=shape.sequences < 8) for shape in shapes)
    points, trouble = tried.survey(exams, exam(8), largest)
    assert trouble == ""
    assert [(point.sequences, point.length, point.padded) for point in points] == [
        (4, 16, True), (2, 16, True), (8, 4, True), (1, 16, True), (4, 16, False),
    ]  # fmt: skip
    assert [point.accumulates for point in points] == [True, True, False, True, True]
    assert [point.tokens_per_second is None for point in points] == [False, False, True, False, False]
    assert all(point.peak_bytes > 0 and point.seconds > 0 for point in points)
    assert points[1].seconds > points[0].seconds

    slow_at_once = runner(Toy(sleeps={8: 0.005, 4: 0.05}), server)
    largest = slow_at_once.run(exam(8))
    points, _trouble = slow_at_once.survey(exams, exam(8), largest)
    assert [point.sequences for point in points] == [4, 8, 1, 4]


def test_a_survey_that_fails_says_why(server: ForkServer) -> None:
    tried = runner(Toy(), server)
    largest = tried.run(exam(4))
    tried.subject = Toy(trouble="error")
    points, trouble = tried.survey((Exam(Shape(2, 16)),), exam(4), largest)
    assert points == []
    assert "my layers" in trouble


def test_modules_that_are_not_there_are_not_asked_for(server: ForkServer) -> None:
    assert "no_such_module" not in runner(Toy(), server, preload=("no_such_module", "json")).modules
    assert "json" in runner(Toy(), server, preload=("no_such_module", "json")).modules
