"""The exam itself: what it runs and in which order, what it notes, and that every recipe passes it for real."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from brim.errors import UnsupportedError, UsageError
from brim.machine.budget import ForkServer
from brim.machine.device import Reading
from brim.machine.recorded import RecordedDevice, Recording
from brim.prober.promise import Promise
from brim.prober.runner import Runner
from brim.prober.shapes import Shape
from brim.prober.subjects import Configured
from brim.prober.trainee import Trainee, make_optimizer
from brim.prober.trial import Exam, Notes, device_of, examine, survey
from brim.sizes import GIB
from tests.prober.subjects import BERT, LLAMA, T5, Toy, setup


class Diary:
    """A subject that writes down what is asked of it."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def build(self, device: str) -> Trainee:
        layer = torch.nn.Linear(4, 1)

        def batch_of(shape: Shape) -> Shape:
            self.entries.append((shape.sequences, shape.length, shape.padded))
            return shape

        def update() -> None:
            self.entries.append("update")
            plain()

        def evaluate(shape: Shape) -> None:
            assert not layer.training
            self.entries.append("evaluation")

        def save() -> None:
            self.entries.append("save")

        made = Trainee(
            layer, torch.optim.SGD(layer.parameters(), lr=0.1), batch_of, lambda shape: layer(torch.ones(shape.sequences, 4)).mean(),
            device, evaluation=evaluate,
        )  # fmt: skip
        plain = made.update
        made.update, made.save = update, save  # type: ignore[method-assign]
        return made


def a_device() -> RecordedDevice:
    reading = Reading(total_bytes=8 * GIB, free_bytes=6 * GIB, peak_reserved_bytes=GIB)
    return RecordedDevice(Recording(device="cpu", readings=(reading,)))


def test_the_exam_in_its_order() -> None:
    diary = Diary()
    full = Shape(6, 16)
    exam = Exam(full, mixed=(Shape(2, 12), Shape(2, 4)), evaluation=Shape(5, 16), accumulates=True, soak_seconds=0.0)
    told = examine(diary, exam, "cpu", None, a_device())
    assert diary.entries == [
        (1, 16, True), (1, 16, True), "update",
        (1, 16, True), (6, 16, False), "update",
        (1, 16, True), (6, 16, True), "update",
        (2, 12, True), (2, 4, True), "update",
        (5, 16, True), "evaluation",
        "save",
    ]  # fmt: skip
    assert (told.phase, told.steps) == (None, 2)
    assert len(told.micro_batch_seconds) == len(told.update_seconds) == 2


def test_what_is_not_asked_for_is_not_run() -> None:
    diary = Diary()
    examine(diary, Exam(Shape(4, 8), masks=(False, False), first=2, saves=False, soak_seconds=0.0), "cpu", None, a_device())
    assert diary.entries == [(2, 8, True), "update", (4, 8, False), "update", (4, 8, False), "update"]


@pytest.mark.parametrize(("soak_seconds", "steps"), [(0.0, 2), (0.1, 2), (60.0, 8)])
def test_short_steps_go_on_for_a_while_and_long_ones_do_not(soak_seconds: float, steps: int) -> None:
    class Slow(Diary):
        def build(self, device: str) -> Trainee:
            made = super().build(device)
            plain = made.forward

            def forward(shape: Shape) -> torch.Tensor:
                time.sleep(0.1 if soak_seconds < 60 and shape.sequences > 1 else 0.0)
                return plain(shape)

            made.forward = forward  # type: ignore[method-assign, assignment]
            return made

    slow = Slow()
    told = examine(slow, Exam(Shape(4, 16), saves=False, soak_seconds=soak_seconds), "cpu", None, a_device())
    assert told.steps == len(told.micro_batch_seconds) == steps
    masks = [entry[2] for entry in slow.entries[2:] if entry != "update"]
    assert masks == [number % 2 == 1 for number in range(steps)]


