"""What the tests of the budget run in child processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KEPT: list[Any] = []


def double(number: int) -> int:
    return number * 2


def can_use_cuda() -> bool:
    """Whether this process imported the module that initialises CUDA by itself, and is no fork of one that did."""
    from tests.machine import touches_cuda

    return os.getpid() == touches_cuda.IMPORTED_BY


def environment(name: str) -> str | None:
    return os.environ.get(name)


def fill_bytes(size: int) -> int:
    """Allocate and touch plain Python memory."""
    return len(bytearray(size))


def fill_tensor(size: int) -> float:
    import torch

    return float(torch.ones(size // 4).sum())


def largest_tensor_mib() -> int:
    """Step by step, how many MiB of tensors fit; then free them, and prove that the process works on."""
    import torch

    held = []
    try:
        while True:
            held.append(torch.ones(16 << 18))
    except RuntimeError:
        count = len(held)
    held.clear()
    assert float((torch.ones(512, 512) @ torch.ones(512, 512))[0, 0]) == 512.0
    return count * 16


def train_until_out_of_memory() -> None:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    batch = 64
    while True:
        model(torch.ones(batch, 1024)).sum().backward()
        batch *= 2


def growth_over_shapes(shapes: int) -> int:
    """Bytes that products in bfloat16 leave behind, each of another shape, once the first of them have been computed."""
    import torch

    from brim.machine.child import data_bytes

    weight = torch.ones(512, 256, dtype=torch.bfloat16, requires_grad=True)
    before = 0
    for place in range(20 + shapes):
        if place == 20:
            before = data_bytes()
        torch.nn.functional.linear(torch.ones(40 + place, 256, dtype=torch.bfloat16, requires_grad=True), weight).sum().backward()  # type: ignore[no-untyped-call]
    return data_bytes() - before


def keep(size: int) -> None:
    """A warm-up that holds memory: it belongs to the footprint, not to the budget."""
    KEPT.append(bytearray(size))


def fail(message: str) -> None:
    raise ValueError(message)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def leave(code: int) -> None:
    sys.exit(code)


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def real_segmentation_fault() -> None:
    ctypes.string_at(0)


def native_bad_alloc() -> None:
    """What a C++ library does when it cannot allocate and nobody catches it."""
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    os.abort()


def say(text: str) -> None:
    print(text)
    print(text.upper(), file=sys.stderr)


def start_a_sleeper(pid_file: str) -> None:
    """Start a grandchild that would outlive us."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(sleeper.pid))


def start_a_sleeper_and_hang(pid_file: str) -> None:
    start_a_sleeper(pid_file)
    time.sleep(600)


def unpicklable() -> Any:
    return lambda: None


def large_result(size: int) -> bytes:
    return b"x" * size


def start_a_daemon(pid_file: str) -> None:
    """A grandchild in a session of its own, whose parent is gone: what a careless script leaves behind."""
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    open(sys.argv[1], 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    subprocess.run([sys.executable, "-c", program, pid_file], check=True)
    while not Path(pid_file).exists() or not Path(pid_file).read_text():
        time.sleep(0.01)


def start_a_thread() -> int:
    import threading

    found: list[int] = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start()
    thread.join()
    return found[0]


def multiply_arrays() -> float:
    import numpy as np

    square = np.ones((512, 512))
    return float((square @ square)[0, 0])


class Poison:
    """Unpickles nowhere."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def poisoned_value() -> Any:
    return Poison()


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raise_mute() -> None:
    raise MuteError
