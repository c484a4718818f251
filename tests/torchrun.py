"""Two real ranks: torchrun on this machine's loopback, with what it said in the report, and started again only where the ranks never met.

There is no port to fight for. The launcher's stores listen on port 0, a port that the system picks and holds at once, and the ranks are
clients of the launcher's store: nothing is found free first and bound later, however many launches run at once. `--standalone` does that
too, but makes the machine known by its name, which it asks the resolver for, and gloo listens wherever that name leads.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
LOOPBACK = "127.0.0.1"
MOST_STARTS = 3
_TAIL = 6000
"""Characters of stdout and of stderr that a failure shows."""
_ENDING_SECONDS = 60
"""torchrun gives its ranks 30 s to end before it kills them."""

NEVER_MET = re.compile(
    r"""EADDRINUSE | Address\ already\ in\ use | Rendezvous(Connection|Timeout)Error | Gloo\ connectFullMesh\ failed
    | socket\ has\ failed\ to\ (bind|listen) | client\ socket\ has\ (timed\ out|failed\ to\ connect)
    | TCP\ client\ failed\ to\ connect/validate\ to\ host\ \S+\ -\ timed\ out | seconds\ waiting\ for\ clients""",
    re.IGNORECASE | re.VERBOSE,
)
"""What c10d, its TCPStore and gloo say when they cannot connect. A connection that ends later is another matter: a rank died."""
_WARNING = re.compile(r"^(\[rank\d+\]:)?\[W")
"""How c10d begins a line about an attempt that it makes again by itself."""

_OF_ANOTHER_LAUNCH = ("MASTER_", "PET_", "TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV", "GLOO_")
_OF_ANOTHER_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Ended:
    """How torchrun ended, and what it and the ranks said. Without a code, it was asked to end when its time was up."""

    code: int | None
    out: str
    err: str

    def never_met(self) -> bool:
        """Whether the ranks, or the launcher, did not even come to be connected."""
        said = (line for text in (self.out, self.err) for line in text.splitlines())
        return self.code != 0 and any(NEVER_MET.search(line) for line in said if not _WARNING.match(line))

    def __str__(self) -> str:
        how = "did not end in time" if self.code is None else f"ended with {self.code}"
        return f"torchrun {how}\n--- stdout\n{self.out[-_TAIL:]}\n--- stderr\n{self.err[-_TAIL:]}"


def on_two_ranks(program: str, *arguments: str, seconds: float) -> None:
    """Run a module, which must end well on both ranks."""
    on_ranks(2, program, *arguments, seconds=seconds)


def on_ranks(ranks: int, program: str, *arguments: str, seconds: float) -> None:
    """Run a module, which must end well on all of so many ranks."""
    ended = launch(program, *arguments, seconds=seconds, ranks=ranks)
    assert ended.code == 0, str(ended)


def launch(program: str, *arguments: str, seconds: float, ranks: int = 2) -> Ended:
    """Run a module on two ranks or more, to whatever end but that of time. `seconds` are for all starts together."""
    until = monotonic() + seconds
    for start in range(1, MOST_STARTS + 1):
        ended = _launch_once(program, arguments, until - monotonic(), ranks)
        if start == MOST_STARTS or not ended.never_met():
            break
        warnings.warn(f"The ranks of {program} never met; they are started again. {ended}", stacklevel=2)
    assert ended.code is not None, str(ended)
    return ended


def command(program: str, *arguments: str, ranks: int = 2) -> list[str]:
    """No name is looked up, and whoever hosts the store is told so."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--rdzv-id={uuid.uuid4()}", "--rdzv-conf=is_host=true",
        f"--local-addr={LOOPBACK}", "-m", program, *arguments,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Ours, without what another launch may have left in it. Each rank has one thread: two ranks are two already."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_ANOTHER_LAUNCH) and name not in _OF_ANOTHER_RANK
    }
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    of_ours = {"GLOO_SOCKET_IFNAME": _loopback_interface(), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path}
    return {**kept, **of_ours}


def leave() -> NoReturn:
    """A rank's last act, when all that it found is written: it ends here and now.

    gloo's threads outlive `destroy_process_group` (seen with torch 2.13: three of them, also after a collection). One that wants the GIL
    while the interpreter ends is unwound by force, and that aborts the process, now and then: "terminate called without an active
    exception", SIGABRT.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on a Mac."""
    return next(name for _index, name in socket.if_nameindex() if name.startswith("lo"))


def _launch_once(program: str, arguments: tuple[str, ...], seconds: float, ranks: int) -> Ended:
    # Files, not pipes: nobody needs to read them while the ranks run, and a rank that outlives torchrun holds nobody up.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command(program, *arguments, ranks=ranks), cwd=ROOT, env=environment(), stdout=out, stderr=err)
        code: int | None = None
        try:
            code = process.wait(timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Asked to end, torchrun ends its ranks; killed, it would leave them behind.
            process.terminate()
            process.wait(timeout=_ENDING_SECONDS)
        return Ended(code, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
