"""What is really in force in somebody else's script: real interpreters, real frameworks, real ends."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brim import check_ledger, doctor, read_ledger
from brim.audit.observe import observe, surroundings
from brim.errors import UsageError
from brim.records.observations import Observation
from tests import torchrun

SCRIPTS = Path(__file__).with_name("scripts")


def watched(folder: Path, script: str, *arguments: str, effective_batch: int | None = None, source: bool = False) -> Observation:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return observe(command, output=folder / "run", effective_batch=effective_batch, source=source)


def alone(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """The same script without brim, in this process: torch is imported only once."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def same_weights(one: Path, other: Path) -> bool:
    import torch

    first, second = torch.load(one), torch.load(other)
    return bool(first) and all(torch.equal(first[name], second[name]) for name in first)


def steps_of(found: Observation) -> list[list[tuple[int, int | None]]]:
    assert found.ledger is not None
    ledger = read_ledger(found.ledger)
    assert not [sentence for sentence in check_ledger(ledger) if "promised" not in sentence]
    return [[(one.sequences, one.length) for one in entry.slices] for entry in ledger.steps]


def test_a_plain_loop_that_clamps_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = watched(tmp_path, "plain.py", "--batch-size", "64", "--weights", str(tmp_path / "watched"))
    out, err = capfd.readouterr()
    assert out.startswith("epoch 0: ")
    assert err.endswith('warnings.warn("a warning of the script", stacklevel=1)\n')
    assert (found.exit_code, found.reach) == (0, "steps")
    batch, asked = found.in_force, found.configured
    assert batch is not None
    assert asked is not None
    assert (batch.micro_batch, batch.accumulation, batch.ranks, batch.sequences) == (2, 16, 1, 32)
    assert (asked.effective_batch, asked.source) == (64, "--batch-size 64")
    assert found.differs
    assert (found.steps, found.short_windows_count, found.sequences) == (6, 2, 144)
    assert [(each.step, each.sequences, each.ends_data) for each in found.short_windows] == [(3, 8, True), (6, 8, True)]
    assert found.supervised_tokens == 144 * 5
    assert found.evaluation_passes == 4
    assert found.evaluation_seconds > 0
    assert found.first_learning_rate == 0.01
    assert found.last_learning_rate == pytest.approx(0.01 / 6)
    train, other = found.loaders
    assert train.where is not None
    assert train.where.endswith("plain.py:22")
    assert (train.trains, train.batch_size, train.num_workers, train.shuffle, train.sequences) == (True, 2, 0, True, 72)
    assert (other.trains, other.batch_size) == (False, 3)
    assert found.peak_allocated_bytes
    ledger = read_ledger(str(found.ledger))
    header = ledger.headers[0]
    assert (header.observed, header.seed, header.drop_last, header.data_fingerprint) == (True, None, None, None)
    assert header.started_at == found.started_at
    assert header.configuration["cores"]
    assert [entry.promised_sequences for entry in ledger.steps] == [64, 64, 8, 64, 64, 8]
    assert [entry.tokens for entry in ledger.steps][:3] == [32 * 6, 32 * 6, 8 * 6]
    assert ledger.steps[-1].epoch == 2.0
    assert ledger.summary is not None
    assert ledger.summary.finished
    assert ledger.summary.compute_seconds + ledger.summary.wait_seconds <= ledger.summary.seconds <= found.seconds
    assert Observation.read(tmp_path / "run" / "observation.json") == found
    [broken] = doctor(tmp_path / "run").findings
    assert (broken.rule, broken.severity) == ("run-promise-broken", "high")
    assert "used 32 sequences per optimizer step; 64 were configured (--batch-size 64)" in broken.message
    alone(monkeypatch, "plain.py", "--batch-size", "64", "--weights", str(tmp_path / "alone"))
    assert same_weights(tmp_path / "watched", tmp_path / "alone")


def test_an_accelerate_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(tmp_path, "accelerated.py", "--weights", str(tmp_path / "watched"))
    batch = found.in_force
    assert batch is not None
    assert (batch.micro_batch, batch.accumulation, batch.sequences, batch.least_sequences) == (4, 3, 12, 2)
    assert found.configured is not None
    assert (found.configured.effective_batch, found.differs) == (12, False)
    assert [(each.step, each.ends_data) for each in found.short_windows] == [(5, True), (10, True)]
    assert found.settings["accelerate.Accelerator.mixed_precision"] == "no"
    alone(monkeypatch, "accelerated.py", "--weights", str(tmp_path / "alone"))
    assert same_weights(tmp_path / "watched", tmp_path / "alone")


