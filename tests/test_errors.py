"""An out-of-memory error is recognised whoever raises it, and nothing else is taken for one."""

from __future__ import annotations

import errno
import subprocess
import traceback

import pytest
import torch

from brim import errors
from brim.errors import is_out_of_memory, out_of_memory_family

OUT_OF_MEMORY = [
    ("cuda", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.58 GiB of which 1.02 GiB is free."),
    ("cuda", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    ("cuda", "CUDA driver error: out of memory"),
    ("cuda", "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY"),
    ("rocm", "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 63.98 GiB"),
    ("rocm", "HIP error: out of memory"),
    ("xpu", "XPU out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.11 GiB total capacity)"),
    ("xpu", "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("npu", "NPU out of memory. Tried to allocate 512.00 MiB (NPU 0; 29.50 GiB total capacity)"),
    ("mps", "MPS backend out of memory (MPS allocated: 17.51 GB, other allocations: 384.00 KB, max allowed: 18.13 GB)."),
    ("mps", "Invalid buffer size: 24.00 GB"),
    ("cublas", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("cublas", "HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    ("cudnn", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("cudnn", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("cusolver", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ("cusolver", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("nccl", "NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled cuda error, NCCL version 2.20.5\nLast error:\nCuda failure 2 'out of memory'"),
    ("nccl", "NCCL error: ncclUnhandledCudaError\nLast error:\nCuda failure 'out of memory'"),
    ("nccl", "Last error:\nFailed to CUDA calloc async 2432 bytes"),
    ("bitsandbytes", "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"),
    ("cpu", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
    ("cpu", "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
    ("cpu", "could not create a primitive"),
    ("cpu", "could not create a memory object"),
    ("cpu", "std::bad_alloc"),
    ("cpu", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"),
    ("cpu", "\nlibgomp: Thread creation failed: Resource temporarily unavailable"),
    ("cpu", "[Errno 12] Cannot allocate memory"),
    ("cpu", "unable to mmap 1073741824 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    ("cpu", "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nMemoryError"),
    ("cpu", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array"),
    ("cuda", "Traceback (most recent call last):\n  File \"t.py\", line 3\ntorch.OutOfMemoryError: tried"),
    ("cuda", "Triton Error [CUDA]: out of memory"),
    ("cuda", "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58"),
    ("nccl", "Failed to CUDA host alloc 4194304 bytes"),
    ("cpu", "[WinError 1455] The paging file is too small for this operation to complete"),
    ("cpu", "Error while deserializing header: Cannot allocate memory (os error 12)"),
    ("cpu", "libtorch_cpu.so: failed to map segment from shared object"),
    ("cpu", "OpenBLAS error: Memory allocation still failed after 10 retries, giving up."),
    ("killed", "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0"),
    ("killed", "DataLoader worker (pid 4711) is killed by signal: Killed. "),
    ("killed", "process 1 terminated with signal SIGKILL"),
    ("killed", "Signal 9 (SIGKILL) received by PID 12345"),
]  # fmt: skip

NEAR_MISSES = [
    "out of memory",  # says nobody in particular: a user's own exception, a log line
    "The model ran out of memory tokens",
    "if you see CUDA out of memory, lower the batch size",
    "to avoid [Errno 12] raise the limit",
    "ENOMEM is 12",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "NCCL error: unhandled system error, NCCL version 2.20.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    "No space left on device",
    "[Errno 28] No space left on device",
    "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
    "DataLoader worker (pid(s) 4711) exited unexpectedly",
    "DataLoader worker (pid 4711) is killed by signal: Segmentation fault.",
    "process 1 terminated with signal SIGSEGV",
    "could not create a primitive descriptor for a matmul primitive",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "The expanded size of the tensor (2048) must match the existing size (2) at non-singleton dimension 2.",
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).",
    "memory_efficient_attention is not available",
    "Cannot allocate memory-mapped file descriptor table",
    "CUDA-capable device(s) is/are busy or unavailable",
    "MPS backend does not support float64",
    "libgomp: Invalid value for environment variable OMP_NUM_THREADS",
    "expected scalar type Half but found Float",
    "HTTP 507 Insufficient Storage",
]  # fmt: skip


@pytest.mark.parametrize(("family", "message"), OUT_OF_MEMORY)
def test_an_out_of_memory_message_is_recognised(family: str, message: str) -> None:
    assert out_of_memory_family(message) == family
    assert out_of_memory_family(RuntimeError(message)) == family


@pytest.mark.parametrize("message", NEAR_MISSES)
def test_a_near_miss_is_not_called_out_of_memory(message: str) -> None:
    assert out_of_memory_family(message) is None
    assert out_of_memory_family(RuntimeError(message)) is None


@pytest.mark.parametrize(
    ("error", "family"),
    [
        (torch.OutOfMemoryError("anything"), "cuda"),
        (MemoryError(), "cpu"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "cpu"),
        (subprocess.CalledProcessError(-9, ["python"]), "killed"),
        (subprocess.CalledProcessError(137, ["bash"]), "killed"),
        (ExceptionGroup("several", [ValueError(), MemoryError()]), "cpu"),
        (errors.OutOfMemoryError("x", family="mps"), "mps"),
    ],
)
def test_types_are_recognised_without_a_message(error: BaseException, family: str) -> None:
    assert out_of_memory_family(error) == family


@pytest.mark.parametrize(
    "error",
    [
        KeyError("CUDA out of memory"),
        ValueError("CUDA out of memory. Tried to allocate"),
        OSError(errno.ENOSPC, "No space left on device"),
        subprocess.CalledProcessError(1, ["python"]),
        subprocess.CalledProcessError(-11, ["python"]),
        KeyboardInterrupt(),
    ],
)
def test_a_foreign_type_is_not_judged_by_its_words(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_cause_counts_and_the_mere_context_does_not() -> None:
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(wrapped)
    cleaning = RuntimeError("a defect in the cleaning up")
    cleaning.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert not is_out_of_memory(cleaning)


def test_a_real_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory_family(caught.value) == "cpu"


def test_a_hint_is_shown_by_a_traceback_and_is_no_part_of_the_message() -> None:
    error = errors.UsageError("The tank is empty.", hint="Fill it.")
    assert error.__notes__ == ["Fill it."]
    assert traceback.format_exception(error) == ["brim.errors.UsageError: The tank is empty.\n", "Fill it.\n"]
    assert (str(error), error.message, error.hint) == ("The tank is empty.", "The tank is empty.", "Fill it.")
    for other in (errors.UnknownNameError("x", hint="y"), errors.OutOfMemoryError("x", hint="y")):
        assert other.__notes__ == ["y"]


def test_an_error_without_a_hint_has_no_note() -> None:
    assert not hasattr(errors.RunError("The tank is empty."), "__notes__")


def test_usage_errors_are_value_errors_and_exit_with_2() -> None:
    kinds = (errors.UnknownNameError, errors.ConfigError, errors.RecordError, errors.UnsupportedError)
    assert all(issubclass(kind, ValueError) and kind.exit_code == 2 for kind in kinds)
    assert errors.OutOfMemoryError.exit_code == errors.ChildError.exit_code == 1
