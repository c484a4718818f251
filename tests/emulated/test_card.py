"""The card itself: reported properties, memory, driver functions and errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.emulated.conftest import PYTHON, RunOnCard

from brim.emulator.build import NATIVE, _dynamic_symbols, compiled, torch_build
from brim.emulator.card import check_capability, emulated_card
from brim.errors import UnsupportedError, UsageError
from brim.machine.capability import CONTEXT_BYTES, multiprocessor
from brim.machine.catalogue import find_gpu
from brim.sizes import GIB, MIB

_FILE_FUNCTIONS = {
    "__open64_2", "__open_2", "__openat64_2", "__openat_2", "chmod", "creat", "creat64", "execv", "execve", "execvp", "execvpe", "fchmodat",
    "fopen", "fopen64", "freopen", "freopen64", "link", "linkat", "mkdir", "mkdirat", "mkdtemp", "mkfifo", "mkostemp", "mkostemp64",
    "mkostemps", "mkostemps64", "mkstemp", "mkstemp64", "mkstemps", "mkstemps64", "open", "open64", "openat", "openat64", "posix_spawn",
    "posix_spawnp", "remove", "rename", "renameat", "renameat2", "rmdir", "symlink", "symlinkat", "truncate", "truncate64", "unlink", "unlinkat",
}  # fmt: skip


@pytest.mark.parametrize("name", ["t4", "rtx-3080", "rtx-4090", "a100"])
def test_torch_sees_the_card_of_the_catalogue(on_card: RunOnCard, name: str) -> None:
    gpu = find_gpu(name).gpu
    result = on_card(
        """
        import torch
        p = torch.cuda.get_device_properties(0)
        result = [p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory, p.max_threads_per_multi_processor, torch.cuda.mem_get_info()[1]]
        """,
        name,
    ).result
    assert gpu.sm is not None
    assert result == [
        gpu.driver_names[0], list(gpu.sm), gpu.multiprocessors, gpu.usable_bytes, multiprocessor(gpu.sm).threads, gpu.usable_bytes
    ]  # fmt: skip


def test_allocation_fails_at_the_capacity(on_card: RunOnCard) -> None:
    result = on_card(
        """
        import torch
        blocks, message = [], ""
        try:
            while True:
                blocks.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            message = str(error)
        result = [len(blocks), message]
        """,
        memory="2GiB",
    ).result
    assert result[0] == (2 * GIB - CONTEXT_BYTES) // (64 * MIB)
    assert "GPU 0 has a total capacity of 2.00 GiB" in result[1]


def test_a_card_of_which_only_the_memory_is_known() -> None:
    card = emulated_card("24GiB*2")
    assert (card.count, card.memory_bytes, card.capability) == (2, 24 * GIB, (8, 6))
    assert "8.6" in card.assumption


def test_cards_that_cannot_be_emulated_are_refused() -> None:
    torch = torch_build(PYTHON)
    with pytest.raises(UnsupportedError, match="no kernels for NVIDIA Tesla P100.*it supports .*8\\.0"):
        check_capability(emulated_card("p100"), torch)
    with pytest.raises(UnsupportedError, match="not an NVIDIA GPU"):
        emulated_card("mi250x")
    with pytest.raises(UsageError, match="too small"):
        emulated_card("t4", memory_bytes=1 << 20)
    with pytest.raises(UsageError, match="at most"):
        emulated_card("t4", count=99)


def test_occupancy_follows_the_published_formula(on_card: RunOnCard) -> None:
    """The expected values were checked by hand against NVIDIA's occupancy calculator."""
    result = on_card(
        """
        import ctypes, torch
        torch.cuda.init()
        card = ctypes.CDLL(None)

        class Kernel(ctypes.Structure):
            _fields_ = [(name, ctypes.c_int) for name in ("registers", "static_shared", "dynamic_shared", "max_threads", "local", "constant", "arch")]

        def blocks(registers, shared, threads, dynamic=0):
            return card.brim_card_occupancy(ctypes.byref(Kernel(registers, shared, 0, 1024, 0, 0, 86)), threads, ctypes.c_size_t(dynamic))

        result = [blocks(32, 0, 256), blocks(40, 0, 256), blocks(64, 0, 256), blocks(65, 0, 256), blocks(255, 0, 256), blocks(128, 0, 1024),
                  blocks(16, 0, 32), blocks(32, 0, 1024), blocks(16, 20 << 10, 64), blocks(16, 0, 64, 99 << 10), blocks(16, 0, 64, 100 << 10)]
        """,
        "rtx-3090",
    ).result
    assert result == [6, 6, 4, 3, 1, 0, 16, 1, 4, 1, 0]