def test_the_trainer_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(tmp_path, "trainer.py", "--weights", str(tmp_path / "watched"))
    batch = found.in_force
    assert batch is not None
    assert (batch.micro_batch, batch.accumulation, batch.sequences) == (2, 3, 6)
    assert found.configured is not None
    assert (found.configured.effective_batch, found.configured.source) == (6, "transformers.TrainingArguments")
    assert found.configured.where is not None
    assert "trainer.py:" in found.configured.where
    assert [(each.step, each.sequences, each.ends_data) for each in found.short_windows] == [(4, 2, True)]
    assert found.supervised_tokens == 20 * 6
    alone(monkeypatch, "trainer.py", "--weights", str(tmp_path / "alone"))
    assert same_weights(tmp_path / "watched", tmp_path / "alone")


def _torchrun(folder: Path) -> list[str]:
    command = torchrun.command("none", "--weights", str(folder))
    place = command.index("-m", command.index("--local-addr=127.0.0.1"))
    return [*command[:place], str(SCRIPTS / "ranks.py"), *command[place + 2 :]]


@pytest.mark.long
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    found = observe(_torchrun(tmp_path / "watched"), output=tmp_path / "run", source=False, environment=torchrun.environment())
    assert found.exit_code == 0
    batch = found.in_force
    assert batch is not None
    assert (batch.micro_batch, batch.accumulation, batch.ranks, batch.sequences) == (3, 2, 2, 12)
    assert (found.steps, found.world_size) == (3, 2)
    ledger = read_ledger(str(found.ledger))
    assert [[one.rank for one in entry.slices] for entry in ledger.steps] == [[0, 0, 1, 1]] * 3
    assert len(list((tmp_path / "run" / "events").glob("*.jsonl"))) == 2


@pytest.mark.slow
def test_two_ranks_have_the_same_weights_with_and_without(tmp_path: Path) -> None:
    observe(_torchrun(tmp_path / "watched"), output=tmp_path / "run", source=False, environment=torchrun.environment())
    subprocess.run(_torchrun(tmp_path / "alone"), env=torchrun.environment(), check=True)
    assert same_weights(tmp_path / "watched", tmp_path / "alone")


