"""The host is what this process may use of it: containers, quotas and ulimits included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from brim.machine.host import cache_folder, cgroup_cpu_quota, cgroup_memory, host, multiplies_bf16, oom_kills
from brim.sizes import GIB, MIB


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    return _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/job/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{600 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
            "sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 2\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        },
    )


def test_a_limit_of_an_outer_group_holds_inside(version_2: Path) -> None:
    (limit,) = cgroup_memory(version_2)
    assert limit.total_bytes == 2 * GIB
    assert limit.available_bytes == 2 * GIB - 500 * MIB  # cached file pages can be taken back
    assert limit.source == "cgroup v2 /sys/fs/cgroup/job"
    assert cgroup_cpu_quota(version_2) == 1.5
    assert oom_kills(version_2) == 2


def test_the_container_decides_over_the_computer(version_2: Path) -> None:
    seen = host(version_2)
    assert seen.memory_bytes == 2 * GIB
    assert seen.available_bytes <= 2 * GIB - 500 * MIB
    assert seen.memory_limited_by.startswith("cgroup v2")
    assert seen.cores == min(1.5, seen.affinity_cores)
    assert seen.shm_bytes is None


def test_a_soft_limit_counts_as_the_limit(version_2: Path) -> None:
    (version_2 / "sys/fs/cgroup/job/memory.high").write_text(f"{GIB}\n")
    (limit,) = cgroup_memory(version_2)
    assert limit.total_bytes == GIB


def test_version_1_is_read_too(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"total_inactive_file {100 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    (limit,) = cgroup_memory(root)
    assert (limit.total_bytes, limit.available_bytes) == (GIB, GIB - 200 * MIB)
    assert cgroup_cpu_quota(root) == 0.5


def test_the_path_of_another_namespace_falls_back_to_the_root(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/xyz\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        },
    )
    assert [limit.total_bytes for limit in cgroup_memory(root)] == [GIB]


@pytest.mark.parametrize("broken", ["", "garbage", "0::", "x:y:z\n::\n"])
def test_a_strange_proc_is_no_limit_and_no_error(tmp_path: Path, broken: str) -> None:
    root = _tree(tmp_path, {"proc/self/cgroup": broken})
    assert list(cgroup_memory(root)) == []
    assert cgroup_cpu_quota(root) is None
    assert oom_kills(root) == 0


def test_this_very_host_makes_sense() -> None:
    seen = host()
    assert 0 < seen.available_bytes <= seen.memory_bytes <= psutil.virtual_memory().total
    assert 0 < seen.cores <= seen.affinity_cores
    assert seen.processor


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and ulimits as Linux has them")
def test_affinity_and_ulimit_are_honoured_for_real() -> None:
    program = (
        "import os, resource; os.sched_setaffinity(0, {0}); resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, -1));"
        "from brim.machine.host import host; h = host(); print(h.affinity_cores, h.memory_limited_by, h.memory_bytes)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["1", "RLIMIT_DATA", str(3 << 30)]


MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(MEMORY_CGROUP / "cgroup.procs", os.W_OK), reason="needs a writable cgroup v1 memory hierarchy")
def test_a_real_control_group_is_seen_from_inside() -> None:
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line).rpartition(":")[2]
    group = MEMORY_CGROUP / own.strip("/") / f"brim-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(512 * MIB))
    except OSError as error:
        pytest.skip(f"this machine does not let a test make a control group: {error}")
    program = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
        "from brim.machine.host import host; h = host(); print(h.memory_bytes, h.memory_limited_by)"
    )
    try:
        ended = subprocess.run([sys.executable, "-c", program, str(group)], capture_output=True, text=True, check=True)
    finally:
        group.rmdir()
    size, source = ended.stdout.split(maxsplit=1)
    assert int(size) == 512 * MIB
    assert source.startswith("cgroup v1")


def test_the_cache_folder_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BRIM_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("BRIM_CACHE")
    assert cache_folder() == Path("/xdg/brim")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/brim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache/brim"


@pytest.mark.parametrize(
    ("cpuinfo", "has_instructions"),
    [
        ("flags\t\t: sse2 avx512f avx512_vnni\n", False),
        ("flags\t\t: avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("processor\t: 0\n", True),
    ],
)
def test_the_processors_features_say_whether_it_multiplies_bf16(tmp_path: Path, cpuinfo: str, has_instructions: bool) -> None:
    assert multiplies_bf16(_tree(tmp_path, {"proc/cpuinfo": cpuinfo})) is has_instructions
