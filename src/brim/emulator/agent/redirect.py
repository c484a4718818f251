"""Redirects the writes of Python code to the shadow folder: replaces functions of the standard library, torch, safetensors, transformers
and pyarrow.
"""

# ruff: noqa: PTH110, PTH112
# (pathlib is built on the functions that this module replaces)

from __future__ import annotations

import builtins
import bz2
import functools
import io
import os
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .shadow import Shadow

_WRITE_MODES = set("wax+")
_READING = ("stat", "lstat", "access", "readlink", "chdir", "listxattr", "getxattr", "statvfs")
_CHANGING = ("utime", "chmod", "chown", "truncate", "setxattr", "removexattr")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _file_io(shadow: Shadow) -> type[io.FileIO]:
    """A subclass of `io.FileIO` that redirects paths. Files that `open` returns count as its instances too."""
    real = io.FileIO

    class AnyFileIO(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class FileIO(real, metaclass=AnyFileIO):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", *given: Any, **options: Any) -> None:
            if not isinstance(file, int) and options.get("opener") is None and len(given) < 2:
                is_written = bool(_WRITE_MODES & set(mode))
                file = shadow.for_writing(file, keep="w" not in mode) if is_written else shadow.for_reading(file)
            super().__init__(file, mode, *given, **options)

    return FileIO


def install(shadow: Shadow) -> None:
    """Replace the functions of the standard library that take paths."""
    real = {name: getattr(os, name) for name in (*_READING, *_CHANGING)}

    @functools.wraps(shadow.open)
    def open_file(file: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        if isinstance(mode, str) and _WRITE_MODES & set(mode):
            file = shadow.for_writing(file, keep="w" not in mode)
        else:
            file = shadow.for_reading(file)
        return shadow.open(file, mode, *given, **options)

    def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None and flags & _WRITE_FLAGS:
            if flags & os.O_CREAT and flags & os.O_EXCL and shadow.exists(os.fspath(shadow.for_reading(path))):
                raise FileExistsError(17, "File exists", os.fspath(path))
            path = shadow.for_writing(path, keep=not (flags & os.O_TRUNC and flags & os.O_CREAT))
        elif dir_fd is None:
            path = shadow.for_reading(path)
        return shadow.os_open(path, flags, mode, dir_fd=dir_fd)

    def read(name: str) -> Any:
        original = real[name]

        @functools.wraps(original)
        def call(path: Any, *given: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None:
                follow = name not in {"lstat", "readlink"} and options.get("follow_symlinks", True)
                path = shadow.for_reading(path, follow=follow)
            return original(path, *given, **options)

        return call

    def changed(name: str) -> Any:
        """Wrap a function that changes a file without opening it: it changes a copy in the shadow."""
        original = real[name]

        @functools.wraps(original)
        def call(path: Any, *given: Any, **options: Any) -> Any:
            absolute = shadow.absolute(path) if options.get("dir_fd") is None else None
            if absolute is not None and not os.path.isdir(path):
                if not os.path.exists(path):
                    raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
                path = shadow.for_writing(path, keep=True)
            elif absolute is not None:
                return None  # times and modes of folders are not kept
            return original(path, *given, **options)

        return call

    def removed(original: Any) -> Any:
        @functools.wraps(original)
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or shadow.absolute(path) is None:
                original(path, dir_fd=dir_fd)
            else:
                shadow.delete(path)

        return call

    remove_folder = os.rmdir

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None or shadow.absolute(path) is None:
            remove_folder(path, dir_fd=dir_fd)
        elif shadow.names(path):
            raise OSError(39, "Directory not empty", os.fspath(path))
        else:
            shadow.delete(path, folder=True)

    def rmtree(path: Any, ignore_errors: bool = False, *given: Any, **options: Any) -> None:
        if shadow.absolute(path) is None:
            shadow.rmtree(path, ignore_errors, *given, **options)
            return
        try:
            shadow.delete(path, folder=True)
        except OSError:
            if not ignore_errors and options.get("onerror") is None and options.get("onexc") is None:
                raise

    def moved(original: Any) -> Any:
        @functools.wraps(original)
        def call(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            outside = shadow.absolute(src) is None and shadow.absolute(dst) is None
            if src_dir_fd is not None or dst_dir_fd is not None or outside:
                original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            else:
                shadow.move(src, dst)

        return call

    def linked(original: Any, *, hard: bool) -> Any:
        @functools.wraps(original)
        def call(src: Any, dst: Any, *given: Any, **options: Any) -> None:
            if options.get("dir_fd") is not None or shadow.absolute(dst) is None:
                original(src, dst, *given, **options)
                return
            if shadow.exists(os.fspath(shadow.for_reading(dst, follow=False))):
                raise FileExistsError(17, "File exists", os.fspath(dst))
            place = shadow.for_writing(dst, keep=False)
            if hard:
                shadow.copy_file(shadow.for_reading(src), place)  # a hard link would give write access to the original
            else:
                original(src, place, *given, **options)
                shadow.note_link()

        return call

    builtins.open = io.open = open_file
    io.FileIO = _file_io(shadow)  # type: ignore[misc]
    os.open = open_descriptor
    bz2._builtin_open = open_file  # type: ignore[attr-defined]  # noqa: SLF001 (shutil has imported it already)
    for name in _READING:
        setattr(os, name, read(name))
    for name in _CHANGING:
        setattr(os, name, changed(name))
    working_folder = os.getcwd
    os.getcwd = lambda: shadow.outside(working_folder())
    # The standard library looks a function up in these sets before it passes `dir_fd`, `follow_symlinks` and similar options.
    for functions in (os.supports_follow_symlinks, os.supports_dir_fd, os.supports_fd, os.supports_effective_ids):
        functions |= {getattr(os, name) for name, original in real.items() if original in functions}
    os.mkdir, os.listdir, os.scandir = shadow.make_folder, _with_default(shadow.names), _with_default(shadow.entries)
    os.remove, os.unlink, os.rmdir, shutil.rmtree = removed(os.remove), removed(os.unlink), rmdir, rmtree  # type: ignore[assignment]
    os.rename, os.replace = moved(os.rename), moved(os.replace)
    os.link, os.symlink = linked(os.link, hard=True), linked(os.symlink, hard=False)


def _with_default(function: Any) -> Any:
    """os.listdir and os.scandir use the working folder if no path is given."""

    def call(path: Any = None) -> Any:
        return function("." if path is None else path)

    return call


def redirect_torch(torch: Any, shadow: Shadow) -> None:
    """Redirect torch.save, which writes files from C++."""
    save = torch.save

    @functools.wraps(save)
    def redirected(obj: Any, f: Any, *given: Any, **options: Any) -> Any:
        return save(obj, shadow.for_writing(f, keep=False), *given, **options)

    torch.save = torch.serialization.save = redirected


def redirect_safetensors(module: Any, shadow: Shadow) -> None:
    """Redirect safetensors, which writes and reads files from Rust. Its modules import the two functions by name, so each is patched."""
    if hasattr(module, "serialize_file") and not hasattr(module.serialize_file, "__wrapped__"):
        serialize = module.serialize_file

        @functools.wraps(serialize)
        def serialize_file(tensors: Any, filename: Any, *given: Any, **options: Any) -> Any:
            return serialize(tensors, shadow.for_writing(filename, keep=False), *given, **options)

        module.serialize_file = serialize_file
    if isinstance(getattr(module, "safe_open", None), type):
        original = module.safe_open

        @functools.wraps(original, updated=())
        def safe_open(filename: Any, *given: Any, **options: Any) -> Any:
            return original(shadow.for_reading(filename), *given, **options)

        module.safe_open = safe_open


def redirect_tokenizers(module: Any, shadow: Shadow) -> None:
    """Redirect tokenizers, which write tokenizer.json from Rust: `save_pretrained` gets the translated folder."""
    base_class = module.PreTrainedTokenizerBase
    save = base_class.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *given: Any, **options: Any) -> Any:
        return save(self, shadow.folder_for_writing(save_directory), *given, **options)

    base_class.save_pretrained = save_pretrained


def redirect_pyarrow(pyarrow: Any, shadow: Shadow) -> None:
    """Redirect the files that pyarrow opens from C++, such as the tables of datasets."""
    write, read = pyarrow.OSFile, pyarrow.memory_map

    @functools.wraps(write, updated=())
    def os_file(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        translated = shadow.for_writing(path, keep=False) if "w" in mode or "a" in mode else shadow.for_reading(path)
        return write(translated, mode, *given, **options)

    @functools.wraps(read)
    def memory_map(path: Any, mode: str = "r", *given: Any, **options: Any) -> Any:
        return read(shadow.for_reading(path), mode, *given, **options)

    pyarrow.OSFile, pyarrow.memory_map = os_file, memory_map