@pytest.mark.slow
def test_a_lightning_module(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    found = watched(tmp_path, "lit.py", "--batch_size", "4")
    assert found.exit_code == 0
    batch = found.in_force
    assert batch is not None
    assert (batch.micro_batch, batch.accumulation, batch.sequences) == (4, 3, 12)
    assert found.configured is not None
    assert (found.configured.effective_batch, found.steps) == (12, 4)


@pytest.mark.slow
def test_habits_of_training_loops(tmp_path: Path) -> None:
    """One after another in one process; each line below is what one of them must show."""
    found = watched(tmp_path, "zoo.py")
    assert found.exit_code == 0
    six = [(6, 6)]
    expected = {
        "accumulates": [[(2, 6)] * 3] * 2,
        "scaler_skips": [six] * 2,
        "two_optimizers": [[(3, 6)] * 2] * 2,
        "is_compiled": [six] * 3,
        "compiles_the_loss": [six],
        "is_compiled_in_place": [six] * 3,
        "encoder_and_head": [six],
        "rows_twice": [six],
        "computes_again": [six] * 2,
        "evaluates_with_gradients": [[(4, 6)]],
        "clears_too_often": [[(2, 6)]],
        "runs_out_of_memory": [[(3, 6)] * 2],
        "steps_in_backward": [six] * 2,
        "closure_steps": [six],
        "is_scripted": [six],
        "is_pickled": [six],
    }
    seen = steps_of(found)
    for habit, steps in expected.items():
        assert seen[: len(steps)] == steps, habit
        seen = seen[len(steps) :]
    assert not seen
    assert (found.skipped, found.discarded_micro_batches) == (1, 2)
    (failure,) = found.memory_failures
    assert (failure.phase, failure.sequences, failure.survived) == ("forward", 6, True)
    assert not [note for note in found.notes if "gave up" in note]


@pytest.mark.parametrize(("how", "code"), [("none", 0), ("three", 3), ("text", 1), ("killed", 128 + signal.SIGTERM)])
def test_the_exit_code_and_the_output_are_the_scripts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    found = watched(tmp_path, "odd.py", how)
    assert (found.exit_code, found.reach) == (code, "no-torch")
    out, err = capfd.readouterr()
    assert (out, err) == ("to stdout\n", "to stderr\n" + ("a last word\n" if how == "text" else ""))
    assert "torch was never imported" in found.notes[0]
    assert found.ledger is None


@pytest.mark.long
def test_a_crash_looks_as_it_would_alone_and_what_was_seen_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = watched(tmp_path, "odd.py", "crash")
    out, err = capfd.readouterr()
    assert found.exit_code == 1
    assert found.steps == 3
    assert "Traceback" in err
    assert "importlib_bootstrap" not in err
    assert f"{SCRIPTS / 'odd.py'}:" in err.partition("UserWarning: seen from the caller")[0].splitlines()[-1]
    ended = subprocess.run([sys.executable, str(SCRIPTS / "odd.py"), "crash"], capture_output=True, text=True, check=False)
    assert (out, err) == (ended.stdout, ended.stderr)
    ledger = read_ledger(str(found.ledger))
    assert ledger.summary is not None
    assert not ledger.summary.finished
    assert "1" in ledger.summary.reason


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_loader_write_nothing(tmp_path: Path, context: str) -> None:
    found = watched(tmp_path, "odd.py", "loader", context)
    assert found.exit_code == 0
    assert found.loaders[0].num_workers == 2
    assert len(list((tmp_path / "run" / "events").glob("*.jsonl"))) == 1


def test_a_sitecustomize_of_ones_own_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("mine = 7\n")
    program = "import sitecustomize, sys; print(sitecustomize.mine, sitecustomize.__file__); print([p for p in sys.path if 'brim' in p])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "own")}
    found = observe([sys.executable, "-c", program], output=tmp_path / "run", environment=environment)
    assert found.exit_code == 0
    alone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert capfd.readouterr().out == alone.stdout
    assert alone.stdout.startswith(f"7 {tmp_path}")


def test_a_package_and_its_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("print(__package__)\n")
    monkeypatch.chdir(tmp_path)
    found = observe([sys.executable, "-m", "package"])
    assert (found.exit_code, found.reach) == (0, "no-torch")
    assert capfd.readouterr().out == "package\n"
    (folder,) = (tmp_path / "brim-runs").glob("[!.]*")
    assert (tmp_path / "brim-runs" / ".gitignore").read_text() == "*\n"
    assert folder.name.startswith("package-")


@pytest.mark.parametrize("switch", ["-S", "-I", "-E", "-uE"])
def test_a_python_that_looks_at_nothing_is_named_as_the_reason(tmp_path: Path, switch: str) -> None:
    found = observe([sys.executable, switch, "-c", "pass"], output=tmp_path / "run")
    assert (found.exit_code, found.reach) == (0, "not-reached")
    assert switch in found.notes[0]


def test_what_cannot_be_run_or_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no command"):
        observe([])
    with pytest.raises(UsageError, match="Cannot run /nowhere/python: No such file"):
        observe(["/nowhere/python", "train.py"], output=tmp_path / "one")
    with pytest.raises(UsageError, match="An effective batch of 0"):
        observe(["true"], output=tmp_path / "two", effective_batch=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write"):
        observe(["true"], output=tmp_path / "file" / "run")
    assert observe(["true"], output=tmp_path / "three").exit_code == 0
    with pytest.raises(UsageError, match="holds another run"):
        observe(["true"], output=tmp_path / "three")


def test_the_commands_surroundings_are_ours_and_two_names_more(tmp_path: Path) -> None:
    found = surroundings(tmp_path, {"A": "1", "PYTHONPATH": "mine"})
    assert set(found) == {"A", "PYTHONPATH", "BRIM_OBSERVE"}
    assert found["PYTHONPATH"].endswith(os.pathsep + "mine")
    assert os.pathsep not in surroundings(tmp_path, {"PYTHONPATH": ""})["PYTHONPATH"]


@pytest.mark.slow
def test_a_script_that_closes_files_it_never_opened_keeps_its_own_clean(tmp_path: Path) -> None:
    found = watched(tmp_path, "odd.py", "closes", str(tmp_path / "mine"))
    assert (found.exit_code, found.steps) == (0, 3)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.slow
def test_a_folder_that_vanishes_costs_the_record_and_not_the_exit_code(tmp_path: Path) -> None:
    found = watched(tmp_path, "odd.py", "removes", str(tmp_path / "run"))
    assert found.exit_code == 7
    assert any("Cannot write" in note for note in found.notes)


def test_an_argument_that_is_no_text_is_told_with_question_marks(tmp_path: Path) -> None:
    found = watched(tmp_path, "odd.py", "three", os.fsdecode(b"caf\xe9"))
    assert (found.exit_code, found.command[-1]) == (3, "caf?")
    assert Observation.read(tmp_path / "run" / "observation.json") == found


@pytest.mark.slow
def test_of_several_calls_for_one_backward_one_is_counted_and_nobody_is_accused(tmp_path: Path) -> None:
    found = watched(tmp_path, "odd.py", "sides", effective_batch=9)
    batch = found.in_force
    assert batch is not None
    assert (batch.sequences, batch.calls, found.steps) == (4, 2, 8)
    assert not found.differs


def test_a_command_in_one_string_is_a_mistake_with_the_list_as_its_hint() -> None:
    with pytest.raises(UsageError, match="list of words") as raised:
        observe("python train.py")
    assert "brim.observe(['python', 'train.py'])" in str(raised.value.hint)
