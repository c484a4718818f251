"""The suite that runs on the CUDA build of torch with emulated cards: `.venv-cuda/bin/python -m pytest tests/emulated`.

`on_card` runs a snippet of Python on a card, in a child process with this interpreter, and returns the value that the snippet assigns to
`result`. BRIM_EMULATOR_PYTHON names another interpreter for the children: `test_card.py` and `test_nccl.py` run on any CUDA build of torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from brim.emulator.build import compiled, torch_build
from brim.errors import BrimError
from brim.machine.host import cache_folder

# Tests have their own cache folders. They share the compiled card of this machine, because compiling takes half a minute.
_COMPILED = cache_folder() / "emulator"
PYTHON = os.environ.get("BRIM_EMULATOR_PYTHON", sys.executable)
"""The interpreter of the children: this one, or one with another build of torch."""
_RESULT = "BRIM_TEST_RESULT"
# Each rank of a snippet writes its result to its own file; `torchrun` sets RANK.
_WRITE = f"""

import json as _json, os as _os
with open(_os.environ["{_RESULT}"] + "." + _os.environ.get("RANK", "0"), "w") as _file:
    _json.dump(globals().get("result"), _file)
"""


# A shell starts background jobs with SIGINT ignored. The children would inherit that and ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _missing() -> str:
    """Why no emulated card is available; empty if one is."""
    try:
        compiled(torch_build(PYTHON))
    except BrimError as error:
        return error.message
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    emulated = [item for item in items if folder in item.path.parents]
    if emulated and _missing():
        for item in emulated:
            item.add_marker(pytest.mark.skip(reason=f"no emulated card: {_missing()}"))


@pytest.fixture(autouse=True)
def _compiled_once(_own_surroundings: None) -> None:
    (Path(os.environ["BRIM_CACHE"]) / "emulator").symlink_to(_COMPILED, target_is_directory=True)


@dataclass(frozen=True)
class OnCard:
    """The exit code, output and results of a snippet."""

    returncode: int
    stdout: str
    stderr: str
    results: tuple[Any, ...]
    """`result` of each rank; None for a rank that failed."""

    @property
    def result(self) -> Any:
        """`result` of rank 0."""
        return self.results[0]


class RunOnCard(Protocol):
    """The type of the fixture `on_card`."""

    def __call__(
        self,
        code: str,
        gpu: str = "t4",
        *,
        memory: str | None = None,
        count: int | None = None,
        compute: bool = False,
        nproc: int = 1,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        check: bool = True,
        timeout: float = 300,
    ) -> OnCard: ...


@pytest.fixture
def on_card(tmp_path: Path) -> RunOnCard:
    """Run a snippet on an emulated card; with `nproc` above 1 under torchrun, one card per rank. If the snippet fails, the test fails and
    shows its output, unless `check` is false. `memory` is a size ("4GiB") for each card; `env` is added to the environment.
    """
    runs = 0

    def run(
        code: str, gpu: str = "t4", *, memory: str | None = None, count: int | None = None, compute: bool = False, nproc: int = 1,
        args: tuple[str, ...] = (), env: dict[str, str] | None = None, check: bool = True, timeout: float = 300,
    ) -> OnCard:  # fmt: skip
        nonlocal runs
        runs += 1
        script, results = tmp_path / f"snippet{runs}.py", tmp_path / f"result{runs}"
        script.write_text(textwrap.dedent(code) + _WRITE)
        card = ["--gpu", gpu, *(["--memory", memory] if memory else []), *(["--compute"] if compute else [])]
        if nproc > 1 or count:
            card += ["--count", str(count or nproc)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
        command = [sys.executable, "-m", "brim.emulator", *card, "--", PYTHON, *launcher, str(script), *args]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**_environment(), _RESULT: str(results), **(env or {})},
        )
        files = [Path(f"{results}.{rank}") for rank in range(nproc)]
        values = tuple(json.loads(file.read_text()) if file.exists() else None for file in files)
        if check and done.returncode:
            pytest.fail(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}")
        return OnCard(done.returncode, done.stdout, done.stderr, values)

    return run


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BRIM_CARD", "CUDA_", "PYTORCH_", "DS_"))}
    # Some virtual machines report AMX but do not support it (SIGILL in bf16). One thread per process, because several run at once.
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **kept}
