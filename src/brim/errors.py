"""Every error that brim raises, and the recogniser of other people's out-of-memory errors.

    BrimError                    the root: `except brim.BrimError` catches all that brim raises on purpose
    ├── UsageError               what was given is wrong; also a ValueError; the command line exits with 2
    │   ├── UnknownNameError     a GPU, model, language or key that nobody knows; carries the nearest known names
    │   ├── ConfigError          a config file that cannot be read, or holds a key or value that does not exist
    │   ├── RecordError          a plan, measurement or ledger file that is broken, foreign or of another version
    │   └── UnsupportedError     this platform or installation cannot do it (no RLIMIT_DATA, no flash-attn)
    │       └── MissingPackageError  a package of `brim[train]` is not installed; also an ImportError
    └── RunError                 the request was right, the run was not; the command line exits with 1
        ├── OutOfMemoryError     memory ran out: on the device, or under the budget that was set
        └── ChildError           a child process crashed, was killed or took too long

`out_of_memory_family` recognises the out-of-memory errors of PyTorch's backends and the libraries below them by type and by
message. Its list is complete on purpose and narrow on purpose: an error that is not about memory is never called an OOM, because
the answer to an OOM is to run the same work again in smaller slices.
"""

from __future__ import annotations

import errno
import re
from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


class BrimError(Exception):
    """The root of all errors that brim raises on purpose. `hint` says what to type next."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(hint)  # for whoever sees a traceback: the command line prints both by itself


class UsageError(BrimError, ValueError):
    """What the user gave is wrong; nothing was started and nothing was written."""

    exit_code = EXIT_USAGE


class UnknownNameError(UsageError):
    """A name that is in no catalogue; `nearest` holds the known names closest to it, best first."""

    def __init__(self, message: str, *, nearest: tuple[str, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.nearest = nearest


class ConfigError(UsageError):
    """A config file that cannot be read, or that holds a key or a value that does not exist."""


class RecordError(UsageError):
    """A file that should hold one of brim's records, and does not."""


class UnsupportedError(UsageError):
    """This platform, or what is installed on it, cannot do what was asked."""


class MissingPackageError(UnsupportedError, ImportError):
    """A package of `brim[train]` is not installed. `name` is the package, as in every ImportError."""

    def __init__(self, message: str, *, package: str) -> None:
        super().__init__(message)
        self.msg = message
        self.name = package


class RunError(BrimError):
    """The request was right, and the run failed."""


