"""Ctrl-C and SIGTERM: the step is finished and saved, and the run goes on from there another time."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from brim.trainer.stopping import SIGNALS, StopOnSignal
from tests import torchrun
from tests.trainer import saves_program
from tests.trainer.saves import ROWS, names, safe
from tests.trainer.small import ids_of, lines, near, trainer_of, weights


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore Ctrl-C; here it is heard."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def during(step: int, act: Callable[[], None]) -> TrainerCallback:
    class During(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            if state.global_step + 1 == step:
                act()

    return During()


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["ctrl-c", "term"])
def test_the_first_signal_finishes_the_step_and_saves_it(tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int) -> None:
    straight = safe(tmp_path / "straight", max_steps=6)
    straight.train()
    folder = tmp_path / "run"
    # One Ctrl-C may come twice, from the terminal and from a launcher.
    trainer = safe(
        folder,
        max_steps=6,
        callbacks=[during(3, lambda: send(number, number))],
        eval_strategy="epoch",
        eval_dataset=ROWS[:2],
    )
    handlers = [signal.getsignal(each) for each in SIGNALS]
    with StopOnSignal(trainer, same_press_seconds=60.0) as stop:
        trainer.train()
    assert stop.stopped_by == number
    assert [signal.getsignal(each) for each in SIGNALS] == handlers
    assert names(folder) == ["checkpoint-2", "checkpoint-3"]
    [summary] = lines(folder, "summary")
    assert (summary["finished"], summary["reason"]) == (False, f"Stopped by {signal.Signals(number).name}.")
    assert "brim: finishes this step, saves and stops." in capfd.readouterr().err
    again = safe(folder, max_steps=6, eval_strategy="epoch", eval_dataset=ROWS[:2])
    with StopOnSignal(again) as stop:
        again.train(resume_from_checkpoint=True)
    assert stop.stopped_by is None
    assert torch.equal(weights(again.model), weights(straight.model))
    # The evaluation at the end of the epoch was due at step 3, and made when the run went on.
    assert [entry["step"] for entry in again.state.log_history if "eval_loss" in entry] == [3, 6]


def test_one_press_may_take_a_second_to_come_twice() -> None:
    assert 0.5 <= inspect.signature(StopOnSignal).parameters["same_press_seconds"].default <= 3


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    trainer = safe(tmp_path, callbacks=[during(3, lambda: send(signal.SIGTERM, signal.SIGTERM))])
    with pytest.raises(KeyboardInterrupt), StopOnSignal(trainer, same_press_seconds=0.0) as stop:
        trainer.train()
    assert stop.stopped_by == signal.SIGTERM
    assert trainer.state.global_step == 2
    assert names(tmp_path) == ["checkpoint-2"]
    assert lines(tmp_path, "summary")[0]["last_step"] == 2


def test_a_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    saves = []

    class Counting(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_keywords: Any) -> None:
            saves.append(state.global_step)

    trainer = safe(tmp_path, save_strategy="epoch", callbacks=[Counting(), during(4, lambda: send(signal.SIGTERM))])
    with StopOnSignal(trainer):
        trainer.train()
    assert saves == [3, 4]


def test_it_works_with_any_trainer_of_brim(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ROWS, callbacks=[during(2, lambda: send(signal.SIGTERM))])
    with StopOnSignal(trainer):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]


def test_workers_of_the_loader_live_through_a_signal_to_all_processes(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())

    def everybody() -> None:
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        for number in (signal.SIGINT, signal.SIGTERM):
            for worker in workers:
                os.kill(worker.pid or 0, number)
        send(signal.SIGINT)

    # The signal asks for a stop after the step; until there the workers are needed.
    trainer = safe(tmp_path, dataloader_num_workers=2, callbacks=[during(2, everybody)])
    with StopOnSignal(trainer):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    end = time.monotonic() + 60
    while set(multiprocessing.active_children()) - before:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = trainer_of(tmp_path, ROWS)
    with StopOnSignal(trainer) as stop:
        send(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert stop.stopped_by is None


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, ROWS)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    seen = []

    def elsewhere() -> None:
        with StopOnSignal(trainer):
            seen.append([signal.getsignal(each) for each in SIGNALS])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [handlers]


@pytest.mark.slow
def test_two_ranks_stop_at_one_step_fail_together_and_hand_over_to_one_and_back(tmp_path: Path) -> None:
    """All in one pair of processes: imports are most of the time."""
    straight = saves_program.straight(tmp_path / "alone")
    one = saves_program.first_half(tmp_path / "from-one")
    assert one["step"] == 4
    torchrun.on_two_ranks(
        saves_program.__name__, str(tmp_path), "straight", "first_half", "signalled", "starved", "second_half", seconds=240
    )
    found = {
        name: [json.loads((tmp_path / f"{name}-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        for name in ("straight", "first_half", "signalled", "starved", "second_half")
    }
    # The signal reached rank 1 alone, after the talk of step 3; both stopped at one step, and saved it.
    assert [each["step"] for each in found["signalled"]] in ([3, 3], [4, 4])
    assert names(tmp_path / "signalled")[-1] == f"checkpoint-{found['signalled'][0]['step']}"
    # Rank 1 could not write its random numbers at step 2; neither waited, and step 4 is saved.
    assert [each["step"] for each in found["starved"]] == [9, 9]
    assert found["starved"][0]["saved"] == [4, 6, 8, 9]
    # One rank began, two went on.
    for each in found["second_half"]:
        assert each["weights"] == near(straight["weights"], 1e-4)
    assert ids_of(tmp_path / "from-one") == ids_of(tmp_path / "alone")
    # Two ranks began, one goes on.
    last = saves_program.second_half(tmp_path / "first_half")
    assert last["weights"] == near(straight["weights"], 1e-4)
    assert ids_of(tmp_path / "first_half") == ids_of(tmp_path / "alone")
