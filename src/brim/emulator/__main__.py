"""`python -m brim.emulator --gpu t4 -- command`: replace this process with a command that runs on an emulated card.

It prints no report and does not redirect writes. It is for tests and benchmarks; users run `brim emulate`.
"""

from __future__ import annotations

import argparse
import os
import sys

from brim.emulator.build import compiled, interpreter, torch_build
from brim.emulator.card import check_capability, emulated_card, environment, session
from brim.errors import BrimError
from brim.machine.capability import CONTEXT_BYTES
from brim.machine.screen import say
from brim.sizes import parse_size


def main() -> int:
    """Replace this process with the command. Returns an exit code only if that fails."""
    parser = argparse.ArgumentParser(prog="python -m brim.emulator", description="Run a command on an emulated CUDA card.")
    parser.add_argument("--gpu", default="t4", help="a GPU of the catalogue (t4, rtx-3080*2) or a size (24GiB)")
    parser.add_argument("--memory", type=parse_size, help="memory of each card; default: the catalogue's")
    parser.add_argument("--context", type=parse_size, default=CONTEXT_BYTES, help="memory of the CUDA context of each process")
    parser.add_argument("--count", type=int, help="number of cards")
    parser.add_argument("--compute", action="store_true", help="compute floating-point operators on the host")
    parser.add_argument("--trace", action="count", default=0, help="print memory calls; twice: kernels too")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given")
    try:
        card = emulated_card(options.gpu, memory_bytes=options.memory, count=options.count, context_bytes=options.context)
        torch = torch_build(interpreter(command))
        check_capability(card, torch)
        libraries = compiled(torch)
    except BrimError as error:
        say(error.message)
        if error.hint:
            say(error.hint)
        return error.exit_code
    if card.assumption:
        say(card.assumption)
    with session(inherited=True) as shared:
        child = environment(card, libraries, shared, compute=options.compute, trace=options.trace)
        try:
            os.execvpe(command[0], command, child)  # noqa: S606 (the command is the user's own)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
    return 127


if __name__ == "__main__":
    sys.exit(main())
