"""The checksum of every large file of a checkpoint, computed from the bytes as they are written, so that nothing is read back.

`torch.save` and `safetensors.torch.save_file` open and write their files by themselves. While `sums_while_writing` is open, both write
through a file that sums. A second thread sums a block while the first one writes it: with a free core this costs next to no time
(`benchmarks/checkpoint_sums.py`). CRC-32, because damage on a disk is an accident and not an attack: every flipped bit and every burst of
up to 32 bits is found for certain, anything else but once in 2^32. It is five times as fast as SHA-256 and BLAKE2.

A file that was written in any other way is missing in what comes out, and is summed by reading it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import safetensors.torch
import torch

from brim.sizes import KIB
from brim.trainer.manifest import FileSum

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

Sums = dict[str, FileSum]
"""By the absolute path of the file."""

_TWO_THREADS_FROM: Final = 256 * KIB
_STACK_BYTES: Final = 256 * KIB
"""Stacks count against a memory limit on the CPU, and the usual 8 MiB would be taken from the model."""
_WRITERS_OF_TENSORS: Final = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
)
_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@contextmanager
def sums_while_writing() -> Iterator[Sums]:
    """Sum what `torch.save` and safetensors write until this is closed."""
    sums: Sums = {}
    save, save_file = torch.save, safetensors.torch.save_file
    with _second_thread() as pool:

        def summed_save(obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
            if not isinstance(f, str | os.PathLike):
                save(obj, f, *args, **keywords)
                return
            with SummedFile(f, pool, sums) as file:
                save(obj, cast("Any", file), *args, **keywords)

        def summed_save_file(tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
            if not _is_plain(tensors):
                save_file(tensors, filename, metadata=metadata)
                return
            with SummedFile(filename, pool, sums) as file:
                _write_safetensors(tensors, file, metadata)

        changed: list[tuple[Any, str, Any]] = [(torch, "save", summed_save)]
        for name, attribute in _WRITERS_OF_TENSORS:
            module = sys.modules.get(name)
            if getattr(module, attribute, None) is save_file:
                changed.append((module, attribute, summed_save_file))
        before = [(module, attribute, getattr(module, attribute)) for module, attribute, _new in changed]
        try:
            for module, attribute, new in changed:
                setattr(module, attribute, new)
            yield sums
        finally:
            for module, attribute, old in before:
                setattr(module, attribute, old)


class SummedFile:
    """A file for writing from start to end. An error of the disk is raised when it is closed: not every writer survives one inside."""

    def __init__(self, path: str | os.PathLike[str], pool: ThreadPoolExecutor | None, sums: Sums) -> None:
        self._path, self._pool, self._sums = Path(path).absolute(), pool, sums
        self._file = self._path.open("wb")
        self._error: OSError | None = None
        self._size = self._crc32 = 0
        self.name = str(self._path)

    def write(self, data: Any) -> int:
        """Append, and sum."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._error is not None:
            return len(view)
        summing = self._pool.submit(zlib.crc32, view, self._crc32) if self._pool and len(view) >= _TWO_THREADS_FROM else None
        try:
            self._file.write(view)
        except OSError as error:
            self._error = error
        finally:
            self._crc32 = zlib.crc32(view, self._crc32) if summing is None else summing.result()
        return len(view)

    def flush(self) -> None:
        """To the system."""
        if self._error is None:
            try:
                self._file.flush()
            except OSError as error:
                self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_details: object) -> None:
        self.flush()
        try:
            self._file.close()
        except OSError as error:  # network file systems report a full disk only here
            self._error = self._error or error
        if self._error is not None:
            raise self._error
        if kind is None:
            self._sums[str(self._path)] = FileSum(size_bytes=self._size, crc32=self._crc32)


@contextmanager
def _second_thread() -> Iterator[ThreadPoolExecutor | None]:
    """One thread; None where the memory limit has no room for it."""
    before = threading.stack_size(_STACK_BYTES)
    pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="brim-sum")
    try:
        assert pool is not None
        pool.submit(int).result()  # starts it now, with this stack
    except RuntimeError:
        pool = None
    finally:
        threading.stack_size(before)
    try:
        yield pool
    finally:
        if pool is not None:
            pool.shutdown()


def _is_plain(tensors: Mapping[str, Tensor]) -> bool:
    """Whether `_write_safetensors` can write them; what safetensors would refuse is left to it."""
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}
    return len(places) == sum(tensor.numel() > 0 for tensor in tensors.values()) and all(
        tensor.dtype in _DTYPES and tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors.values()
    )


def _write_safetensors(tensors: Mapping[str, Tensor], file: SummedFile, metadata: Mapping[str, str] | None) -> None:
    """https://github.com/huggingface/safetensors#format: the header's length, the header as JSON, the tensors."""
    # The widest types first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in names:
        if tensors[name].numel():
            # One at a time: a copy of the whole model beside it would not fit everywhere.
            file.write(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy())
