"""Which checkpoint is whole, told by its files alone; how one comes to its name, and how an old one goes."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from brim.errors import UsageError
from brim.trainer import manifest
from brim.trainer.checkpoints import last_checkpoint
from brim.trainer.hf import last_whole_checkpoint
from tests.trainer.saves import names, safe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints 1 and 2 of a run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("made")
    safe(folder, max_steps=2, save_steps=1).train()
    return folder


def truncate(path: Path) -> None:
    file = path / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-1])


def garbage(path: Path) -> None:
    state = path / "trainer_state.json"
    state.write_bytes(b"?" * state.stat().st_size)


def garbage_alone(path: Path) -> None:
    garbage(path)
    (path / manifest.MANIFEST).unlink()


def truncated_alone(path: Path) -> None:
    truncate(path)
    (path / manifest.MANIFEST).unlink()


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def flip(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "optimizer.pt has "),
    "missing": (lambda path: (path / "rng_state.pth").unlink(), "rng_state.pth is missing."),
    "garbage": (garbage, "trainer_state.json is not as it was written."),
    "one-bit": (flip, "model.safetensors is not as it was written."),
    "manifest": (lambda path: (path / manifest.MANIFEST).write_text("{"), "is not valid JSON"),
    "no-manifest-and-garbage": (garbage_alone, "trainer_state.json is damaged"),
    "no-manifest-and-truncated": (truncated_alone, "optimizer.pt is damaged"),
    "empty": (emptied, "trainer_state.json is missing."),
}


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_and_said(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(made / name, tmp_path / name)
    damage, told = DAMAGES[kind]
    damage(tmp_path / "checkpoint-2")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"brim: {tmp_path / 'checkpoint-2'} is passed over: ")
    assert told in sentence
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(UsageError, match="no whole checkpoint") as caught:
        last_checkpoint(tmp_path)
    assert told in caught.value.message
    assert last_checkpoint(tmp_path, none_is_error=False) is None


def test_a_damaged_checkpoint_is_not_loaded_by_its_name_either(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "checkpoint-2", tmp_path / "checkpoint-2")
    flip(tmp_path / "checkpoint-2")
    with pytest.raises(UsageError, match="model.safetensors is not as it was written"):
        safe(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_without_checkpoints_there_is_nothing_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint-old").mkdir()
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "nowhere") is None
    assert capsys.readouterr().err == ""


def test_of_a_large_file_the_ends_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_SUMMED_WHOLE_BYTES", 100)
    monkeypatch.setattr(manifest, "_END_BYTES", 10)
    file = tmp_path / "large"
    sums = set()
    for place in (0, 100, 299):
        content = bytearray(300)
        content[place] = 1
        file.write_bytes(content)
        sums.add(manifest.sum_of(file).crc32)
    file.write_bytes(bytes(300))
    assert manifest.sum_of(file).crc32 in sums  # the middle is not seen
    assert len(sums) == 3


# Names and numbers.


def make(folder: Path, step: int, content: str = "") -> Path:
    path = folder / manifest.name_of(step)
    path.mkdir(parents=True)
    (path / manifest.STATE).write_text(json.dumps({"content": content}), encoding="utf-8")
    manifest.seal(path, step)
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_of_the_same_name_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(manifest, "_exchange", lambda _one, _other: False)
    old, new = make(tmp_path, 4, "old"), make(tmp_path / manifest.SAVING, 4, "new")
    manifest.put_in_place(new, old)
    assert json.loads((old / manifest.STATE).read_text(encoding="utf-8")) == {"content": "new"}
    manifest.clear(tmp_path)
    assert names(tmp_path) == ["checkpoint-4"]


def test_old_checkpoints_go_and_the_best_and_those_of_later_steps_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 90):
        make(tmp_path, step)
    truncate_state = tmp_path / "checkpoint-40" / manifest.STATE
    truncate_state.write_text("", encoding="utf-8")
    manifest.rotate(tmp_path, keep=3, newest=tmp_path / "checkpoint-50", best=str(tmp_path / "checkpoint-10"))
    manifest.clear(tmp_path)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-30", "checkpoint-50", "checkpoint-90"]


# Whose error.

DISK_ERRORS: dict[str, tuple[BaseException, bool]] = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), True),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
    "too-large": (OSError(errno.EFBIG, "File too large"), True),
    "torch": (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), True),
    "torch-writer": (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
    "no-permission": (PermissionError(errno.EACCES, "Permission denied"), False),
    "shapes": (RuntimeError("The size of tensor a (3) must match"), False),
    "bug": (KeyError("os error 28"), False),
}


@pytest.mark.parametrize("kind", list(DISK_ERRORS))
def test_what_is_of_the_disk_is_told_from_what_is_not(kind: str) -> None:
    error, is_of_disk = DISK_ERRORS[kind]
    assert (manifest.disk_trouble(error) is not None) is is_of_disk