def test_without_libzstd_kernels_are_taken_to_use_32_registers(on_card: RunOnCard, tmp_path: Path) -> None:
    """An invalid libzstd.so.1 comes first on the search path. Sorting queries the occupancy, which then uses 32 registers. CUDA 13 compresses
    kernels with zstd; CUDA 12 uses LZ4, which needs no library.
    """
    code = """
        import torch
        for _ in range(2):
            torch.ones(1 << 20, device="cuda").sort()
        result = torch.cuda.max_memory_allocated()
        """
    (tmp_path / "libzstd.so.1").write_text("not a library")
    plain, missing = on_card(code), on_card(code, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "libzstd" not in plain.stderr
    assert missing.stderr.count("libzstd.so.1 is missing. The registers of kernels are unknown and taken as 32") == int(
        torch_build(PYTHON).cuda_version >= (13, 0)
    )
    assert missing.result == plain.result


def test_only_names_of_the_api_are_exported() -> None:
    """Other exported names could clash with functions of the program. The exported functions of libc change files, start programs (guard.c) or
    end a thread (runtime.c).
    """
    exported = set(_dynamic_symbols(compiled(torch_build(PYTHON)).library, defined=True))
    guarded = {name for name in exported if name in _FILE_FUNCTIONS}
    exported.remove("pthread_exit")
    api = re.compile(r"(__)?cuda[A-Z]|cu[A-Z]|cublas|cusolver|cusparse|cufft|cudnn|nccl[A-Z]|nvml[A-Z]|brim_card_")
    assert {name for name in exported - guarded if not api.match(name)} == set()
    assert guarded == _FILE_FUNCTIONS
    assert {"cudaMalloc", "cuMemCreate", "nvmlInit_v2", "cublasCreate_v2", "ncclAllReduce"} <= exported


def test_triton_kernels_load_and_launch_and_report_their_resources(on_card: RunOnCard) -> None:
    if not (torch_build(PYTHON).site_packages / "triton").exists():
        pytest.skip("triton is not installed")
    result = on_card(
        """
        import re, subprocess, tempfile, torch, triton, triton.backends.nvidia
        import triton.language as tl
        from pathlib import Path

        @triton.jit
        def softmax(x, y, n: tl.constexpr):
            row = tl.load(x + tl.program_id(0) * n + tl.arange(0, n))
            e = tl.exp(row - tl.max(row, 0))
            tl.store(y + tl.program_id(0) * n + tl.arange(0, n), e / tl.sum(e, 0))

        x = torch.ones(64, 4096, device="cuda")
        kernel = softmax[(64,)](x, torch.empty_like(x), 4096)
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
        result = [kernel.n_regs, int(re.search(r"REG:(\\d+)", usage)[1]), kernel.n_spills, kernel.metadata.shared]
        """,
        "rtx-3090",
    ).result
    assert result[0] == result[1] > 8


def test_liger_kernels_train_without_logits(on_card: RunOnCard) -> None:
    """RMSNorm, rotary embedding, SwiGLU and the fused loss, all in Triton. The fused loss never holds the logits."""
    result = on_card(
        """
        import importlib.util

        def peak(config):
            model = LlamaForCausalLM(config).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            tokens = torch.randint(0, config.vocab_size, (4, 256)).cuda()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return torch.cuda.max_memory_allocated()

        result = None
        if importlib.util.find_spec("liger_kernel") and importlib.util.find_spec("transformers"):
            import torch
            from liger_kernel.transformers import apply_liger_kernel_to_llama
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=32000)
            plain = peak(config)
            apply_liger_kernel_to_llama()
            result = [plain, peak(config)]
        """,
        "rtx-3090",
    ).result
    if result is None:
        pytest.skip("liger-kernel is not installed: no kernels of it to run")
    logits = 4 * 256 * 32000 * 4
    assert result[1] < result[0] - 2 * logits


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("1,0", [1, 0]), ("2", [2]), ("", []), ("0,5,1", [0]), ("1,1", []), ("GPU-3333,0", [2, 0]), ("-1", [])],
)
def test_cuda_visible_devices_is_honoured(on_card: RunOnCard, visible: str, seen: list[int]) -> None:
    """Calls the runtime and NVML directly, because torch parses CUDA_VISIBLE_DEVICES itself."""
    done = on_card(
        """
        import ctypes
        card = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(-1)
        error = card.cudaGetDeviceCount(ctypes.byref(count))
        buses = []
        for device in range(count.value):
            text = ctypes.create_string_buffer(32)
            card.cudaDeviceGetPCIBusId(text, 32, device)
            buses.append(int(text.value.decode().split(":")[1], 16) - 1)
        physical = ctypes.c_uint()
        card.nvmlDeviceGetCount_v2(ctypes.byref(physical))
        result = [error, buses, physical.value]
        """,
        count=3,
        env={"CUDA_VISIBLE_DEVICES": visible},
    )
    assert done.result == [0 if seen else 100, seen, 3]