class OutOfMemoryError(RunError):
    """Memory ran out. `family` names who said so (see `out_of_memory_family`)."""

    def __init__(self, message: str, *, family: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.family = family


class ChildError(RunError):
    """A child process crashed, was killed by a signal, or took longer than it was allowed."""


# The families, each with the shortest text that only an out-of-memory error of that family holds. Where a library prints the same
# status for several causes (CUDNN_STATUS_NOT_INITIALIZED, an unhandled NCCL error), only the form that names memory is listed.
_MESSAGES: Final[tuple[tuple[str, str], ...]] = (
    # torch's caching allocators: "CUDA out of memory. Tried to allocate ...". One wording, one word per backend.
    ("cuda", r"CUDA out of memory\."),
    ("rocm", r"HIP out of memory\."),
    ("xpu", r"XPU out of memory\."),
    ("npu", r"\b(?:NPU|MLU|MUSA) out of memory\."),
    ("mps", r"MPS backend out of memory \("),
    # Errors of the driver and the runtime: "CUDA error: out of memory", "CUDA driver error: out of memory".
    ("cuda", r"CUDA (?:driver |runtime )?error: out of memory\b|\bcuda runtime error \(2\) : out of memory"),
    ("cuda", r"Triton Error \[(?:CUDA|HIP)\]: out of memory\b"),
    ("cuda", r"\bcudaErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"),
    ("rocm", r"HIP (?:driver |runtime )?error: out of memory\b|\bhipErrorOutOfMemory\b"),
    ("xpu", r"\b(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b"),
    ("mps", r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b"),
    ("mps", r"Invalid buffer size: [\d.]+ [KMGT]i?B\b"),
    # bitsandbytes prints its own line and exits: "Error out of memory at line 380 in file ...".
    ("bitsandbytes", r"\bError out of memory at line \d+"),
    # The mathematics libraries, each with its status code for a failed allocation.
    ("cublas", r"\b(?:CUBLAS|HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED\b|\brocblas_status_memory_error\b"),
    ("cudnn", r"\bCUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED)\b"),
    ("cudnn", r"\bmiopenStatusAllocFailed\b"),
    ("cusolver", r"\b(?:CUSOLVER|CUSPARSE|CURAND|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC(?:ATION)?_FAILED\b"),
    ("cusolver", r"\b(?:CUFFT|HIPFFT)_ALLOC_FAILED\b"),
    # NCCL reports the CUDA failure below it, or its own allocation.
    ("nccl", r"\bCuda failure (?:\d+ )?'out of memory'|\bHIP failure (?:\d+ )?'out of memory'"),
    ("nccl", r"\bFailed to (?:CUDA|HIP) (?:calloc|malloc|host alloc)\b"),
    ("nccl", r"\bncclSystemError\b[^\n]*\n?[^\n]*Cannot allocate memory"),
    # The CPU: torch's allocator (Linux, then Windows wording), oneDNN, C++, the OpenMP pool, the operating system.
    ("cpu", r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|\$ Torch: not enough memory"),
    ("cpu", r"\bstd::bad_alloc\b|\bstd::bad_array_new_length\b"),
    ("cpu", r"\bcould not create a (?:primitive|memory object|memory storage)(?! desc)\b"),
    ("cpu", r"\bout_of_memory\b.*\bonednn|\bonednn\b.*\bout_of_memory\b|\bdnnl_out_of_memory\b"),
    ("cpu", r"libgomp: Thread creation failed: (?:Resource temporarily unavailable|Cannot allocate memory)"),
    ("cpu", r"libgomp: Out of memory allocating\b"),
    ("cpu", r"OMP: Error #\d+: .*(?:Cannot allocate memory|Memory allocation failed)"),
    ("cpu", r"OpenBLAS blas_thread_init: pthread_create failed.*Resource temporarily unavailable"),
    ("cpu", r"\[Errno 12\] Cannot allocate memory|\bCannot allocate memory(?: \(12\)|$| \(os error 12\))"),
    ("cpu", r"\bcannot allocate TLS data structures|: failed to map segment from shared object"),
    ("cpu", r"\[WinError 1455\]|\(os error 1455\)"),
    ("cpu", r"OpenBLAS error: Memory allocation still failed"),
    ("cpu", r"\bvirtual memory exhausted\b|\bmemory allocation of \d+ bytes failed"),
    # The last line of a Python traceback, where only a child's output is left to judge by.
    ("cuda", r"^torch\.(?:cuda\.)?OutOfMemoryError\b"),
    ("cpu", r"^(?:[\w.]+\.)?_?(?:Array|Arrow)?MemoryError(?::|$)"),
    # A child of the framework that the kernel killed: DataLoader workers, torch.multiprocessing, torchrun.
    ("killed", r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Killed\b"),
    ("killed", r"\bterminated with signal SIGKILL\b|\bSignal 9 \(SIGKILL\) received by PID\b"),
    ("killed", r"\bOut of memory: Killed process \d+|\boom[-_]kill(?:er|:| event)"),
)
_COMPILED: Final = tuple((family, re.compile(pattern, re.MULTILINE)) for family, pattern in _MESSAGES)

# Recognised by type wherever they are defined, so that torch need not be imported to name them.
_TYPES: Final = {
    "torch.OutOfMemoryError": "cuda",
    "torch.cuda.OutOfMemoryError": "cuda",
    "torch.xpu.OutOfMemoryError": "xpu",
    "builtins.MemoryError": "cpu",
}


def out_of_memory_family(error: BaseException | str) -> str | None:
    """Name who ran out of memory ("cuda", "cublas", "cpu", ...), or None where the error is about something else.

    An exception is judged by its type, its message, and those of the errors that it was explicitly raised `from`. A string is
    judged as the text of an error: a child's standard error, a line of a log.
    """
    if isinstance(error, str):
        return next((family for family, pattern in _COMPILED if pattern.search(error)), None)
    if isinstance(error, OutOfMemoryError):
        return error.family or "cpu"
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        family = _family_of_one(current)
        if family is not None:
            return family
        if isinstance(current, BaseExceptionGroup):
            families = (out_of_memory_family(member) for member in current.exceptions)
            return next((family for family in families if family is not None), None)
        current = current.__cause__
    return None


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether this error means that memory ran out, and nothing else."""
    return out_of_memory_family(error) is not None


def _family_of_one(error: BaseException) -> str | None:
    by_message = out_of_memory_family(str(error)) if _may_speak_of_memory(error) else None
    if by_message is not None:
        return by_message
    for kind in type(error).__mro__:
        family = _TYPES.get(f"{kind.__module__}.{kind.__qualname__}")
        if family is not None:
            return family
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "cpu"
    # 137 is how a shell and a container tell signal 9.
    return "killed" if getattr(error, "returncode", None) in {-9, 137} else None


def _may_speak_of_memory(error: BaseException) -> bool:
    """Only errors of the running program count: a KeyError whose key is "CUDA out of memory" is a bug, not an OOM."""
    if isinstance(error, RuntimeError | MemoryError | OSError | ImportError | SystemError | ChildError):
        return True
    return type(error).__module__.partition(".")[0] in {"torch", "subprocess", "concurrent", "safetensors_rust"}
