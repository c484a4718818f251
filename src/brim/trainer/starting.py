"""The process between brim and its ranks: torchrun or accelerate as they are, without their tracebacks.

    python -m brim.trainer.starting torchrun|accelerate ARGUMENTS

What failed is told by brim, once; the launcher's own report repeats it for each rank and says less.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.machine import child
from brim.machine.screen import outlive_the_terminal
from brim.record import write_atomically

if TYPE_CHECKING:
    import socket


def main(launcher: str, arguments: list[str]) -> int:
    """Start the ranks and wait for them. 1 where one has failed."""
    outlive_the_terminal(stdout=True)
    child.die_with_parent()
    os.environ[child.PARENT_VARIABLE] = str(os.getpid())
    for name in ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher", "accelerate"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    bind_stores()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        if launcher == "accelerate":
            _accelerate(arguments)
        else:
            _torchrun(arguments)
    except ChildFailedError as error:
        _tell_of_signals({rank: failure.exitcode for rank, failure in error.failures.items()}, Path(arguments[-2]))
        return 1
    except SignalException:
        return 1
    except Exception as error:  # noqa: BLE001 (the machines did not meet, a port is taken: said to whoever waits, in one sentence)
        _tell(error)
        return 1
    return 0


def bind_stores() -> None:
    """From now on torch's stores listen at the address that they are given. By themselves they listen on all interfaces."""
    import torch.distributed as dist

    distributed: Any = dist
    original: Any = distributed.TCPStore
    if original.__name__ == "BoundStore":
        return

    class BoundStore(original):  # type: ignore[misc]
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **named: Any
        ) -> None:
            listener = _listener(host_name, port) if is_master and named.get("master_listen_fd") is None else None
            if listener is not None:
                port = listener.getsockname()[1]
                named["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *rest, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get("TCPStore") is original:
            vars(module)["TCPStore"] = BoundStore


def _listener(host: str, port: int) -> socket.socket | None:
    """None where the address is not one of this machine alone: a launcher of the user's own may forward it."""
    from brim.trainer.rendezvous import is_only_here, listen_at

    if is_only_here(host):
        return None
    try:
        return listen_at(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def _tell(error: Exception) -> None:
    from brim.locale import _, activate
    from brim.trainer.rank import OUTBOX_VARIABLE
    from brim.trainer.worker import Ended, show_traceback

    show_traceback()
    activate(os.environ.get("BRIM_LANG") or "en")
    why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    # What a rank has to say comes first.
    ended = Ended(error="ChildError", message=_("The processes did not meet: {why}.").format(why=why), is_echo=True)
    write_atomically(Path(os.environ[OUTBOX_VARIABLE]) / "ended-launcher.json", json.dumps(vars(ended)))


def _tell_of_signals(codes: dict[int, int], folder: Path) -> None:
    """A rank that a signal ended said nothing itself. SIGTERM is how the launcher ends the ranks that are left."""
    from brim.locale import _, activate, sentences
    from brim.trainer.launching import explain_end, how_to_go_on
    from brim.trainer.rank import OUTBOX_VARIABLE
    from brim.trainer.worker import Ended

    rank = next((rank for rank, code in codes.items() if code < 0 and -code not in {signal.SIGTERM, signal.SIGINT}), None)
    if rank is None:
        return
    activate(os.environ.get("BRIM_LANG") or "en")
    message, workaround = explain_end(-codes[rank], folder)
    told = sentences(_("Rank {rank} ended without reporting an error.").format(rank=rank), message)
    ended = Ended(error="ChildError", message=told, hint=sentences(workaround, how_to_go_on(folder) or "") or None)
    write_atomically(Path(os.environ[OUTBOX_VARIABLE]) / "ended-launcher.json", json.dumps(vars(ended)))


def _torchrun(arguments: list[str]) -> None:
    import torch.distributed.run as launcher

    torchrun: Any = launcher
    torchrun.run(torchrun.parse_args(arguments))


def _accelerate(arguments: list[str]) -> None:
    from accelerate.commands import launch

    accelerate: Any = launch
    accelerate.launch_command(accelerate.launch_command_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
