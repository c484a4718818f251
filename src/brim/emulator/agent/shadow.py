"""A copy-on-write view of the file system for one Python process tree.

Values on the emulated card are not real, so nothing that the command saves may reach the user's files. Every write of Python code goes
to a shadow folder: `open(path, "w")` opens SHADOW/files/path instead, with a copy of the old content if the mode keeps it. Reads look
into the shadow first. A deleted or renamed original stays where it is and is hidden by a marker in SHADOW/hidden. Writers in C++ and Rust
(torch.save, safetensors, tokenizers) get the translated path.

native/guard.c stops the writes of libraries that open files without Python, and of other programs.
"""

# ruff: noqa: PTH100, PTH109, PTH111, PTH118, PTH120, PTH206
# (pathlib is built on the functions that this module replaces)

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import stat
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PASSED = ("/dev", "/proc", "/sys")
_MOST_LINKS = 40


class Shadow:
    """Translates paths. `passed` lists the folders that are not redirected: the session's own, caches, devices."""

    def __init__(self, root: str, passed: tuple[str, ...]) -> None:
        self._files = os.path.join(root, "files")
        self._hidden = os.path.join(root, "hidden")
        self._links = os.path.join(root, "links")
        self._passed = tuple(os.path.realpath(folder) for folder in (root, *_PASSED, *passed))
        self._inside = threading.local()
        self.written: dict[str, None] = {}
        """Paths whose writes were redirected, in order."""
        # The originals, taken before they are replaced.
        self.open, self.os_open = builtins.open, os.open
        self.stat, self.lstat, self.mkdir, self.remove, self.rename = os.stat, os.lstat, os.mkdir, os.remove, os.rename
        self.listdir, self.scandir, self.rmtree, self.readlink = os.listdir, os.scandir, shutil.rmtree, os.readlink

    def is_passed(self, path: str) -> bool:
        """Whether this absolute path is in a folder that is not redirected."""
        return any(path == folder or path.startswith(folder + os.sep) for folder in self._passed)

    def absolute(self, path: Any, *, follow: bool = True) -> str | None:
        """The absolute path of an argument; None for file descriptors and for paths that are not redirected.

        Symbolic links that the command made are resolved here, because they are in the shadow. `follow=False` keeps the last one.
        """
        try:
            text = os.fsdecode(path)
        except TypeError:
            return None
        if not text or "\0" in text:
            return None
        # The folder's links are resolved, the name itself is not: os.remove of a link removes the link.
        if getattr(self._inside, "now", False):
            return None
        with self.untranslated():
            folder, name = os.path.split(os.path.abspath(text))
            whole = os.path.join(os.path.realpath(folder), name)
        whole = self.outside(whole)
        return None if self.is_passed(whole) else self._resolved(whole, follow=follow)

    @contextlib.contextmanager
    def untranslated(self) -> Iterator[None]:
        """Within this context, and in this thread, paths are not translated."""
        before, self._inside.now = getattr(self._inside, "now", False), True
        try:
            yield
        finally:
            self._inside.now = before

    def copy_file(self, source: Any, place: str) -> None:
        """Copy a file to a place in the shadow."""
        with self.untranslated():
            shutil.copy2(source, place)

    def outside(self, path: str) -> str:
        """The path that a place in the shadow stands for. os.scandir and os.getcwd can return such places."""
        return path[len(self._files) :] or os.sep if path == self._files or path.startswith(self._files + os.sep) else path

    def _resolved(self, whole: str, *, follow: bool, depth: int = 0) -> str:
        if not self.exists(self._links) or depth > _MOST_LINKS:
            return whole
        parts = whole.split(os.sep)[1:]
        for index in range(len(parts) if follow else len(parts) - 1):
            path = os.sep + os.path.join(*parts[: index + 1])
            place = self.place(path)
            if self.exists(place) and stat.S_ISLNK(self.lstat(place).st_mode):
                target = os.path.join(os.path.dirname(path), self.readlink(place), *parts[index + 1 :])
                return self._resolved(os.path.normpath(target), follow=follow, depth=depth + 1)
        return whole

    def place(self, absolute: str) -> str:
        """The path in the shadow that holds this path's content."""
        return self._files + absolute

    def exists(self, path: str) -> bool:
        """Whether there is a file, folder or link at exactly this path. The path is not translated."""
        try:
            self.lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def is_hidden(self, absolute: str) -> bool:
        """Whether the original at this path, or a folder above it, was deleted by the command."""
        if not self.exists(self._hidden):
            return False
        path = absolute
        while path != os.sep:
            if self.exists(self._marker(path)):
                return True
            path = os.path.dirname(path)
        return False

    def hide(self, absolute: str) -> None:
        """Treat the original as deleted."""
        marker = self._marker(absolute)
        self._make_folder(os.path.dirname(marker))
        self.open(marker, "w").close()

    def note_link(self) -> None:
        """Record that the command has made a symbolic link: from now on, paths are searched for links."""
        self.open(self._links, "w").close()

    def for_reading(self, path: Any, *, follow: bool = True) -> Any:
        """The path to read: the shadow's copy if there is one, a missing path if the original is hidden, else the original."""
        absolute = self.absolute(path, follow=follow)
        if absolute is None:
            return path
        place = self.place(absolute)
        return place if self.exists(place) or self.is_hidden(absolute) else absolute

    def for_writing(self, path: Any, *, keep: bool) -> Any:
        """The path to write, in the shadow. `keep`: copy the old content there first."""
        absolute = self.absolute(path)
        if absolute is None:
            return path
        source = self.for_reading(path)
        if self._is_folder(source):
            return source  # the caller gets the error of opening a folder
        place = self.place(absolute)
        self._need_folder(absolute)
        if keep and not self.exists(place) and self.exists(os.fspath(source)):
            self.copy_file(source, place)
        self.written.setdefault(absolute)
        return place

    def folder_for_writing(self, path: Any) -> Any:
        """Create the folder in the shadow for a native library that is about to fill it, and return its path."""
        absolute = self.absolute(path)
        if absolute is None:
            return path
        place = self.place(absolute)
        self._make_folder(place)
        self.written.setdefault(absolute)
        return place

    def make_folder(self, path: Any, *given: Any, **options: Any) -> None:
        """os.mkdir."""
        absolute = self.absolute(path)
        if absolute is None:
            return self.mkdir(path, *given, **options)
        if self.exists(os.fspath(self.for_reading(path))):
            raise FileExistsError(17, "File exists", os.fspath(path))
        self._need_folder(absolute)
        return self.mkdir(self.place(absolute), *given)

    def delete(self, path: Any, *, folder: bool = False) -> None:
        """os.remove, or shutil.rmtree with `folder`: the shadow's copy goes, the original is hidden."""
        absolute = self.absolute(path, follow=False)
        assert absolute is not None
        current = os.fspath(self.for_reading(path, follow=False))
        if not self.exists(current):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        if folder != self._is_folder(current):
            raise (
                NotADirectoryError(20, "Not a directory", current) if folder else IsADirectoryError(21, "Is a directory", current)
            )
        place = self.place(absolute)
        if self.exists(place):
            self._discard(place)
        if self.exists(absolute) and not self.is_hidden(absolute):
            self.hide(absolute)

    def move(self, source: Any, target: Any) -> None:
        """os.rename and os.replace."""
        start, end = self.absolute(source, follow=False), self.absolute(target, follow=False)
        current = os.fspath(self.for_reading(source, follow=False))
        if not self.exists(current):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(source))
        place = os.fspath(target) if end is None else self.place(end)
        if end is not None:
            self._need_folder(end)
            self.written.setdefault(end)
        in_shadow = start is None or current == self.place(start)
        if in_shadow and not (self._is_folder(current) and start is not None and self.exists(start)):
            self.rename(current, place)
        else:
            self._copy(source, place)
            if start is not None and self.exists(self.place(start)):
                self._discard(self.place(start))
        if start is not None and self.exists(start) and not self.is_hidden(start):
            self.hide(start)

    def names(self, path: Any) -> list[str]:
        """os.listdir, of the original and the shadow together."""
        absolute = self.absolute(path)
        if absolute is None or not isinstance(os.fspath(path), str):
            return self.listdir(self.for_reading(path))
        place = self.place(absolute)
        if not self._is_folder(place):
            return [name for name in self.listdir(self.for_reading(path)) if not self._is_gone(absolute, name)]
        below = self.listdir(place)
        if self._is_folder(absolute) and not self.is_hidden(absolute):
            below += [name for name in self.listdir(absolute) if name not in set(below) and not self._is_gone(absolute, name)]
        return below

    def entries(self, path: Any) -> Any:
        """os.scandir, of the original and the shadow together."""
        absolute = self.absolute(path)
        if absolute is None:
            return self.scandir(path)
        place = self.place(absolute)
        folders = [place] if self._is_folder(place) else []
        if not folders or (self._is_folder(absolute) and not self.is_hidden(absolute)):
            folders.append(absolute if not self.is_hidden(absolute) else place)
        return _Entries(self, absolute, folders)

    def _is_gone(self, folder: str, name: str) -> bool:
        return self.exists(self._hidden) and self.exists(self._marker(os.path.join(folder, name)))

    def _marker(self, absolute: str) -> str:
        return self._hidden + absolute + ".hidden"

    def _is_folder(self, path: Any) -> bool:
        try:
            return stat.S_ISDIR(self.stat(path).st_mode)
        except (OSError, ValueError, TypeError):
            return False

    def _need_folder(self, absolute: str) -> None:
        """Create the parent folder in the shadow. Raises if the command would not see that folder."""
        parent = os.path.dirname(absolute)
        if not self._is_folder(self.for_reading(parent)):
            raise FileNotFoundError(2, "No such file or directory", absolute)
        self._make_folder(self.place(parent))

    def _make_folder(self, path: str) -> None:
        missing = []
        while not self.exists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process created it meanwhile
                self.mkdir(folder)

    def _discard(self, place: str) -> None:
        """Delete a file or folder of the shadow itself."""
        if self._is_folder(place):
            with self.untranslated():
                self.rmtree(place)
        else:
            self.remove(place)

    def _copy(self, source: Any, place: str) -> None:
        current = self.for_reading(source)
        if not self._is_folder(current):
            self.copy_file(current, place)
            return
        self._make_folder(place)
        for name in self.names(source):
            self._copy(os.path.join(os.fspath(source), name), os.path.join(place, name))


