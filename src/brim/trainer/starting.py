"""The process between brim and its ranks: torchrun or accelerate as they are, without their tracebacks.

    python -m brim.trainer.starting torchrun|accelerate ARGUMENTS

What failed is told by brim, once; the launcher's own report repeats it for each rank and says less.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from brim.machine import child
from brim.machine.screen import outlive_the_terminal
from brim.record import write_atomically


def main(launcher: str, arguments: list[str]) -> int:
    """Start the ranks and wait for them. 1 where one has failed."""
    outlive_the_terminal(stdout=True)
    child.die_with_parent()
    os.environ[child.PARENT_VARIABLE] = str(os.getpid())
    for name in ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher", "accelerate"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        if launcher == "accelerate":
            _accelerate(arguments)
        else:
            _torchrun(arguments)
    except (ChildFailedError, SignalException):
        return 1
    except Exception as error:  # noqa: BLE001 (the machines did not meet, a port is taken: said to whoever waits, in one sentence)
        _tell(error)
        return 1
    return 0


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
