"""`brim demo`: what this version can do, shown for real on this machine's CPU. It grows with every capability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from brim.cli._command import verb
from brim.cli._machine import machine_rows
from brim.cli._output import bar, print_json
from brim.locale import N_, _
from brim.sizes import GIB, MIB, format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUDGET_BYTES = 256 * MIB
_EXAMPLES = (("tinyllama", "t4"), ("llama-3.1-8b", "rtx-4090"), ("chatlm-mini-chinese", "rtx-3080-20gb"))


@verb(N_("Show on this machine what this version of brim can do. Needs no GPU, no download and less than a minute."))
def command(as_json: bool) -> None:
    """Run the stages one after the other; each says in one line what it proves."""
    document: dict[str, Any] = {"schema": "brim.demo/1"}
    for title, key, value, lines in _stages():
        document[key] = value
        if not as_json:
            click.secho(title, bold=True)
            for line in lines:
                click.echo(f"  {line}")
            click.echo()
    if as_json:
        print_json(document)


def _stages() -> Iterator[tuple[str, str, Any, list[str]]]:
    from brim.machine.detect import detect

    machine = detect()
    lines = [f"{label:<9} {value}" for label, value in machine_rows(machine)]
    yield _("1. This machine, as a training process may use it"), "machine", machine.to_dict(), lines
    yield _catalogue_stage()
    yield _budget_stage()


def _catalogue_stage() -> tuple[str, str, Any, list[str]]:
    """The catalogues answer without a download: weights alone, against the card's memory."""
    from brim.machine.catalogue import find_gpu, gpus
    from brim.workload.cards import models
    from brim.workload.resolve import find_model

    lines = [
        _("{gpus} GPUs and {models} models are known, nothing is downloaded.").format(gpus=len(gpus()), models=len(models()))
    ]
    rows = []
    for model_name, gpu_name in _EXAMPLES:
        parameters = find_model(model_name).parameters()
        gpu = find_gpu(gpu_name).gpu
        share = 2 * parameters / gpu.usable_bytes
        rows.append({"model": model_name, "parameters": parameters, "gpu": gpu.name, "usable_bytes": gpu.usable_bytes})
        text = _("{model} has {count} parameters: half-precision weights alone take {share:.0%} of a {gpu} ({usable})")
        lines.append(text.format(
            model=model_name, count=format_count(parameters), share=share, gpu=gpu.name, usable=format_bytes(gpu.usable_bytes)
        ))  # fmt: skip
        lines.append(f"|{bar(share, width=40)}|")
    return _("2. The catalogues"), "examples", rows, lines


def _budget_stage() -> tuple[str, str, Any, list[str]]:
    """A real out-of-memory, and a parent that is none the worse for it."""
    from brim.errors import UnsupportedError
    from brim.machine.budget import ForkServer

    outcomes = []
    title = _("3. A memory limit that is real: the CPU with a budget of {size}").format(size=format_bytes(_BUDGET_BYTES))
    try:
        with ForkServer() as server:
            for size in (_BUDGET_BYTES // 2, GIB):
                outcome = server.run(fill, size, memory_bytes=_BUDGET_BYTES, preload=("torch",), timeout_seconds=120)
                outcomes.append((size, outcome))
    except UnsupportedError as error:
        return title, "budget", None, [error.message]
    lines = []
    for size, outcome in outcomes:
        answer = _("it ran") if outcome.verdict == "ok" else outcome.message
        lines.append(_("a tensor of {size} in a child process: {answer}").format(size=format_bytes(size), answer=answer))
    survived = [outcome.verdict for _size, outcome in outcomes] == ["ok", "out-of-memory"]
    lines.append(
        _("So running out of memory is an answer, not a crash: this process lives on.")
        if survived
        else _("That is not what was expected; please report it with the output of `brim env`.")
    )
    value = [{"bytes": size, "verdict": outcome.verdict, "message": outcome.message} for size, outcome in outcomes]
    return title, "budget", {"budget_bytes": _BUDGET_BYTES, "trials": value}, lines


def fill(size_bytes: int) -> float:
    """Allocate and touch a tensor of this size. Runs in a child process."""
    import torch

    return float(torch.ones(size_bytes // 4).sum())