class _Entries:
    """The iterator of os.scandir over several folders, each name once."""

    def __init__(self, shadow: Shadow, absolute: str, folders: list[str]) -> None:
        self._entries = []
        seen: set[str] = set()
        for folder in folders:
            with shadow.scandir(folder) as entries:
                for entry in entries:
                    if entry.name not in seen and not (folder == absolute and shadow._is_gone(absolute, entry.name)):  # noqa: SLF001
                        seen.add(entry.name)
                        self._entries.append(entry)
        self._rest = iter(self._entries)

    def __iter__(self) -> Any:
        return self._rest

    def __next__(self) -> Any:
        return next(self._rest)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_given: object) -> None:
        self.close()

    def close(self) -> None:
        """Part of the interface of os.scandir; nothing to close."""


def default_passed(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Caches of downloads and compiled kernels, which are written as usual. A cache that contains the working folder is left out."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    hub = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    known = [
        *(os.path.join(hub, name) for name in ("hub", "datasets", "modules", "xet")),
        *(
            environment.get(name)
            for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TRITON_CACHE_DIR", "BRIM_CACHE")
        ),
        *(os.path.join(cache, name) for name in ("torch", "torch_extensions", "matplotlib", "brim", "triton")),
        os.path.join(os.path.expanduser("~"), ".triton"),
        os.path.join(os.path.expanduser("~"), ".nv"),
    ]
    here = os.path.realpath(os.getcwd()) + os.sep
    return tuple(folder for folder in known if folder and not here.startswith(os.path.realpath(folder) + os.sep))
