"""Compiles the emulated card for the torch of an interpreter.

Two libraries are built from `native/`: the card (C, one file that replaces libcudart, libcuda, libnvidia-ml, libcublas and libnccl) and the
values (C++ against torch's own headers). No CUDA toolkit is needed. The list of functions is read from torch itself: every CUDA function
that its libraries import and that our sources do not define becomes a stub. Stubs of cuBLAS do nothing and succeed; all others return
"operation not supported".
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from brim.errors import RunError, UnsupportedError, UsageError
from brim.locale import _
from brim.machine.host import cache_folder
from brim.machine.screen import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NATIVE: Final = Path(str(files("brim.emulator").joinpath("native")))
PATH: Final = Path(str(files("brim.emulator").joinpath("path")))
_CARD: Final = "libbrim_card.so"
_VALUES: Final = "libbrim_card_values.so"
_TORCH_LIBRARIES: Final = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
)
_CUDA_LIBRARIES: Final = ("libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*", "libnccl.so.*")
_STUBBED: Final = re.compile(r"cuda[A-Z]|cu(?!File)[A-Z]|cublas|nccl[A-Z]|nvml[A-Z]")
# Status that a stub returns, by prefix: success for cuBLAS, which only computes, else the code for "not supported".
_STUB_STATUS: Final = {"cublas": 0, "nccl": 5, "nvml": 3}
_NOT_SUPPORTED: Final = 801
# Functions that nvcc calls from every object file. One that the card lacks is a new way to register or launch kernels, so it is an error.
_REQUIRED: Final = re.compile(r"__cuda[A-Z]")
_FIND_TORCH: Final = """
import importlib.util, json, os, runpy, sys
spec = importlib.util.find_spec("torch")
torch = None
if spec is not None and spec.origin:
    folder = os.path.dirname(spec.origin)
    version = runpy.run_path(os.path.join(folder, "version.py"))
    torch = {"folder": folder, "version": str(version["__version__"]), "cuda": version.get("cuda"), "git": version.get("git_version")}
try:
    glibc = os.confstr("CS_GNU_LIBC_VERSION")
except (ValueError, OSError):
    glibc = None
