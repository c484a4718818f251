"""Which checkpoint is whole, told by its files alone; how one comes to its name, and how an old one goes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from brim.errors import UsageError
from brim.sizes import MIB
from brim.trainer import disk, manifest
from brim.trainer.checkpoints import last_checkpoint
from brim.trainer.summing import sums_while_writing
from brim.trainer.verifying import last_whole_checkpoint
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
    "garbage": (garbage, "trainer_state.json is not as it was written: its bytes have changed."),
    "one-bit": (flip, "model.safetensors is not as it was written: its bytes have changed."),
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
    assert sentence.startswith(f"brim: {tmp_path / 'checkpoint-2'} is damaged and is not used: ")
    assert told in sentence
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(UsageError, match="Every checkpoint in .* is damaged") as caught:
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


# Every byte counts.

BIG = 70 * MIB


def big_checkpoint(folder: Path, step: int = 1) -> Path:
    """A checkpoint whose weights and optimizer take more than 64 MiB each; nearly all of them zeros, so that it costs little."""
    path = folder / manifest.name_of(step)
    path.mkdir(parents=True)
    (path / manifest.STATE).write_text("{}", encoding="utf-8")
    with sums_while_writing() as sums:
        safetensors.torch.save_file({"weight": torch.zeros(BIG, dtype=torch.uint8)}, path / "model.safetensors")
        torch.save({"state": torch.zeros(BIG, dtype=torch.uint8)}, path / "optimizer.pt")
    assert {Path(name).name for name in sums} == {"model.safetensors", "optimizer.pt"}
    manifest.seal(path, step, sums=sums)
    return path


def flip_in_the_middle(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_flipped_bit_in_the_middle_of_a_large_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = big_checkpoint(tmp_path)
    assert manifest.damage_of(path) is None
    flip_in_the_middle(path / name)
    with pytest.raises(UsageError, match=f"checkpoint-1: {name} is not as it was written") as caught:
        last_checkpoint(tmp_path)
    assert "Restore the named files from a backup" in (caught.value.hint or "")
    make(tmp_path, 0)
    capsys.readouterr()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-0"
    assert f"checkpoint-1 is damaged and is not used: {name} is not as it was written" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_brim_is_taken_and_said_to_be_not_fully_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = big_checkpoint(tmp_path)
    document = json.loads((path / manifest.MANIFEST).read_text(encoding="utf-8"))
    document["schema"] = "brim.checkpoint/1"
    for file in ("model.safetensors", "optimizer.pt"):
        content = (path / file).read_bytes()
        document["files"][file]["crc32"] = zlib.crc32(content[-MIB:], zlib.crc32(content[:MIB]))
    (path / manifest.MANIFEST).write_text(json.dumps(document), encoding="utf-8")
    flip_in_the_middle(path / "optimizer.pt")  # what it cannot show
    assert last_checkpoint(tmp_path) == path
    [sentence] = capsys.readouterr().err.splitlines()
    assert "checkpoint-1 is not fully verified: an older brim wrote it, without a checksum of every byte." in sentence
    assert manifest.check_files(path).unverified == ("model.safetensors", "optimizer.pt")
    with (path / "optimizer.pt").open("r+b") as stream:
        stream.write(b"?")
    assert (manifest.damage_of(path) or "").startswith("optimizer.pt is not as it was written")


def test_reading_a_checkpoint_reports_its_progress(tmp_path: Path) -> None:
    path = big_checkpoint(tmp_path)
    seen: list[tuple[str, int, int]] = []
    last_checkpoint(tmp_path, progress=lambda *told: seen.append(told))
    name, done, total = seen[-1]
    assert (name, done) == ("checkpoint-1", total)
    assert total == sum(file.stat().st_size for file in path.iterdir() if file.name != manifest.MANIFEST)
    assert [done for _name, done, _total in seen] == sorted(done for _name, done, _total in seen)


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
    assert (disk.disk_trouble(error) is not None) is is_of_disk
