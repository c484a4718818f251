"""A child process under a budget comes back as what happened to it, and its parent is unharmed. All for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim import ChildError, ForkServer, OutOfMemoryError, UnsupportedError, UsageError, run, run_command
from brim.machine.budget import MALLOC_ENVIRONMENT
from brim.machine.outcome import last_words
from brim.sizes import GIB, MIB
from tests.machine import child_tasks as tasks

needs_limit = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits allocations on Linux only")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _dies_soon(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_alive(pid)


def test_a_result_comes_back(server: ForkServer) -> None:
    outcome = server.run(tasks.double, 21)
    assert (outcome.verdict, outcome.value, outcome.message, outcome.exit_code) == ("ok", 42, "", 0)
    assert outcome.unwrap() == 42


def test_a_large_result_comes_back_whole(server: ForkServer) -> None:
    assert len(server.run(tasks.large_result, 20 * MIB).unwrap()) == 20 * MIB


def test_a_task_is_no_fork_of_a_process_that_has_initialised_cuda() -> None:
    with ForkServer() as server:
        for _attempt in range(2):
            outcome = server.run(tasks.can_use_cuda, preload=("torch", "tests.machine.touches_cuda"))
            assert (outcome.verdict, outcome.value) == ("ok", True), outcome.message
        assert server.run(tasks.fill_tensor, 2 * GIB, memory_bytes=256 * MIB).verdict == "out-of-memory"
        assert server.run(tasks.double, 21).value == 42


@needs_limit
def test_a_child_that_allocates_past_a_gibibyte_comes_back_as_out_of_memory() -> None:
    outcome = run(tasks.fill_bytes, 2 * GIB, memory_bytes=GIB)
    assert outcome.verdict == "out-of-memory"
    assert outcome.family == "cpu"
    assert "1.00 GiB" in outcome.message
    assert "MemoryError" in outcome.message
    assert "fill_bytes" in outcome.traceback
    assert len(bytearray(2 * GIB)) == 2 * GIB  # the parent has no limit
    with pytest.raises(OutOfMemoryError):
        outcome.unwrap()


@needs_limit
def test_torch_raises_its_real_error_under_a_budget_and_works_below_it(server: ForkServer) -> None:
    above = server.run(tasks.fill_tensor, GIB + MIB, memory_bytes=GIB, preload=("torch",))
    assert above.verdict == "out-of-memory"
    assert "DefaultCPUAllocator" in above.message
    below = server.run(tasks.fill_tensor, GIB - 16 * MIB, memory_bytes=GIB, preload=("torch",))
    assert below.verdict == "ok"


@needs_limit
def test_a_process_that_ran_out_frees_and_works_on(server: ForkServer) -> None:
    outcome = server.run(tasks.largest_tensor_mib, memory_bytes=512 * MIB, preload=("torch",))
    assert outcome.verdict == "ok"
    assert 480 <= outcome.value <= 512


@needs_limit
def test_the_budget_counts_from_the_footprint_after_warm_up(server: ForkServer) -> None:
    """The footprint of torch and of the warm-up is not the work's: a budget below both still holds its own size."""
    outcome = server.run(tasks.fill_bytes, 60 * MIB, memory_bytes=64 * MIB, preload=("torch",), warm_up=_hold_300_mib)
    assert outcome.verdict == "ok"
    assert outcome.footprint_bytes is not None
    assert outcome.limit_bytes == outcome.footprint_bytes + 64 * MIB
    assert outcome.footprint_bytes > 300 * MIB
    assert server.run(tasks.fill_bytes, 70 * MIB, memory_bytes=64 * MIB).verdict == "out-of-memory"


def _hold_300_mib() -> None:
    tasks.keep(300 * MIB)


@needs_limit
def test_the_same_budget_holds_the_same_every_time(server: ForkServer) -> None:
    answers = {server.run(tasks.largest_tensor_mib, memory_bytes=300 * MIB, preload=("torch",)).value for _repeat in range(4)}
    assert len(answers) == 1


@needs_limit
def test_a_training_that_grows_ends_in_the_real_error(server: ForkServer) -> None:
    outcome = server.run(tasks.train_until_out_of_memory, memory_bytes=256 * MIB, preload=("torch",), timeout_seconds=120)
    assert outcome.verdict == "out-of-memory"
    assert "train_until_out_of_memory" in outcome.traceback


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "out-of-memory killer"),
        (signal.SIGILL, "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGBUS, "/dev/shm"),
    ],
)
def test_a_child_ended_by_a_signal_is_told_as_killed(server: ForkServer, number: signal.Signals, says: str) -> None:
    outcome = server.run(tasks.signal_myself, int(number))
    assert (outcome.verdict, outcome.signal) == ("killed", number)
    assert says in outcome.message
    with pytest.raises(ChildError):
        outcome.unwrap()


def test_a_real_segmentation_fault_leaves_its_python_stack(server: ForkServer) -> None:
    outcome = server.run(tasks.real_segmentation_fault)
    assert (outcome.verdict, outcome.signal) == ("killed", signal.SIGSEGV)
    assert "real_segmentation_fault" in outcome.stderr