print(json.dumps({"torch": torch, "glibc": glibc}))
"""


@dataclass(frozen=True)
class TorchBuild:
    """The torch that an interpreter would import."""

    python: Path
    folder: Path
    """`site-packages/torch`."""
    version: str
    cuda: str
    """CUDA version of the build: `13.0`."""
    commit: str | None = None

    @property
    def site_packages(self) -> Path:
        """The folder of its dependencies, which include NVIDIA's libraries."""
        return self.folder.parent

    @property
    def cuda_version(self) -> tuple[int, int]:
        """`cuda` as numbers: (13, 0)."""
        major, _dot, minor = self.cuda.partition(".")
        return int(major), int(minor or 0)

    def library(self, name: str) -> Path:
        """The path of one of torch's own libraries."""
        return self.folder / "lib" / name

    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """The compute capabilities that its kernels are compiled for."""
        archs = _architectures(self.library("libtorch_cuda.so"))
        return tuple(sorted((arch // 10, arch % 10) for arch in archs))


@dataclass(frozen=True)
class CompiledCard:
    """The libraries of a card, ready to be preloaded."""

    folder: Path
    """Contains libbrim_card.so and links to it, such as libcuda.so.1 and libnvidia-ml.so.1."""
    values: Path
    """The library that `brim_card` loads at `import torch`."""

    @property
    def library(self) -> Path:
        """The library for LD_PRELOAD."""
        return self.folder / _CARD


def interpreter(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Path:
    """The Python that a command runs: the program itself, the one in its first line (`torchrun`, `accelerate`), else `python` on PATH."""
    path = (os.environ if environment is None else environment).get("PATH")
    program = shutil.which(command[0], path=path)
    if program is None and Path(command[0]).is_file():
        raise UsageError(
            _("Cannot run {command}: it is not an executable program.").format(command=command[0]),
            hint=_("For a Python script: python {command}").format(command=command[0]),
        )
    if program is None:
        raise UsageError(_("Cannot run {command}: there is no such program.").format(command=command[0]))
    if Path(program).name.startswith("python"):
        return Path(program)
    with Path(program).open("rb") as script:
        first = script.readline(4096)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    if words and Path(words[0]).name.startswith("python"):
        return Path(shutil.which(words[0], path=path) or words[0])
    return Path(shutil.which("python", path=path) or shutil.which("python3", path=path) or sys.executable)


def torch_build(python: str | Path | None = None) -> TorchBuild:
    """Find the torch of an interpreter (default: this one). torch is not imported."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnsupportedError(_("The emulated card runs on Linux x86-64 only."), hint=_("Use a Linux machine or container."))
    executable = str(python or sys.executable)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run([executable, "-c", _FIND_TORCH], capture_output=True, text=True, check=True, env=environment)
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise UnsupportedError(_("{python} is not a working Python interpreter.").format(python=executable)) from error
    if answer["glibc"] is None:
        raise UnsupportedError(
            _("{python} uses musl; the emulated card needs glibc, as PyTorch's CUDA builds do.").format(python=executable),
            hint=_("Use an image that is not based on Alpine."),
        )
    torch = answer["torch"]
    if torch is None:
        raise UnsupportedError(_("{python} has no PyTorch.").format(python=executable), hint=_cuda_build_hint(executable))
    if not torch["cuda"] or not (Path(torch["folder"]) / "lib" / "libtorch_cuda.so").exists():
        raise UnsupportedError(
            _("{python} has a CPU build of PyTorch ({version}); the emulated card needs a CUDA build.").format(
                python=executable, version=torch["version"]
            ),
            hint=_cuda_build_hint(executable),
        )
    return TorchBuild(Path(executable), Path(torch["folder"]), torch["version"], torch["cuda"], torch["git"])


def _cuda_build_hint(python: str) -> str:
    text = _("Install it with: {python} -m pip install 'torch===2.13.0' (three equals signs, about 5 GB, no GPU needed).")
    return text.format(python=python)


def compiled(torch: TorchBuild) -> CompiledCard:
    """The card for this torch, from the cache folder; compiled first if it is missing. Several processes may call this at once."""
    root = cache_folder() / "emulator"
    parts = {_key(torch, *pattern): build for pattern, build in _PARTS.items()}
    try:
        if not all((root / name).is_dir() for name in parts):
            root.mkdir(parents=True, exist_ok=True)
            with (root / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                missing = {name: build for name, build in parts.items() if not (root / name).is_dir()}
                if missing:
                    say(_("Compiling the emulated card (once, about a minute)"))
                for name, build in missing.items():
                    _build(root / name, torch, build)
    except OSError as error:
        text = _("Cannot write the compiled card to {folder}: {error}").format(folder=root, error=error.strerror or error)
        raise RunError(text, hint=_("Set another folder: BRIM_CACHE=/path/to/folder.")) from error
    card, values = (root / name for name in parts)
    return CompiledCard(card, values / _VALUES)


def _key(torch: TorchBuild, *patterns: str) -> str:
    """A cache key that changes with the sources, this file, the compilers and the build of torch."""
    digest = hashlib.sha256()
    for source in sorted(path for pattern in (*patterns, "**/*.h") for path in NATIVE.glob(pattern)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    library = torch.library("libtorch_cuda.so").stat()
    build = (torch.version, torch.cuda, torch.commit, str(torch.folder), library.st_size, library.st_mtime_ns)
    digest.update(Path(__file__).read_bytes() + repr((build, _compiler("CC"), _compiler("CXX"))).encode())
    return f"{torch.version}-{digest.hexdigest()[:20]}"


def _compiler(variable: str) -> list[str]:
    words = os.environ.get(variable, "").split()
    if words:
        return words
    candidates = ("cc", "gcc", "clang") if variable == "CC" else ("c++", "g++", "clang++")
    return [next((name for name in candidates if shutil.which(name)), candidates[0])]


def _build(folder: Path, torch: TorchBuild, build: Callable[[Path, TorchBuild], None]) -> None:
    """Build in a scratch folder and rename it, so that `folder` is never incomplete."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        build(scratch, torch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _build_card(folder: Path, torch: TorchBuild) -> None:
    compiler = [*_checked_compiler("CC"), "-O2", *_flags(torch)]
    names = _cuda_functions(torch)
    with tempfile.TemporaryDirectory() as scratch:
        stubs = Path(scratch) / "stubs.c"
        stubs.write_text(_stubs(names), encoding="utf-8")
        _run([*compiler, "-w", "-fno-builtin", "-c", str(stubs), "-o", f"{scratch}/stubs.o"])
        sources = [str(path) for path in sorted(NATIVE.glob("*.c"))]
        # Triton links against libcuda.so and caches the result, so the result must depend on the driver by its usual name.
        named = ["-Wl,-soname,libcuda.so.1", "-o", str(folder / _CARD)]
        _run([*compiler, "-std=gnu11", *sources, f"{scratch}/stubs.o", *named, "-lpthread", "-ldl", "-lm"])
    _refuse_missing(torch, names, folder / _CARD)
    for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(_CARD)


def _build_values(folder: Path, torch: TorchBuild) -> None:
    headers = torch.folder / "include"
    include = [f"-I{path}" for path in (NATIVE / "include", headers, headers / "torch/csrc/api/include")]
    libraries = [f"-L{torch.folder / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(_uses_cxx11_abi(torch))}"
    sources = [str(path) for path in sorted(NATIVE.glob("*.cpp"))]
    compiler = [*_checked_compiler("CXX"), "-O1", "-std=c++20", "-w", *_flags(torch)]
    _run([*compiler, abi, *include, *sources, "-o", str(folder / _VALUES), *libraries])


_PARTS: Final = {("*.c",): _build_card, ("*.cpp",): _build_values}


def _flags(torch: TorchBuild) -> list[str]:
    major, minor = torch.cuda_version
    return ["-shared", "-fPIC", f"-DCUDA_MAJOR={major}", f"-DCUDA_VERSION={major * 1000 + minor * 10}"]


def _checked_compiler(variable: str) -> list[str]:
    compiler = _compiler(variable)
    if shutil.which(compiler[0]) is None:
        text = _("The emulated card is compiled on first use, and there is no C/C++ compiler ({compiler}).")
        raise UnsupportedError(
            text.format(compiler=compiler[0]), hint=_("Install one (apt install g++), or name it in CC and CXX.")
        )
    return compiler


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C", "LD_PRELOAD": ""}
    )
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-300:])
        raise RunError(
            _("Cannot compile the emulated card for this PyTorch: {error}").format(error=first),
            hint=_("Command: {command}").format(command=" ".join(command)),
        )


def _cuda_functions(torch: TorchBuild) -> list[str]:
    """Functions that torch's libraries import or NVIDIA's libraries export. Extensions may import more than torch does."""
    names: set[str] = set()
    for name in _TORCH_LIBRARIES:
        if torch.library(name).exists():
            names |= set(_dynamic_symbols(torch.library(name), defined=False))
    for pattern in _CUDA_LIBRARIES:
        for library in sorted(torch.site_packages.glob(f"nvidia/*/lib/{pattern}")):
            names |= {name for name in _dynamic_symbols(library, defined=True) if not name.startswith("__")}
    header = torch.folder / "include/c10/cuda/driver_api.h"  # functions of the driver are looked up by name, not imported
    if header.exists():
        for macro, listed in re.findall(r"#define (\w+)\(_\)((?:.*\\\n)*.*\n)", header.read_text(encoding="utf-8")):
            # torch works without the optional functions, but may fail if they exist and return an error.
            if not macro.endswith("OPTIONAL"):
                names |= set(re.findall(r"_\(((?:cu|nvml)[A-Z]\w+)", listed))
    return sorted(name for name in names if _STUBBED.match(name) or _REQUIRED.match(name))


def _stubs(names: list[str]) -> str:
    """Source of the stubs. They are weak symbols, so that functions of the sources take precedence."""
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "#define STUB(name, status) __attribute__((weak)) int name(void) { static int traced; \\",
        '    if (!traced++ && getenv("BRIM_CARD_TRACE")) fprintf(stderr, "brim card: stub %s\\n", #name); return status; }',
    ]
    for name in names:
        if _STUBBED.match(name):
            status = next((code for prefix, code in _STUB_STATUS.items() if name.startswith(prefix)), _NOT_SUPPORTED)
            lines.append(f"STUB({name}, {status})")
    return "\n".join(lines) + "\n"


def _refuse_missing(torch: TorchBuild, names: list[str], library: Path) -> None:
    exported = set(_dynamic_symbols(library, defined=True))
    missing = [name for name in names if _REQUIRED.match(name) and name not in exported]
    if missing:
        raise UnsupportedError(
            _("PyTorch {version} needs CUDA functions that the emulated card lacks: {names}.").format(
                version=torch.version, names=", ".join(missing[:5])
            ),
            hint=_("Use another version of PyTorch, or a newer brim."),
        )


def _uses_cxx11_abi(torch: TorchBuild) -> bool:
    return any("__cxx11" in name for name in _dynamic_symbols(torch.library("libc10.so"), defined=True))


# ---- a minimal reader of ELF files: tools such as `nm` may not be installed
def _sections(view: mmap.mmap) -> Iterator[tuple[str, int, int, int, int]]:
    """Name, type, offset, size and linked section of each section in a 64-bit little-endian file."""
    if view[:6] != b"\x7fELF\x02\x01":
        return
    start, size, count, names = *struct.unpack_from("<Q", view, 40), *struct.unpack_from("<HHH", view, 58)
    headers = [struct.unpack_from("<IIQQQQII", view, start + index * size) for index in range(count)]
    for name, kind, _flags, _address, offset, length, link, _info in headers:
        at = headers[names][4] + name
        yield view[at : view.find(b"\0", at)].decode(), kind, offset, length, link


def _dynamic_symbols(path: Path, *, defined: bool) -> Iterator[str]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        sections = list(_sections(view))
        for _name, kind, offset, size, link in sections:
            if kind != 11:  # SHT_DYNSYM
                continue
            strings = sections[link][2]
            for name, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", view[offset : offset + size]):
                if (section != 0) == defined and name:
                    yield view[strings + name : view.find(b"\0", strings + name)].decode()


def _architectures(path: Path, *, containers: int = 64) -> set[int]:
    """Architectures (75, 80, 86, ...) of the first kernels in a library. Each container in `.nv_fatbin` has one image per architecture."""
    archs: set[int] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for name, _kind, offset, size, _link in _sections(view):
            if name != ".nv_fatbin":
                continue
            at, end = offset, offset + size
            for _container in range(containers):
                at = view.find(b"\x50\xed\x55\xba", at, end)  # 0xba55ed50 starts a container
                if at < 0:
                    break
                header, length = struct.unpack_from("<HQ", view, at + 6)
                images = _images(view, at + header, at + header + length)
                archs |= {arch for kind, arch in images if kind == 2}  # machine code, not PTX
                at += header + length
    return archs


def _images(view: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int]]:
    while at + 32 <= end:
        kind, _flags, header, length = struct.unpack_from("<HHIQ", view, at)
        if not header:
            return
        yield kind, struct.unpack_from("<I", view, at + 28)[0]
        at += header + length