def test_memory_that_runs_out_is_told_and_all_else_is_raised(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    class Failing(Diary):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def build(self, device: str) -> Trainee:
            made = super().build(device)

            def fail(loss: Any) -> None:
                raise self.error

            made.backward = fail  # type: ignore[method-assign]
            return made

    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    told = examine(Failing(no_memory), Exam(Shape(2, 8)), "cpu", str(notes), a_device())
    assert (told.phase, told.steps) == ("backward", 0)
    assert "2.00 GiB" in told.message
    assert Notes.read(notes) == ("backward", 0)
    with pytest.raises(ValueError, match="broken"):
        examine(Failing(ValueError("broken")), Exam(Shape(2, 8)), "cpu", None, a_device())


def test_notes_that_are_not_there_or_half_written_say_nothing(tmp_path: Path) -> None:
    assert Notes.read(tmp_path / "none") == (None, 0)
    (tmp_path / "half").write_text('{"phase": "fo')
    assert Notes.read(tmp_path / "half") == (None, 0)
    notes = Notes(str(tmp_path / "notes"))
    notes.enter("optimizer")
    notes.steps = 1
    notes.enter("saving")
    assert Notes.read(tmp_path / "notes") == ("saving", 1)


def test_a_survey_leaves_out_what_is_slower_than_the_fastest() -> None:
    exams = tuple(Exam(shape) for shape in (Shape(4, 16), Shape(2, 16), Shape(4, 8), Shape(1, 16)))
    passed = Exam(Shape(8, 16))
    points = survey(Toy(sleeps={4: 0.02}), exams, passed, "cpu", 1e-6, a_device())
    assert [point.exam for point in points] == [exams[0], exams[2], exams[3]]
    points = survey(Toy(), exams, passed, "cpu", 1e6, a_device())
    assert points[0].exam == exams[0]


def test_a_survey_accumulates_where_a_step_would() -> None:
    diary = Diary()
    exams = (Exam(Shape(4, 16), accumulates=True), Exam(Shape(8, 8)))
    survey(diary, exams, Exam(Shape(8, 16)), "cpu", 1e6, a_device())
    assert diary.entries == [
        (1, 16, True), "update", *2 * [(1, 16, True), (4, 16, True), "update"],
        (1, 8, True), "update", (8, 8, True), "update",
    ]  # fmt: skip


def test_a_shape_that_runs_out_of_memory_is_left_out_of_a_survey() -> None:
    class Small(Diary):
        def build(self, device: str) -> Trainee:
            made = super().build(device)
            plain = made.backward

            def backward(loss: Any) -> None:
                plain(loss)
                if self.entries[-1][0] == 4:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            def update() -> None:
                gradients = [float(weight.grad.sum()) for weight in made.model.parameters() if weight.grad is not None]
                self.entries.append(gradients)
                made.optimizer.zero_grad()

            made.backward, made.update = backward, update  # type: ignore[method-assign]
            return made

    small = Small()
    exams = tuple(Exam(shape, accumulates=True) for shape in (Shape(4, 16), Shape(2, 16)))
    points = survey(small, exams, Exam(Shape(8, 16)), "cpu", 1e6, a_device())
    assert [point.exam for point in points] == [exams[1]]
    alone, *_others, both = [entry for entry in small.entries if isinstance(entry, list)]
    assert both == pytest.approx([2 * each for each in alone])  # nothing is left of the step that failed


def test_a_loss_that_is_no_loss_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    losses: list[Any] = [lambda batch: 3.0, lambda batch: layer(torch.ones(1, 2)), lambda batch: torch.ones(())]
    for wrong in losses:
        trainee = Trainee(layer, None, lambda shape: shape, wrong, "cpu")
        with pytest.raises(UsageError, match="one number"):
            trainee.forward(None)


def test_devices_by_the_name_that_torch_has_for_them() -> None:
    assert device_of("cpu").name == "cpu"


def test_an_attention_kernel_of_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="flash2"):
        Configured(setup(attention="flash2")).build("cpu")


@pytest.mark.parametrize("word", ["adamw", "adamw-loop", "adamw-fused", "sgd", "sgd-momentum", "lion", "adafactor"])
def test_every_optimizer_steps(word: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = make_optimizer(word, [weight])
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(weight.detach(), torch.ones(4, 4))


RECIPES: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "amp-bf16": {"precision": "amp-bf16"},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": "full"},
    "seq2seq": {"config": T5, "task": "seq2seq", "target_length": 8},
    "classification": {"config": BERT, "task": "classification"},
    "adamw-8bit": {"optimizer": "adamw-8bit"},
    "qlora": {"method": "qlora", "precision": "amp-bf16"},
    "lora-8bit": {"method": "lora-8bit", "precision": "amp-bf16"},
}


@pytest.mark.slow
def test_weights_that_are_larger_than_the_limit_before_they_are_quantised_are_no_peak(server: ForkServer) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing is quantised here")
    large = LLAMA | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2}
    weights_bytes = 2 * (3 * 768 * 2048 + 3 * 768 * 768) * 4
    subject = Configured(setup(large, method="qlora", precision="amp-bf16"))
    limit = weights_bytes // 2
    runner = Runner(subject, "cpu", Promise(None, 1, 16), limit, preload=("transformers", "peft", "bitsandbytes"), server=server)
    trial = runner.run(Exam(Shape(2, 16), evaluation=Shape(2, 16), soak_seconds=0.0))
    assert (trial.verdict, trial.message) == ("ok", "")
    assert trial.peak_device_bytes is not None
    assert weights_bytes / 8 < trial.peak_device_bytes <= limit


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_passes_its_exam(recipe: str, server: ForkServer) -> None:
    asked = RECIPES[recipe]
    if "8bit" in recipe or recipe == "qlora":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing is quantised here")
    preload = ("transformers", "peft", *(["bitsandbytes"] if "8bit" in recipe or recipe == "qlora" else []))
    runner = Runner(Configured(setup(**asked)), "cpu", Promise(None, 1, 16), 1 * GIB, preload=preload, server=server)
    longest = Shape(2, 16, asked.get("target_length", 0))
    trial = runner.run(Exam(longest, mixed=(longest.part(0.5, 0.5),), evaluation=longest, accumulates=True, soak_seconds=0.0))
    assert (trial.verdict, trial.message) == ("ok", "")
    assert trial.steps == 2