def test_a_native_abort_for_want_of_memory_is_out_of_memory(server: ForkServer) -> None:
    outcome = server.run(tasks.native_bad_alloc)
    assert (outcome.verdict, outcome.family, outcome.signal) == ("out-of-memory", "cpu", signal.SIGABRT)


def test_a_child_that_hangs_is_ended_in_time(server: ForkServer) -> None:
    outcome = server.run(tasks.sleep, 600, timeout_seconds=0.5)
    assert outcome.verdict == "timeout"
    assert "0.5 s" in outcome.message
    assert outcome.seconds < 30
    assert server.run(tasks.double, 1).value == 2  # and the server serves on


def test_a_child_that_raises_is_a_crash_with_its_traceback(server: ForkServer) -> None:
    outcome = server.run(tasks.fail, "the model is wrong")
    assert (outcome.verdict, outcome.exit_code) == ("crash", 1)
    assert outcome.message == "The child process failed: ValueError: the model is wrong"
    assert "raise ValueError(message)" in outcome.traceback
    with pytest.raises(ChildError, match="the model is wrong"):
        outcome.unwrap()


def test_a_child_that_leaves_is_judged_by_its_code(server: ForkServer) -> None:
    assert server.run(tasks.leave, 0).verdict == "ok"
    assert server.run(tasks.leave, 3).verdict == "crash"


