"""The process between brim and its ranks: torchrun or accelerate as they are, without their tracebacks.

    python -m brim.trainer.starting torchrun|accelerate ARGUMENTS

What failed is told by brim, once; the launcher's own report repeats it for each rank and says less.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from brim.machine import child


def main(launcher: str, arguments: list[str]) -> int:
    """Start the ranks and wait for them. 1 where one has failed."""
    child.die_with_parent()
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
    return 0


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