def test_torch_on_reordered_and_hidden_cards(on_card: RunOnCard) -> None:
    code = """
        import torch
        result = [torch.cuda.is_available(), torch.cuda.device_count(), torch.ones(3, device="cuda:1").device.index if torch.cuda.device_count() > 1 else None]
        """
    assert on_card(code, count=2, env={"CUDA_VISIBLE_DEVICES": "1,0"}).result == [True, 2, 1]
    assert on_card(code, count=2, env={"CUDA_VISIBLE_DEVICES": ""}).result == [False, 0, None]


def test_memory_of_every_kind(on_card: RunOnCard) -> None:
    result = on_card(
        """
        import ctypes, torch
        card, pointer = ctypes.CDLL(None), ctypes.c_void_p()

        class Attributes(ctypes.Structure):
            _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", ctypes.c_void_p), ("on_host", ctypes.c_void_p), ("rest", ctypes.c_long * 8)]

        def kind(address):
            attributes = Attributes()
            card.cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address))
            return attributes.type

        result = {}
        tensor = torch.ones(100, device="cuda")
        pinned = torch.ones(100).pin_memory()
        result["kinds"] = [kind(tensor.data_ptr()), kind(pinned.data_ptr()), kind(torch.ones(100).data_ptr())]
        result["pinned"] = [pinned.is_pinned(), torch.ones(3).is_pinned(), pinned.cuda(non_blocking=True).sum().item()]
        before = torch.cuda.mem_get_info()[0]
        card.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(64 << 20), 1)
        result["managed"] = [kind(pointer.value), before - torch.cuda.mem_get_info()[0], card.cudaFree(pointer)]
        result["double free"] = [card.cudaFree(pointer), card.cudaGetLastError(), card.cudaGetLastError()]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.ones(1000, device="cuda").sum()
        end.record()
        result["milliseconds"] = start.elapsed_time(end)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            side = torch.arange(5, device="cuda")
        torch.cuda.current_stream().wait_stream(stream)
        result["stream"] = side.tolist()
        """
    ).result
    assert result["kinds"] == [2, 1, 0]
    assert result["pinned"] == [True, False, 100.0]
    assert result["managed"] == [3, 0, 0]
    assert result["double free"] == [1, 1, 0]
    assert 0 <= result["milliseconds"] < 60_000
    assert result["stream"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_keep_to_the_capacity(on_card: RunOnCard, setting: str) -> None:
    result = on_card(
        """
        import torch
        blocks = []
        try:
            while len(blocks) < 100:
                blocks.append(torch.empty(40 << 20, dtype=torch.uint8, device="cuda"))  # whole pages of an expandable segment
        except torch.OutOfMemoryError:
            pass
        full = len(blocks)
        del blocks[::2]
        torch.cuda.empty_cache()
        after = torch.cuda.mem_get_info()[0]
        big = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        result = [full, after >> 20]
        """,
        memory="1198MiB",
        env={"PYTORCH_CUDA_ALLOC_CONF": setting},
    ).result
    assert result == [19, 408]


def test_unsupported_features_raise_clear_errors(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch

        def message(run):
            try:
                run()
            except Exception as error:
                return str(error)

        def capture():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.ones(3, device="cuda")

        matrix = torch.eye(8, device="cuda")
        result = [message(capture), message(lambda: torch.linalg.svd(matrix)), message(lambda: torch.fft.fft(matrix)), message(lambda: matrix.untyped_storage()._share_cuda_())]
        """
    )
    graph, svd, fft, share = done.result
    assert "operation not supported" in graph
    assert "CUDA graphs" in done.stderr
    assert "cusolver" in svd
    assert "cuSOLVER" in done.stderr
    assert "cuFFT" in fft
    assert "not supported" in share


def test_torchscript_fuses_kernels_at_run_time(on_card: RunOnCard) -> None:
    """As in DeBERTa: nvrtc compiles the fused kernel in the second call."""
    assert on_card(
        """
        import torch

        @torch.jit.script
        def bucket(x, y: int):
            return torch.where(x.abs() < y, x, torch.ceil(torch.log(x.abs() / y) * y) + 1).to(torch.long)

        x = torch.arange(64, device="cuda")[None] - torch.arange(64, device="cuda")[:, None]
        for _ in range(4):
            buckets = bucket(x.float(), 8)
        result = list(buckets.shape)
        """
    ).result == [64, 64]


def test_processes_share_the_card_and_free_memory_when_killed(on_card: RunOnCard) -> None:
    result = on_card(
        """
        import os, signal, subprocess, sys, time, torch
        hold = "import torch, time; x = torch.empty(512 << 20, dtype=torch.uint8, device='cuda'); print('ready', flush=True); time.sleep(600)"
        torch.cuda.init()
        free = [torch.cuda.mem_get_info()[0] >> 20]
        child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        free.append(torch.cuda.mem_get_info()[0] >> 20)
        import pynvml
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        holders = {p.pid: p.usedGpuMemory >> 20 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        try:
            torch.empty(1100 << 20, dtype=torch.uint8, device="cuda")
            message = ""
        except torch.OutOfMemoryError as error:
            message = str(error)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        free.append(torch.cuda.mem_get_info()[0] >> 20)
        result = [free, holders == {os.getpid(): 430, child.pid: 942}, str(child.pid) in message]
        """,
        memory="2GiB",
    ).result
    assert result == [[1618, 676, 1618], True, True]


def test_fork_and_spawn(on_card: RunOnCard) -> None:
    done = on_card(
        """
        import torch
        from torch import multiprocessing
        from torch.utils.data import DataLoader

        def use(queue):
            try:
                queue.put(torch.arange(3, device="cuda").tolist())
            except RuntimeError as error:
                queue.put(str(error))

        if __name__ == "__main__":
            torch.zeros(4, device="cuda")
            result = []
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                process = context.Process(target=use, args=(queue,))
                process.start()
                result.append(queue.get())
                process.join()
            loader = DataLoader(torch.arange(32), batch_size=8, num_workers=2, pin_memory=True)
            result.append([batch.cuda(non_blocking=True).sum().item() for batch in loader])
        """
    )
    forked, spawned, batches = done.result
    assert "Cannot re-initialize CUDA in forked subprocess" in forked
    assert spawned == [0, 1, 2]
    assert batches == [28, 92, 156, 220]


def test_a_script_may_end_right_after_backward(on_card: RunOnCard) -> None:
    """torch's autograd thread is still releasing the graph when Python ends. Without the card's `pthread_exit`, half of these runs abort."""
    assert (
        on_card(
            """
        import subprocess, sys
        script = "import torch; x = torch.randn(64, 64, device='cuda', requires_grad=True); [(x @ x).sum().backward() for _ in range(3)]"
        result = [subprocess.run([sys.executable, "-c", script]).returncode for _ in range(6)]
        """
        ).result
        == [0] * 6
    )


def test_nothing_is_left_behind_after_kill(tmp_path: Path) -> None:
    """There are no files in shared memory after the command and its children are killed."""
    code = "import subprocess, sys, time, torch; torch.zeros(9, device='cuda'); print('ready', flush=True); time.sleep(600)"
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "brim.emulator", "--", PYTHON, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, 9)
    process.wait()
    assert [path for path in Path("/dev/shm").iterdir() if path not in before and "brim" in path.name] == []


def test_the_environment_ends_with_the_command(on_card: RunOnCard) -> None:
    assert on_card("import os\nresult = sorted(name for name in os.environ if name.startswith('BRIM_CARD'))").result
    assert not [name for name in os.environ if name.startswith("BRIM_CARD")]


def test_sources_compile_without_a_cuda_toolkit(tmp_path: Path) -> None:
    """The compiler opens only headers of torch, of the system and of the project."""
    torch = torch_build(PYTHON)
    headers = torch.folder / "include"
    include = [f"-I{path}" for path in (NATIVE / "include", headers, headers / "torch/csrc/api/include")]
    compilers = [(["cc", "-std=gnu11"], path) for path in NATIVE.glob("*.c")] + [
        (["c++", "-std=c++20", *include], path) for path in NATIVE.glob("*.cpp")
    ]
    for compiler, source in compilers:
        done = subprocess.run(
            [*compiler, "-w", "-M", str(source)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=True
        )
        opened = [Path(word) for word in done.stdout.replace("\\\n", " ").split()[1:]]
        allowed = (str(NATIVE), str(torch.folder), "/usr/include", "/usr/lib", "/usr/local/include")
        assert [path for path in opened if not str(path).startswith(allowed) or "cuda/include" in str(path)] == []


def fake_python(folder: Path, answer: str) -> Path:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


def test_interpreters_without_a_cuda_build_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no PyTorch"):
        torch_build(fake_python(tmp_path, '{"torch": null, "glibc": "glibc 2.36"}'))
    cpu = f'{{"torch": {{"folder": "{tmp_path}", "version": "2.13.0+cpu", "cuda": null, "git": null}}, "glibc": "glibc 2.36"}}'
    with pytest.raises(UnsupportedError, match="CPU build of PyTorch") as caught:
        torch_build(fake_python(tmp_path, cpu))
    assert "torch===" in (caught.value.hint or "")
    with pytest.raises(UnsupportedError, match="musl"):
        torch_build(fake_python(tmp_path, '{"torch": null, "glibc": null}'))
    with pytest.raises(UnsupportedError, match="not a working Python"):
        torch_build(tmp_path / "nothing")


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.emulator.build.sys.platform", "darwin")
    with pytest.raises(UnsupportedError, match="Linux"):
        torch_build()


def test_without_a_compiler_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="no-such-compiler"):
        compiled(torch_build(PYTHON))
    assert [path.name for path in (tmp_path / "emulator").iterdir()] == [".lock"]