def test_what_a_child_prints_is_kept_and_not_shown(server: ForkServer, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = server.run(tasks.say, "hello")
    assert (outcome.stdout, outcome.stderr) == ("hello\n", "HELLO\n")
    assert capfd.readouterr() == ("", "")


def test_the_allocator_thresholds_are_set_in_the_child_and_not_here(server: ForkServer) -> None:
    for name, value in MALLOC_ENVIRONMENT.items():
        assert server.run(tasks.environment, name).value == value
        assert name not in os.environ


def test_products_of_ever_other_shapes_do_not_fill_the_memory(server: ForkServer) -> None:
    """With oneDNN's own caches they leave 3 MiB each."""
    assert server.run(tasks.growth_over_shapes, 40, preload=("torch",)).value < 40 * MIB


def test_what_cannot_be_sent_is_refused_before_anything_starts(server: ForkServer) -> None:
    with pytest.raises(UsageError, match="cannot be sent to a child process"):
        server.run(lambda: 1)
    outcome = server.run(tasks.unpicklable)
    assert outcome.verdict == "crash"


def test_a_module_that_does_not_exist_is_a_crash_of_the_task(server: ForkServer) -> None:
    outcome = server.run(tasks.double, 1, preload=("no_such_module",))
    assert outcome.verdict == "crash"
    assert "No module named 'no_such_module'" in outcome.message


def test_a_module_that_ends_the_server_is_an_outcome_and_the_next_run_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly_module.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ForkServer() as server:
        assert server.run(tasks.double, 1, preload=("deadly_module",)).verdict == "killed"
        assert server.run(tasks.double, 1).value == 2


@pytest.mark.parametrize("function", [tasks.start_a_sleeper, tasks.start_a_sleeper_and_hang, tasks.start_a_daemon])
def test_nothing_that_a_child_started_outlives_it(server: ForkServer, function: object, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The one that hangs is given longer where the machine is so busy that it has not started anybody yet.
    for seconds in (3, 12, 48) if function is tasks.start_a_sleeper_and_hang else (60,):
        server.run(function, str(pid_file), timeout_seconds=seconds)  # type: ignore[arg-type]
        if pid_file.exists() and pid_file.read_text():
            break
    assert _dies_soon(int(pid_file.read_text()))


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = textwrap.dedent(f"""
        from brim import ForkServer
        from tests.machine import child_tasks as tasks
        with ForkServer() as server:
            server.run(tasks.start_a_sleeper_and_hang, {str(pid_file)!r})
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 120
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert _dies_soon(int(pid_file.read_text()))


def test_a_function_of_a_script_can_be_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from brim import run

            def triple(number):
                return number * 3

            if __name__ == "__main__":
                print(run(triple, 14).unwrap())
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "42\n"


def test_a_script_without_a_guard_is_told_instead_of_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from brim import run\ndef one():\n    return 1\nprint('top')\nprint(run(one).message)\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.count("top") == 1
    assert "while it is being imported" in ended.stdout


def test_a_function_of_a_prompt_is_refused() -> None:
    program = "from brim import run, UsageError\ndef f(): pass\ntry:\n    run(f)\nexcept UsageError as error:\n    print('refused', error)"
    for arguments, text in ((["-c", program], None), (["-"], program)):
        ended = subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, check=True, timeout=60)
        assert ended.stdout.startswith("refused"), ended


def test_what_cannot_be_a_budget_a_time_or_a_command_is_refused(server: ForkServer) -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="no time at all"):
            server.run(tasks.double, 1, timeout_seconds=seconds)
    for size in (0, -5, "lots", "2G"):
        with pytest.raises(UsageError):
            server.run(tasks.double, 1, memory_bytes=size)
    commands: list[Any] = ["ls -l", [], ()]
    for command in commands:
        with pytest.raises(UsageError, match="list of words"):
            run_command(command)
    assert server.run(tasks.double, 1, memory_bytes="64MiB", timeout_seconds=float("inf")).value == 2


def test_what_a_preloaded_module_prints_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud_module.py").write_text("print('loud')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(tasks.double, 1, preload=("loud_module",)).value == 2
    assert capfd.readouterr() == ("", "")


def test_interrupting_the_parent_ends_the_child(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import os, pathlib, signal, time
            from brim import run

            # A job started in the background of a shell ignores interrupts; this test is about one that does not.
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def hang():
                pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
                time.sleep(600)

            if __name__ == "__main__":
                run(hang)
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in parent.communicate(timeout=120)[1]
    assert _dies_soon(int(pid_file.read_text()))


PYTHON = sys.executable


@needs_limit
@pytest.mark.parametrize("function", [tasks.start_a_thread, tasks.multiply_arrays])
@pytest.mark.parametrize("mib", [1, 2, 4, 8, 40, 64])
def test_threads_and_libraries_that_starve_are_out_of_memory_or_fine(server: ForkServer, function: Any, mib: int) -> None:
    outcome = server.run(function, memory_bytes=mib * MIB, preload=("numpy",), timeout_seconds=120)
    assert outcome.verdict in {"ok", "out-of-memory"}, outcome


def test_the_end_is_judged_by_the_last_words() -> None:
    survived = "CUDA out of memory. Tried to allocate 2.00 GiB\nretrying with a smaller batch\n"
    crash = survived + "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'x'\n"
    assert last_words(crash) == "KeyError: 'x'"
    assert "Tried to allocate" not in last_words(survived + "\n".join(f"step {n}" for n in range(9)))
    outcome = run_command([PYTHON, "-c", "import sys; sys.stderr.write('CUDA out of memory. Tried to allocate'); {}['x']"])
    assert outcome.verdict == "crash"


def test_a_value_that_cannot_be_read_here_is_a_crash(server: ForkServer) -> None:
    outcome = server.run(tasks.poisoned_value)
    assert outcome.verdict == "crash"
    assert "cannot be read here" in outcome.message


def test_an_exception_that_cannot_speak_is_still_a_crash(server: ForkServer) -> None:
    outcome = server.run(tasks.raise_mute)
    assert (outcome.verdict, outcome.message) == ("crash", "The child process failed: MuteError")
    assert len(server.run(tasks.fail, "x" * 10_000_000).message) < 20_000


def test_a_server_that_died_between_runs_is_replaced() -> None:
    with ForkServer() as server:
        assert server.run(tasks.double, 1).value == 2
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        assert server.run(tasks.double, 2).value == 4
    assert server.run(tasks.double, 3).value == 6
    server.close()


@needs_limit
def test_an_administrators_limit_is_told_as_what_it_is() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))\n"
        "from brim import run; from tests.machine import child_tasks as tasks\n"
        "outcome = run(tasks.fill_bytes, 1 << 30, memory_bytes='2GiB'); print(outcome.verdict, outcome.limit_bytes, outcome.message)"
    )
    ended = subprocess.run([PYTHON, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(f"out-of-memory {600 << 20} Out of memory: MemoryError")


@needs_limit
def test_a_command_past_its_limit_is_out_of_memory() -> None:
    outcome = run_command([PYTHON, "-c", "x = bytearray(2 << 30)"], memory_bytes=GIB)
    assert (outcome.verdict, outcome.family, outcome.exit_code) == ("out-of-memory", "cpu", 1)
    assert run_command([PYTHON, "-c", "x = bytearray(2 << 20)"], memory_bytes=GIB).verdict == "ok"


@pytest.mark.parametrize(
    ("program", "verdict", "says"),
    [
        ("print('fine')", "ok", ""),
        ("raise ValueError('bad')", "crash", "exit code 1: ValueError: bad"),
        ("import sys; sys.exit(7)", "crash", "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "signal 9"),
        ("import time; time.sleep(600)", "timeout", "longer than 1 s"),
    ],
)
def test_a_command_is_told_apart_as_a_callable_is(program: str, verdict: str, says: str) -> None:
    outcome = run_command([PYTHON, "-c", program], timeout_seconds=1 if verdict == "timeout" else 60)
    assert outcome.verdict == verdict
    assert says in outcome.message


def test_a_command_that_does_not_exist_is_a_crash_that_says_so() -> None:
    outcome = run_command(["no-such-command"])
    assert (outcome.verdict, outcome.exit_code) == ("crash", 127)
    assert "No such file" in outcome.message


def test_a_command_inherits_folder_and_environment_and_no_python_path(tmp_path: Path) -> None:
    program = "import os; print(os.getcwd(), os.environ['MARK'], os.environ.get('PYTHONPATH'))"
    outcome = run_command([PYTHON, "-c", program], environment={"MARK": "here"}, folder=tmp_path)
    assert outcome.stdout.split() == [str(tmp_path), "here", str(os.environ.get("PYTHONPATH"))]


def test_a_platform_without_the_limit_is_told_so(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="needs Linux"):
        server.run(tasks.double, 1, memory_bytes=GIB)
