"""Checksums are taken while files are written; the files are those that torch and safetensors write."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import modeling_utils

from brim.trainer import disk, manifest, summing
from brim.trainer.manifest import sum_of
from brim.trainer.summing import sums_while_writing
from tests.trainer.saves import safe
from tests.trainer.test_checkpoints import lora

DTYPES = sorted(summing._DTYPES, key=str)


def tensors() -> dict[str, torch.Tensor]:
    """One of each type, an empty one, a scalar and one that takes several blocks."""
    torch.manual_seed(0)
    found = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    return {**found, "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "large": torch.randn(300_000)}


def test_tensors_are_written_as_safetensors_reads_them(tmp_path: Path) -> None:
    given = tensors()
    with sums_while_writing() as sums:
        safetensors.torch.save_file(given, tmp_path / "ours.safetensors", metadata={"format": "pt", "ü": "\n"})
    found = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float())
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "ü": "\n"}
    assert sums == {str(tmp_path / "ours.safetensors"): sum_of(tmp_path / "ours.safetensors")}


def test_tensors_of_one_type_make_the_same_file_as_without_sums(tmp_path: Path) -> None:
    given = {name: torch.randn(7, 3) for name in ("b", "a", "c.d")}
    safetensors.torch.save_file(given, tmp_path / "theirs", metadata={"format": "pt"})
    with sums_while_writing():
        safetensors.torch.save_file(given, tmp_path / "ours", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_safetensors_refuses_is_still_refused(tmp_path: Path) -> None:
    shared = torch.randn(4)
    with sums_while_writing() as sums:
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"one": shared, "other": shared}, tmp_path / "file")
        with pytest.raises(ValueError, match="non contiguous"):
            safetensors.torch.save_file({"turned": torch.randn(3, 4).t()}, tmp_path / "file")
    assert sums == {}


def writers() -> list[Any]:
    return [torch.save, safetensors.torch.save_file, vars(modeling_utils)["safe_save_file"]]


def test_torch_writes_through_the_sum_and_is_itself_again_afterwards(tmp_path: Path) -> None:
    before = writers()
    state = {"state": {0: {"exp_avg": torch.randn(300_000), "step": torch.tensor(1.0)}}, "name": "x"}
    with sums_while_writing() as sums:
        torch.save(state, tmp_path / "optimizer.pt")
        with (tmp_path / "stream.pt").open("wb") as stream:
            torch.save(state, stream)
    found = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=True)
    assert torch.equal(found["state"][0]["exp_avg"], state["state"][0]["exp_avg"])  # type: ignore[index]
    assert sums == {str(tmp_path / "optimizer.pt"): sum_of(tmp_path / "optimizer.pt")}
    assert writers() == before


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("write", [torch.save, safetensors.torch.save_file], ids=["torch", "safetensors"])
def test_a_disk_that_takes_no_more_is_an_error_of_the_disk(tmp_path: Path, write: Any) -> None:
    name = write.__name__
    with sums_while_writing() as sums, files_of_at_most(200_000), pytest.raises(OSError, match="File too large") as caught:
        getattr(torch if name == "save" else safetensors.torch, name)({"large": torch.randn(300_000)}, tmp_path / "file")
    assert disk.disk_trouble(caught.value) == "File too large"
    assert sums == {}


def test_an_error_that_comes_when_a_file_is_closed_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(io.FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(Late(path, mode)))
    with sums_while_writing() as sums, pytest.raises(OSError, match="quota") as caught:
        torch.save({"a": torch.zeros(3)}, tmp_path / "file")
    assert disk.disk_trouble(caught.value) is not None
    assert sums == {}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_no_large_file_of_a_checkpoint_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    read: list[str] = []

    def noting(file: Path, *args: Any, **keywords: Any) -> Any:
        read.append(file.name)
        return sum_of(file, *args, **keywords)

    monkeypatch.setattr(manifest, "sum_of", noting)
    safe(tmp_path, lora() if kind == "lora" else None, max_steps=1, save_steps=1).train()
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    written = json.loads((tmp_path / "checkpoint-1" / manifest.MANIFEST).read_text(encoding="utf-8"))["files"]
    assert {weights, "optimizer.pt"} <= set(written)
    assert not {weights, "optimizer.pt"} & set(read)
    monkeypatch.undo()
    assert manifest.damage_of(tmp_path / "checkpoint-1") is None
